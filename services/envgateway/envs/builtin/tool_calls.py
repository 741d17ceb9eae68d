"""``tools``: tool calls only, for workflows that keep turns and answers themselves.

An action is the text between the tags of a call, one JSON object; the observation is the tool's response. The episode
is never done and its rewards are 0; closing the episode ends the state of its tools. The metrics are those of all its
calls so far, and ``tool_status_<status>`` of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.envgateway.envs.base import EnvironmentContext, Observation, StepResult
from services.envgateway.envs.builtin.tool_loop import answered
from services.envgateway.envs.settings import ToolCallsSettings, settings_of
from services.envgateway.tools.session import ToolSession


class ToolCalls:
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
        metrics = {**self._session.metrics(), f"tool_status_{result.status}": 1.0}
        return StepResult(observation=result.text, metrics=metrics)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
