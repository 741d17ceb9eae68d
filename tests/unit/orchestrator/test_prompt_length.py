"""Long prompts are left out of training, counted, and measured with the model's own tokenizer, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.orchestrator.datasets import ListSource
from services.orchestrator.prompt_length import ShortPrompts, open_tokenizer, with_short_prompts


def words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def source(*prompts: Any) -> ListSource:
    return ListSource([{"problem": prompt, "answer": "1"} for prompt in prompts], None, "made")


def test_rows_keep_their_ids_and_those_left_out_are_counted() -> None:
    kept = ShortPrompts(source("a a a a", "a", "a a a", "a a"), 2, [words], None)
    assert ([kept[row].task_id for row in range(len(kept))], kept.num_left_out) == (["2", "4"], 2)


def test_a_prompt_may_be_exactly_as_long_as_the_limit() -> None:
    assert len(ShortPrompts(source("a a", "a a a"), 2, [words], None)) == 1


def test_the_strictest_tokenizer_decides() -> None:
    characters = [words, lambda texts: [len(text) for text in texts]]
    assert len(ShortPrompts(source("a a", "b"), 2, characters, None)) == 1


def test_messages_are_measured_by_their_contents() -> None:
    rows = [{"messages": [{"role": "system", "content": "a a"}, {"role": "user", "content": "a"}]}, {"messages": []}]
    assert ShortPrompts(ListSource(rows, None, "made"), 2, [words], None).num_left_out == 1


def test_no_short_prompt_and_no_prompt_are_refused() -> None:
    with pytest.raises(DatasetError, match="no prompt of 2 has at most 1 tokens"):
        ShortPrompts(source("a a", "b b"), 1, [words], None)
    with pytest.raises(
        DatasetError, match=r"task 1 has no prompt to measure: looked for text in \['answer', 'problem'"
    ):
        ShortPrompts(source("a"), 1, [words], "text")


def test_the_tokenizer_of_the_policy_measures(model: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "short",
            "policies": {"model0": {"model": {"path": str(model)}}},
            "data": {"train": {"path": "unused.jsonl", "max_prompt_tokens": 3}},
            "evaluation": {"at_start": False, "at_end": False},
        }
    )
    kept = with_short_prompts(source("a ab a", "a a a a"), recipe, model)
    assert isinstance(kept, ShortPrompts) and kept.num_left_out == 1
    evaluating = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 0})})
    assert len(with_short_prompts(source("a ab a", "a a a a"), evaluating, model)) == 2
    assert open_tokenizer(str(model), "here")(["a a", ""]) == [2, 0]


def test_a_missing_tokenizer_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"tokenizer\.json of .* \(policies\.model0\.model\.path\)"):
        open_tokenizer(str(tmp_path), "policies.model0.model.path")


def test_evaluation_is_never_filtered() -> None:
    with pytest.raises(ValueError, match="an evaluation plays every task"):
        Recipe.model_validate(
            {
                "name": "filtered",
                "policies": {"model0": {"model": {"path": "some/model"}}},
                "data": {"train": {"path": "a"}, "evaluation": {"b": {"path": "b", "max_prompt_tokens": 1}}},
            }
        )


def test_neither_torch_nor_transformers_is_imported(model: Path) -> None:
    code = (
        "import sys; from services.orchestrator.prompt_length import open_tokenizer; "
        f"open_tokenizer({str(model)!r}, ''); sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
