"""``tool``: a question, tool calls that the gateway runs, an answer, its reward.

action with a call --------> the tool's response; next turn
action without a call -----> graded; done
the last turn's action ----> graded, its call is not run; done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.text.tool_calls import MalformedCall, find_call
from services.envgateway.envs.base import EnvironmentContext, EpisodeLostError, Observation, StepResult
from services.envgateway.envs.builtin.single_step import graded_end
from services.envgateway.envs.settings import ToolSettings, question_of, settings_of
from services.envgateway.tools.base import StateLostError, ToolResult
from services.envgateway.tools.session import ToolSession


class ToolLoop:
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
