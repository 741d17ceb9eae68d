"""``single_step``: a question, one answer, its reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import GraderFailedError
from services.envgateway.envs.base import EnvironmentContext, Observation, StepResult
from services.envgateway.envs.settings import SingleStepSettings, question_of, settings_of
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import RewardOutcome


class SingleStep:
    def __init__(self, context: EnvironmentContext) -> None:
        self._rewards = context.rewards
        self._task: Mapping[str, Any] = {}
        self._settings = SingleStepSettings()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._task = task
        self._settings = settings_of(task, SingleStepSettings)
        return Observation(text=question_of(task))

    async def step(self, action: str) -> StepResult:
        return await graded_end(self._rewards, self._settings.reward, self._task, action, {})

    async def close(self) -> None:
        pass


async def graded_end(
    rewards: Rewards, name: str, task: Mapping[str, Any], answer: str, metrics: Mapping[str, float]
) -> StepResult:
    """The last step of an episode. A grader that failed is the machine's fault: no reward, the turn may be repeated."""
    result = await rewards.compute(name, task, answer)
    if result.outcome is RewardOutcome.GRADER_FAILED:
        raise GraderFailedError(f"the grader of reward {name!r} failed: {result.detail}")
    unparsed = float(result.outcome is RewardOutcome.UNPARSED)
    return StepResult(reward=result.reward, done=True, metrics={"reward_unparsed": unparsed, **metrics})
