"""The reward ``reasoning_gym``: the package's own score, in a worker that can be killed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common import reasoning_gym
from services.common.config.envgateway import ScorerConfig
from services.common.errors import InvalidRequestError
from services.envgateway.calls import RewardOutcome
from services.envgateway.rewards.math_worker import REASONING_GYM
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import ReasoningGymReward

pytestmark = [pytest.mark.needs("reasoning-gym"), pytest.mark.slow]


@pytest.fixture
async def pool() -> AsyncIterator[MathPool]:
    made = MathPool(ScorerConfig(timeout_s=1.0), REASONING_GYM)
    yield made
    await made.close()


async def test_scores_are_the_package_s_and_a_hostile_answer_costs_its_own_sample(pool: MathPool) -> None:
    reward = ReasoningGymReward(pool)
    row: dict[str, Any] = next(reasoning_gym.rows("countdown", 1, 3, {}))
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


async def test_a_row_of_another_source_is_refused(pool: MathPool) -> None:
    with pytest.raises(InvalidRequestError, match="no column reasoning_gym"):
        await ReasoningGymReward(pool)({"question": "1+1?"}, "2")
