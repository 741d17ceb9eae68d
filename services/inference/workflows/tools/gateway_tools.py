"""Tools that the gateway runs for one rollout: an episode of its environment ``tools``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import RollmillError
from services.common.records.types import Task
from services.common.text.tool_calls import STATUS_METRIC
from services.common.tools import ToolResult
from services.inference.workflows.base import Gateway


class GatewayTools:
    """Opened at the first call, or by ``open``, which returns the schemas; ``close`` in any case."""

    def __init__(self, names: Sequence[str], task: Task, seed: int, max_chars: int) -> None:
        """``names``: tools of the gateway, or ``mcp:SERVER``; ``max_chars``: of a result."""
        settings = {"tools": list(names), "max_response_chars": max_chars}
        self._task = Task(task_id=task.task_id, data={"environment": settings})
        self._seed = seed
        self._episode_id = ""
        self._turns = 0

    async def open(self, gateway: Gateway) -> Sequence[Mapping[str, Any]]:
        """Begin the episode; returns the tools' schemas, in the style of OpenAI."""
        episode = await gateway.create_episode("tools", self._task, self._seed)
        self._episode_id = episode.episode_id
        return episode.tools

    async def call(self, name: str, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        """The gateway checks the name and the arguments, too."""
        if not self._episode_id:
            await self.open(gateway)
        self._turns += 1
        action = json.dumps({"name": name, "arguments": arguments})
        step = await gateway.step(self._episode_id, self._turns, action)
        kinds = [name.removeprefix(STATUS_METRIC) for name in step.metrics if name.startswith(STATUS_METRIC)]
        return ToolResult(text=step.observation, status=kinds[0])

    async def close(self, gateway: Gateway) -> None:
        if self._episode_id:
            try:
                await gateway.close(self._episode_id)
            except RollmillError:  # the lease ends the episode, and the rollout has its result
                return


class GatewayTool:
    """One tool of the gateway with a state, as the rollout's own."""

    def __init__(self, name: str, tools: GatewayTools) -> None:
        self._name = name
        self._tools = tools

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        return await self._tools.call(self._name, arguments, gateway)

    async def close(self, gateway: Gateway) -> None:
        await self._tools.close(gateway)
