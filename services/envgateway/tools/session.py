"""The tool calls of one trajectory: reading them, checking them, running them, counting them.

call ──> malformed? unknown? wrong arguments? ──yes──> told to the policy, which can correct itself
          `no──> a place among the tool's running calls ──> the tool, within its time ──> cut to its length
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from services.common.config.envgateway import ToolConfig
from services.common.errors import CapacityError, DeadlineError, InfrastructureError, MillraceError
from services.common.tool_calls import MalformedCall, parse_json_call
from services.common.tool_results import ToolStatistics, ToolStatus
from services.common.tool_schema import problem_with
from services.envgateway.calls import call_plain_or_async
from services.envgateway.tools.base import StatefulTool, ToolError, ToolResult, ToolState
from services.envgateway.tools.registry import RegisteredTool, ToolBox, cut_result

log = structlog.get_logger()

_QUEUE_S = 10.0  # waiting for a place among the running calls of a tool
_CLOSE_S = 4.0
_RETRY_S = 1.0


class ToolSession:
    """One trajectory's. Calls come one after the other; ``close`` ends what tools keep for it."""

    def __init__(self, box: ToolBox, names: Sequence[str], max_chars: int | None = None) -> None:
        """``names``: the tools that may be called; ``max_chars``: of a response, before the tools' own.

        Raises:
            InvalidRequestError: a tool that the gateway does not have.
        """
        self.schemas = box.schemas(names)
        self._box = box
        self._names = list(names)
        self._max_chars = max_chars
        self._states: dict[str, ToolState] = {}
        self._statistics = ToolStatistics()

    async def answer(self, content: str | MalformedCall) -> ToolResult:
        """What stands between the tags of a call: one JSON object ``{"name": ..., "arguments": {...}}``.

        Raises:
            InfrastructureError, CapacityError: it did not happen, is not counted, and may be repeated.
        """
        began = time.perf_counter()
        call = content if isinstance(content, MalformedCall) else parse_json_call(content)
        if isinstance(call, MalformedCall):
            wrong = ToolResult(status=ToolStatus.MALFORMED_CALL, text=f"Error: malformed tool call: {call.error}")
            return self._counted(wrong, began)
        return await self.call(call.name, call.arguments)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The same for a call that was read."""
        began = time.perf_counter()
        tool = self._box.find(name) if name in self._names else None
        if tool is None:
            offered = ", ".join(self._names)
            wrong = ToolResult(status=ToolStatus.UNKNOWN_TOOL, text=f"Error: no tool {name!r}; there is {offered}")
            return self._counted(wrong, began)
        problem = problem_with(arguments, tool.tool.parameters)
        if problem is not None:
            wrong = ToolResult(status=ToolStatus.INVALID_ARGUMENTS, text=f"Error: {problem}")
            return self._counted(wrong, began, name)
        try:
            result = await self._run(tool, arguments)
        except MillraceError:
            self._box.counts["infrastructure"] += 1
            raise
        return self._counted(result, began, name, tool.config)

    def metrics(self) -> dict[str, float]:
        """Of all calls so far; see ``ToolStatistics``."""
        return self._statistics.metrics()

    async def close(self) -> None:
        states, self._states = self._states, {}
        for name, state in states.items():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await call_plain_or_async(state.close)
            except Exception as error:  # a user's tool may raise anything; the others are closed all the same
                log.warning("tool.close_failed", tool=name, exc_info=error)

    def _counted(
        self, result: ToolResult, began: float, tool: str = "", config: ToolConfig | None = None
    ) -> ToolResult:
        """What a tool says is cut as its config has it; what we say of a call that no tool has seen, as by default."""
        self._statistics.count(result.status, time.perf_counter() - began, tool)
        self._box.counts[result.status] += 1
        return cut_result(result, config or ToolConfig(), self._max_chars)

    async def _run(self, tool: RegisteredTool, arguments: Mapping[str, Any]) -> ToolResult:
        name = tool.tool.name
        async with _turn(tool):
            scope = asyncio.timeout(tool.timeout_s)
            try:
                async with scope:
                    said = await call_plain_or_async(self._state(tool).call, arguments)
            except ToolError as error:
                return ToolResult(status=ToolStatus.TOOL_ERROR, text=f"Error: {error}")
            except DeadlineError as error:
                raise InfrastructureError(error.message) from error
            except MillraceError:
                raise
            except Exception as error:  # a user's tool may raise anything: told, counted, and never a reward
                if isinstance(error, TimeoutError) and scope.expired():
                    limit = f"TimeoutError: stopped after {tool.timeout_s:g} s"
                    return ToolResult(status=ToolStatus.TIME_LIMIT, text=limit)
                log.warning("tool.failed", tool=name, exc_info=error)
                raise InfrastructureError(f"the tool {name} raised {type(error).__name__}: {error}") from error
        return said if isinstance(said, ToolResult) else ToolResult(text=str(said))

    def _state(self, registered: RegisteredTool) -> Any:
        tool = registered.tool
        if not isinstance(tool, StatefulTool):
            return tool
        if tool.name not in self._states:
            self._states[tool.name] = tool.open()
        return self._states[tool.name]


@asynccontextmanager
async def _turn(tool: RegisteredTool) -> AsyncIterator[None]:
    """A place among the tool's running calls."""
    try:
        async with asyncio.timeout(_QUEUE_S):
            await tool.running.acquire()
    except TimeoutError:
        busy = f"no call of the tool {tool.tool.name} ended within {_QUEUE_S:g} s"
        raise CapacityError(busy, retry_after_s=_RETRY_S) from None
    try:
        yield
    finally:
        tool.running.release()
