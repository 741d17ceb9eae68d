"""Generated models: loaded like any other, deterministic, and able to write any text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.common.errors import ConfigError
from services.common.text.chat import Chat, check_model_matches, load_model, load_tokenizer
from services.common.tiny import Kind, build, save_random_model
from services.inference.engine.torch.decoder import check_supported

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, seed=1)
    return directory


@pytest.fixture(scope="module")
def chat(made: Path) -> Chat:
    return Chat(load_tokenizer(made))


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_a_made_model_is_loaded_like_any_other(tmp_path: Path, kind: Kind) -> None:
    build(tmp_path, seed=1, kind=kind)
    model, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    check_model_matches(model, tokenizer=tokenizer)
    check_supported(model)
    assert model.config.model_type == kind
    assert 0.2e6 < sum(p.numel() for p in model.parameters()) < 0.5e6
    text = "def f(x):\n    return x ** 2  # 1234567890 ✓"
    assert Chat(tokenizer).decode(Chat(tokenizer).encode(text)) == text


def test_the_seed_decides_the_weights(made: Path, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("again", 1), ("other", 2)):
        build(tmp_path / name, seed=seed)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    first = (made / "model.safetensors").read_bytes()
    assert first == weights[0]
    assert first != weights[1]


@given(text=st.text())
def test_every_text_comes_back(chat: Chat, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text


def test_digits_stay_single(chat: Chat) -> None:
    assert len(chat.encode("1048576")) == 7


def test_tools_are_listed_and_thinking_can_be_switched_off(made: Path, chat: Chat) -> None:
    assert chat.lists_tools
    question: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    with_tools = chat.decode(chat.prompt_ids(question, [TOOL]))
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '"name": "run"' in with_tools
    plain = chat.decode(chat.prompt_ids(question))
    assert plain == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    silent = Chat(load_tokenizer(made), {"enable_thinking": False})
    assert silent.decode(silent.prompt_ids(question)) == f"{plain}<think>\n\n</think>\n\n"


def test_a_conversation_goes_on_behind_the_stop_token(chat: Chat) -> None:
    (stop,) = chat.stop_token_ids
    ids = chat.continuation_ids([{"role": "tool", "content": "42"}], last_sampled=stop)
    assert (
        chat.decode(ids)
        == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write qwen3 or qwen2"):
        build(tmp_path, seed=1, kind="gpt")  # type: ignore[arg-type]


def test_the_base_of_the_rotary_embedding_reaches_the_model(made: Path, tmp_path: Path) -> None:
    save_random_model(tmp_path, load_tokenizer(made), seed=1, head_dim=24, rope_theta=100.0)
    slowest = load_model(tmp_path).base_model.rotary_emb.inv_freq.min().item()
    assert slowest == pytest.approx(100.0 ** (-22 / 24))
