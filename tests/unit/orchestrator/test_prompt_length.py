"""Long prompts are left out of training, counted, and measured with the model's own tokenizer, without a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.orchestrator.tasks.prompts import keep_short, open_tokenizer, short_prompts
from services.orchestrator.tasks.rows import ListRows, UsableRows


def words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def source(*prompts: Any) -> UsableRows:
    return of({"problem": prompt, "answer": "1"} for prompt in prompts)


def of(rows: Iterable[dict[str, Any]]) -> UsableRows:
    return UsableRows(ListRows(list(rows), "made"), None)


def short(rows: UsableRows, limit: int, field: str | None = None, counters: Any = (words,)) -> UsableRows:
    return keep_short(rows, limit, counters, field, "data.train")


def test_rows_keep_their_ids_and_those_left_out_are_counted() -> None:
    kept = short(source("a a a a", "a", "a a a", "a a"), 2)
    assert ([kept[row].task_id for row in range(len(kept))], kept.num_too_long) == (["2", "4"], 2)


def test_without_a_short_prompt_the_dataset_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"data\.train\.max_prompt_tokens: no prompt of 2 has at most 1 tokens"):
        short(source("a a", "b b"), 1)
    with pytest.raises(
        DatasetError, match=r"cannot be used: task 1 has no prompt to measure: looked for text in \['answer', 'problem'"
    ):
        short(source("a"), 1, "text")


def test_rows_without_a_prompt_are_left_out_and_named_with_those_that_could_not_be_read() -> None:
    kept = short(of([{"problem": "a"}, {"answer": "1"}, {"problem": {1}}, {"problem": "a a"}]), 1)
    assert ([kept[row].task_id for row in range(len(kept))], kept.num_too_long, kept.left_out.count) == (["1"], 1, 2)
    assert "row 3: cannot be written as JSON" in str(kept.left_out) and "task 2 has no prompt" in str(kept.left_out)


def limited(model: Path, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "short",
            "policies": {"model0": {"model": {"path": str(model)}}},
            "data": {
                "train": {"path": "unused.jsonl", "max_prompt_tokens": 3},
                "evaluation": {"all": {"path": "unused"}, "few": {"path": "unused", "max_prompt_tokens": 1}},
            },
            "evaluation": {"at_start": False, "at_end": False},
            **sections,
        }
    )


def test_each_dataset_has_its_limit_measured_by_the_tokenizer_of_the_policy(model: Path) -> None:
    tasks = source("a ab a", "a a a a", "a")
    sources = dict.fromkeys(("data.train", "data.evaluation.all", "data.evaluation.few"), tasks)
    kept = short_prompts(sources, limited(model), model)
    assert {where: len(rows) for where, rows in kept.items()} == {
        "data.train": 2, "data.evaluation.all": 3, "data.evaluation.few": 1,
    }  # fmt: skip
    kept = short_prompts(sources, limited(model, run={"steps": 0}), model)
    assert (len(kept["data.train"]), len(kept["data.evaluation.few"])) == (3, 1), "training data that is never played"
    assert open_tokenizer(str(model), "here")(["a a", ""]) == [2, 0]


def test_the_prompt_is_where_the_workflow_that_plays_it_looks(model: Path) -> None:
    rows = of([{"problem": "a", "other": "a a a a"}])
    sources = dict.fromkeys(("data.train", "data.evaluation.few"), rows)
    evaluation = {"at_start": False, "at_end": False, "workflow": {"settings": {"prompt_field": "other"}}}
    with pytest.raises(DatasetError, match=r"data\.evaluation\.few\.max_prompt_tokens: no prompt of 1"):
        short_prompts(sources, limited(model, evaluation=evaluation), model)


def test_a_missing_tokenizer_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"tokenizer\.json of .* \(policies\.model0\.model\.path\)"):
        open_tokenizer(str(tmp_path), "policies.model0.model.path")


def test_neither_torch_nor_transformers_is_imported(model: Path) -> None:
    code = (
        "import sys; from services.orchestrator.tasks.prompts import open_tokenizer; "
        f"open_tokenizer({str(model)!r}, ''); sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
