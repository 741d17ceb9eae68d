"""``tool``: a question, tool calls that the gateway runs, an answer, its reward.

action with a call --------> the tool's response; next turn
action without a call -----> graded; done
the last turn's action ----> graded, its call is not run; done
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from services.common.errors import InfrastructureError
from services.common.tool_calls import MalformedCall, cut_in_the_middle, find_call, parse_json_call
from services.envgateway.envs.base import EnvironmentContext, Observation, StepResult
from services.envgateway.envs.settings import ToolSettings, question_of, settings_of
from services.envgateway.envs.single_step import graded_end
from services.envgateway.envs.tools import ToolResult, ToolStatus


class ToolLoop:
    def __init__(self, context: EnvironmentContext) -> None:
        self._rewards = context.rewards
        self._tools = context.tools
        self._task: Mapping[str, Any] = {}
        self._settings = ToolSettings()
        self._turns = 0
        self._calls: Counter[ToolStatus] = Counter()
        self._latency_s = 0.0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._task = task
        self._settings = settings_of(task, ToolSettings)
        return Observation(text=question_of(task), tools=self._tools.schemas(self._settings.tools))

    async def step(self, action: str) -> StepResult:
        content = find_call(action)
        if content is None or self._turns + 1 >= self._settings.max_turns:
            result = await graded_end(self._rewards, self._settings.reward, self._task, action, self._metrics())
            self._turns += 1
            return result
        began = time.perf_counter()
        response = await self._answer(content)
        if response.status is ToolStatus.INFRA:
            raise InfrastructureError(f"the tool failed, not its call: {response.text}")
        self._turns += 1
        self._calls[response.status] += 1
        self._latency_s += time.perf_counter() - began
        text = cut_in_the_middle(response.text, self._settings.max_response_chars)
        return StepResult(observation=text, metrics=self._metrics())

    async def close(self) -> None:
        pass

    async def _answer(self, content: str | MalformedCall) -> ToolResult:
        call = content if isinstance(content, MalformedCall) else parse_json_call(content)
        if isinstance(call, MalformedCall):
            return ToolResult(status=ToolStatus.ERROR, text=f"Error: malformed tool call: {call.error}")
        if call.name not in self._settings.tools:
            offered = ", ".join(self._settings.tools)
            return ToolResult(status=ToolStatus.ERROR, text=f"Error: no tool {call.name!r}; there is {offered}")
        return await self._tools.call(call.name, call.arguments)

    def _metrics(self) -> dict[str, float]:
        errors = {f"tool_errors_{s}": float(n) for s, n in self._calls.items() if s is not ToolStatus.OK}
        return {
            "tool_calls": float(self._calls.total()),
            "tool_errors": sum(errors.values()),
            "tool_latency_s": self._latency_s,
            **errors,
        }
