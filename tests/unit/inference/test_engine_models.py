"""Loading models and tokenizers, and telling whether they belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.errors import ConfigError, ModelMismatchError
from services.common.text.chat import check_model_matches, load_model, load_tokenizer
from services.common.weights.snapshot import named_weights
from tests.random_models import build_model


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_comes_back_with_the_same_weights(tmp_path: Path, tied: bool) -> None:
    model = build_model("qwen3", tied=tied)
    model.save_pretrained(tmp_path)
    loaded = named_weights(load_model(tmp_path))
    assert list(loaded) == list(named_weights(model))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in named_weights(model).items())
    assert ("lm_head.weight" in loaded) is not tied
    assert load_model(str(tmp_path), "bfloat16").dtype is torch.bfloat16


def test_paths_that_hold_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_model("/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="float12"):
        load_model(tmp_path, "float12")


def test_a_damaged_checkpoint_is_an_error_with_its_path(tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "other", "told"),
    [("intermediate_size", 96, 128, "{path}"), ("num_hidden_layers", 2, 3, r"missing keys model\.layers\.2")],
)
def test_weights_that_do_not_fit_the_config_are_a_mismatch(
    tmp_path: Path, key: str, value: int, other: int, told: str
) -> None:
    build_model("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(f'"{key}": {value}', f'"{key}": {other}'))
    with pytest.raises(ModelMismatchError, match=told.format(path=tmp_path)):
        load_model(tmp_path)


def test_a_tokenizer_larger_than_the_vocabulary_is_a_mismatch() -> None:
    model = build_model("qwen2")
    check_model_matches(model, tokenizer=range(301))
    with pytest.raises(ModelMismatchError, match=r"302 tokens.*301"):
        check_model_matches(model, tokenizer=range(302))


def test_another_architecture_is_a_mismatch_with_every_difference() -> None:
    model = build_model("qwen2")
    check_model_matches(model, config=build_model("qwen2", seed=1).config)
    with pytest.raises(ModelMismatchError, match=r"model_type is qwen2 here but llama there.*tie_word_embeddings"):
        check_model_matches(model, config=build_model("llama", tied=False).config, where="the checkpoint")
