"""Data sets of reasoning-gym by name: equal rows for equal seeds, apart for others, and errors that name the near name."""

from __future__ import annotations

import re

import pytest

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.common.installing import install
from services.common.reasoning_gym import Scorer, answer_in
from services.orchestrator.tasks.datasets import open_source


def config(name: str = "chain_sum", **settings: object) -> DatasetConfig:
    return DatasetConfig.model_validate({"reasoning_gym": name, "size": 8, **settings})


@pytest.mark.needs("reasoning-gym")
def test_equal_seeds_give_equal_tasks_and_near_ones_share_none() -> None:
    questions = [
        [source[row].data["question"] for row in range(len(source))]
        for source in (open_source(config(settings={"max_digits": 4}), seed) for seed in (0, 0, 1))
    ]
    assert questions[0] == questions[1]
    assert not set(questions[0]) & set(questions[2]), "the package draws task i of seed s from s + i"


@pytest.mark.needs("reasoning-gym")
def test_the_scorer_makes_the_row_s_own_task_again() -> None:
    scorer = Scorer()
    source = open_source(config("countdown", limit=3), 7)
    assert len(source) == 3
    for row in range(len(source)):
        data = source[row].data
        dataset, entry = scorer.entry(data["reasoning_gym"])
        assert entry["question"] == data["question"]
        assert dataset.score_answer(data["answer"], entry) == 1.0


@pytest.mark.needs("reasoning-gym")
def test_a_seed_of_the_package_s_own_is_taken_as_it_is() -> None:
    import reasoning_gym

    source = open_source(config(settings={"seed": 42}), 0)
    theirs = reasoning_gym.create_dataset("chain_sum", seed=42, size=8)
    assert [source[row].data["question"] for row in range(8)] == [theirs[row]["question"] for row in range(8)]


@pytest.mark.needs("reasoning-gym")
@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("spell_bakward", {}, "did you mean 'spell_backward'"),
        ("zzz", {}, "such as chain_sum"),
        ("chain_sum", {"max_terns": 2}, "settings.max_terns: .* did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "refuses its settings .* max_terms must be"),
        ("chain_sum", {"min_terms": "two"}, "refuses its settings"),
    ],
)
def test_a_wrong_name_or_setting_is_told_with_near_ones(name: str, settings: dict[str, object], told: str) -> None:
    with pytest.raises(DatasetError, match=told):
        open_source(config(name, settings=settings), 0)


def test_a_missing_package_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetError, match=re.escape(install("reasoning-gym"))):
        open_source(config(), 0)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"path": "rows.jsonl", "size": 3}, "write limit: 3"),
        ({"path": "rows.jsonl", "reasoning_gym": "chain_sum"}, "exactly one"),
        ({"reasoning_gym": "chain_sum", "size": 0}, "greater than or equal to 1"),
    ],
)
def test_keys_that_do_not_belong_together_are_refused(section: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DatasetConfig.model_validate(section)


def test_the_answer_is_the_last_one_between_tags_or_everything_after_the_thoughts() -> None:
    assert answer_in("<answer>1</answer> no: <answer> 2\n</answer>") == "2"
    assert answer_in("<think><answer>1</answer></think>\n 3 ") == "3"
    assert answer_in("<answer>4") == "<answer>4"
