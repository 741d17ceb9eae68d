"""Environments around the gateway's rewards and tools: ``single_step``, ``tool`` and ``tools``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import GraderFailedError
from services.common.telemetry.metrics import RolloutKey
from services.common.text.tool_calls import STATUS_METRIC, MalformedCall, find_call
from services.common.tools import ToolResult
from services.envgateway.envs.base import EnvironmentContext, EpisodeLostError, Observation, StepResult
from services.envgateway.envs.settings import (
    SingleStepSettings,
    ToolCallsSettings,
    ToolSettings,
    question_of,
    settings_of,
)
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import RewardOutcome
from services.envgateway.tools.base import StateLostError
from services.envgateway.tools.session import ToolSession


class SingleStep:
    """A question, one answer, its reward."""

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
    graded = {RolloutKey.REWARD_UNPARSED.value: float(result.outcome is RewardOutcome.UNPARSED)}
    if result.opaque:
        graded[RolloutKey.REWARD_OPAQUE.value] = 1.0
    return StepResult(reward=result.reward, done=True, metrics={**graded, **metrics})


class ToolLoop:
    """A question, tool calls that the gateway runs, an answer, its reward.

    action with a call --------> the tool's response; next turn
    action without a call -----> graded; done
    the last turn's action ----> graded, its call is not run; done
    """

    def __init__(self, context: EnvironmentContext) -> None:
        self._rewards = context.rewards
        self._box = context.tools
        self._task: Mapping[str, Any] = {}
        self._settings = ToolSettings()
        self._turns = 0
        self._session: ToolSession | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._task = task
        self._settings = settings_of(task, ToolSettings)
        self._session = await ToolSession.open(self._box, self._settings.tools, self._settings.max_response_chars)
        return Observation(text=question_of(task), tools=self._session.schemas)

    async def step(self, action: str) -> StepResult:
        assert self._session is not None
        content = find_call(action)
        if content is None or self._turns + 1 >= self._settings.max_turns:
            metrics = self._session.metrics()
            result = await graded_end(self._rewards, self._settings.reward, self._task, action, metrics)
            self._turns += 1
            return result
        response = await answered(self._session, content)
        self._turns += 1
        return StepResult(observation=response.text, metrics=self._session.metrics())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def answered(session: ToolSession, content: str | MalformedCall) -> ToolResult:
    """A call's result; where a tool's state is lost, so is the episode."""
    try:
        return await session.answer(content)
    except StateLostError as error:
        raise EpisodeLostError(error.message) from error


class ToolCalls:
    """Tool calls only, for workflows that keep turns and answers themselves.

    An action is the text between the tags of a call, one JSON object; the observation is the tool's response. The
    episode is never done and its rewards are 0; closing the episode ends the state of its tools. The metrics are those
    of all its calls so far, and ``tool_status_<status>`` of the last one.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        self._box = context.tools
        self._session: ToolSession | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        settings = settings_of(task, ToolCallsSettings)
        self._session = await ToolSession.open(self._box, settings.tools, settings.max_response_chars)
        return Observation(text="", tools=self._session.schemas)

    async def step(self, action: str) -> StepResult:
        assert self._session is not None
        result = await answered(self._session, action)
        metrics = {**self._session.metrics(), f"{STATUS_METRIC}{result.status}": 1.0}
        return StepResult(observation=result.text, metrics=metrics)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
