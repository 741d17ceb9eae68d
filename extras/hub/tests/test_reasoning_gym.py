"""Data sets of reasoning-gym by name: equal rows for equal seeds, apart for others, and errors that name the near name."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extras.hub.reasoning_gym import answer_in, load_scorer, rows
from services.common.config.data import DatasetConfig
from services.common.config.envgateway import ScorerConfig
from services.common.dataset_rows import BuiltInReward
from services.common.errors import DatasetError, InvalidRequestError
from services.common.installing import install
from services.envgateway.calls import RewardOutcome
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import ReasoningGymReward
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
    grade = load_scorer()
    source = open_source(config("countdown", limit=3), 7)
    assert len(source) == 3
    for row in range(len(source)):
        data = source[row].data
        asked = json.dumps({**data["reasoning_gym"], "question": data["question"]}).encode()
        assert grade(asked, data["answer"].encode()) == ("correct", "", 1.0)


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


def test_the_answer_is_the_last_one_between_tags_or_everything_after_the_thoughts() -> None:
    assert answer_in("<answer>1</answer> no: <answer> 2\n</answer>") == "2"
    assert answer_in("<think><answer>1</answer></think>\n 3 ") == "3"
    assert answer_in("<answer>4") == "<answer>4"


@pytest.fixture
async def pool() -> AsyncIterator[MathPool]:
    made = MathPool(ScorerConfig(timeout_s=1.0), BuiltInReward.REASONING_GYM)
    yield made
    await made.close()


@pytest.mark.slow
@pytest.mark.needs("reasoning-gym")
async def test_scores_are_the_package_s_and_a_hostile_answer_costs_its_own_sample(pool: MathPool) -> None:
    reward = ReasoningGymReward(pool)
    row: dict[str, Any] = next(rows(config("countdown"), 3))
    right = await reward(row, f"<think>7</think> It is <answer>{row['answer']}</answer>")
    assert (right.outcome, right.reward) == (RewardOutcome.CORRECT, 1.0)
    partial = await reward(row, "1 + 1")
    assert partial.outcome is RewardOutcome.PARTIAL
    assert 0 < partial.reward < 1
    other = await reward({**row, "question": "another version's"}, "1")
    assert other.outcome is RewardOutcome.GRADER_FAILED
    assert "install one version" in other.detail
    gone = {**row, "reasoning_gym": {**row["reasoning_gym"], "name": "no_such_task"}}
    assert (await reward(gone, "1")).outcome is RewardOutcome.GRADER_FAILED
    assert not pool.counts.total()
    tower = await reward(row, "9**9**9**9")  # its score function would compute it
    assert (tower.outcome, tower.reward) == (RewardOutcome.UNPARSED, 0.0)
    assert pool.counts["timeouts"] == 1


@pytest.mark.slow
@pytest.mark.needs("reasoning-gym")
async def test_a_row_of_another_source_is_refused(pool: MathPool) -> None:
    with pytest.raises(InvalidRequestError, match="no column reasoning_gym"):
        await ReasoningGymReward(pool)({"question": "1+1?"}, "2")
