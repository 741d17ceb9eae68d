"""The warm start: deterministic, loss on the assistant's tokens only, made once, clear about bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError
from services.common.text.chat import Chat, load_tokenizer
from services.trainer.warm_start import make_starting_checkpoint, to_document
from tests.unit.trainer_service.building import POLICY, recipe, save_tokenizer

HERE = "tests.unit.trainer_service"
DIALOGUE = {
    "messages": [
        {"role": "user", "content": "What is one plus two"},
        {"role": "assistant", "content": "one plus two"},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "equals three"},
    ]
}


def dialogues(seed: int, limit: int = 10_000) -> Iterator[dict[str, Any]]:
    """A ``warm_start.dialogues``."""
    rng = np.random.default_rng(seed)
    for _ in range(limit):
        word = ["one", "two", "three"][int(rng.integers(3))]
        question = {"role": "user", "content": f"What is {word}"}
        yield {"messages": [question, {"role": "assistant", "content": f"equals {word}"}]}


def warm_recipe(seed: int = 3, **warm_start: Any) -> Recipe:
    section = {
        "builder": f"{HERE}.building:build",
        "dialogues": f"{HERE}.test_warm_start:dialogues",
        "steps": 12,
        "batch_size": 8,
        "learning_rate": 1e-2,
    } | warm_start
    return recipe(None, run={"seed": seed}, warm_start={POLICY: section})


def losses(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics" / "warm_start.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    made = [
        make_starting_checkpoint(warm_recipe(seed), POLICY, tmp_path / name)
        for name, seed in (("a", 3), ("again", 3), ("other", 4))
    ]
    first, again, other = ((path / "model.safetensors").read_bytes() for path in made)
    assert first == again
    assert first != other
    assert losses(tmp_path / "a")[-1] < 0.7 * losses(tmp_path / "a")[0]


def test_loss_is_on_the_assistants_tokens_and_nothing_else(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    document = to_document(Chat(tokenizer), DIALOGUE, context_length=64)
    trained = tokenizer.decode(document.token_ids[document.loss_mask])
    context = tokenizer.decode(document.token_ids[~document.loss_mask])
    assert trained.split() == ["one", "plus", "two", "<|im_end|>", "equals", "three", "<|im_end|>"]
    assert context.split() == ["<|im_start|>", "user", "What", "is", "one", "plus", "two", "<|im_end|>", "<|im_start|>", "assistant", "<|im_start|>", "tool", "three", "<|im_end|>", "<|im_start|>", "assistant"]  # fmt: skip


def test_it_is_made_once_and_again_where_it_was_half_made_and_never_by_other_settings(tmp_path: Path) -> None:
    made = make_starting_checkpoint(warm_recipe(), POLICY, tmp_path)
    file = made / "model.safetensors"
    expected, changed = file.read_bytes(), file.stat().st_mtime_ns
    assert make_starting_checkpoint(warm_recipe(), POLICY, tmp_path) == made
    assert file.stat().st_mtime_ns == changed
    with pytest.raises(ConfigError, match="made by other warm_start settings"):
        make_starting_checkpoint(warm_recipe(steps=13), POLICY, tmp_path)
    half = made.with_name(f"{made.name}.partial")
    shutil.move(made, half)
    (half / "model.safetensors").write_bytes(b"torn")
    make_starting_checkpoint(warm_recipe(), POLICY, tmp_path)
    assert file.read_bytes() == expected


def test_dialogues_may_be_a_file_that_is_read_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in dialogues(1, limit=10)))
    make_starting_checkpoint(warm_recipe(dialogues=str(path)), POLICY, tmp_path / "run")
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no dialogue"),
        ('{"messages": []}\n{oops\n', "row 2: not JSON"),
        ("[1]\n", "row 1: a dialogue is an object, this is list"),
        ('{"question": "x"}\n', 'a dialogue needs "messages"'),
        ('{"messages": [{"role": "user", "content": "one"}]}\n', "a dialogue needs a user turn and then an assistant"),
        (
            json.dumps(
                {"messages": [{"role": "user", "content": "one " * 70}, {"role": "assistant", "content": "two"}]}
            ),
            "more than the context \\(64\\)",
        ),
    ],
)
def test_bad_dialogues_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "dialogues.jsonl"
    path.write_text(text)
    with pytest.raises(DatasetError, match=words):
        make_starting_checkpoint(warm_recipe(dialogues=str(path)), POLICY, tmp_path / "run")
    assert not (tmp_path / "run" / "warm_start" / POLICY).exists()
