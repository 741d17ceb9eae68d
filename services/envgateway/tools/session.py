"""The tool calls of one trajectory: reading them, checking them, running them, counting them.

call ──> malformed? unknown? wrong arguments? ──yes──> told to the policy, which can correct itself
          `no──> a place among the tool's running calls ──> the tool, within its time ──> cut to its length
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from services.common.config.processes.envgateway import ToolConfig
from services.common.config.processes.mcp import MCP
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.text.tool_calls import MalformedCall, ToolStatistics, ToolStatus, parse_json_call
from services.common.text.tool_schema import problem_with
from services.common.tools import StatefulTool, ToolError, ToolResult, ToolState, schema_of
from services.common.user_code import told
from services.envgateway.calls import call_plain_or_async, take_place
from services.envgateway.tools.base import RegisteredTool
from services.envgateway.tools.mcp.server import McpTools
from services.envgateway.tools.registry import ToolBox, cut_result

log = structlog.get_logger()

_QUEUE_S = 10.0  # waiting for a place among the running calls of a tool
_CLOSE_S = 4.0


class ToolSession:
    """One trajectory's. Calls come one after the other; ``close`` ends the state that tools keep for the trajectory."""

    def __init__(
        self, box: ToolBox, names: Sequence[str], max_chars: int | None = None, borrowed: McpTools | None = None
    ) -> None:
        """``names``: the tools that may be called; ``max_chars``: of a response, before the tools' own; ``borrowed``: tools of
        MCP servers, closed with this session.

        Raises:
            InvalidRequestError: a tool that the gateway does not have, or two of one name.
        """
        tools = [*box.named(names), *(borrowed.tools if borrowed is not None else ())]
        self._tools = {one.tool.name: one for one in tools}
        if len(self._tools) < len(tools):
            raise InvalidRequestError(f"two tools have one name among {', '.join(one.tool.name for one in tools)}")
        self.schemas = [schema_of(one.tool) for one in tools]
        self._box = box
        self._borrowed = borrowed
        self._max_chars = max_chars
        self._states: dict[str, ToolState] = {}
        self._statistics = ToolStatistics()

    @classmethod
    async def open(cls, box: ToolBox, names: Sequence[str], max_chars: int | None = None) -> ToolSession:
        """A session that also offers tools of MCP servers: names that begin with ``mcp:``.

        Raises:
            InvalidRequestError: as above; an MCP server that cannot be used.
            InfrastructureError, CapacityError: an MCP server does not start, or has no session free.
        """
        remote = [name for name in names if name.startswith(MCP)]
        local = [name for name in names if not name.startswith(MCP)]
        if not remote:
            return cls(box, local, max_chars)
        borrowed = await McpTools.open(box.servers, remote, max_chars)
        try:
            return cls(box, local, max_chars, borrowed)
        except BaseException:
            await borrowed.close()
            raise

    async def answer(self, content: str | MalformedCall) -> ToolResult:
        """Answer the text between the tags of a call: one JSON object ``{"name": ..., "arguments": {...}}``.

        Raises:
            InfrastructureError, CapacityError: the call did not happen, is not counted, and may be repeated.
        """
        began = time.perf_counter()
        call = content if isinstance(content, MalformedCall) else parse_json_call(content)
        if isinstance(call, MalformedCall):
            wrong = ToolResult(status=ToolStatus.MALFORMED_CALL, text=f"Error: malformed tool call: {call.error}")
            return self._counted(wrong, began)
        return await self.call(call.name, call.arguments)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer a parsed call."""
        began = time.perf_counter()
        tool = self._tools.get(name)
        if tool is None:
            offered = ", ".join(self._tools)
            wrong = ToolResult(status=ToolStatus.UNKNOWN_TOOL, text=f"Error: no tool {name!r}; there is {offered}")
            return self._counted(wrong, began)
        checked = getattr(tool.tool, "problem_with", None)  # of a tool with all of JSON Schema
        problem = checked(arguments) if checked is not None else problem_with(arguments, tool.tool.parameters)
        if problem is not None:
            wrong = ToolResult(status=ToolStatus.INVALID_ARGUMENTS, text=f"Error: {problem}")
            return self._counted(wrong, began, name)
        try:
            result = await self._run(tool, arguments)
        except RollmillError:
            self._box.counts["infrastructure"] += 1
            raise
        return self._counted(result, began, name, tool.config)

    def metrics(self) -> dict[str, float]:
        """Metrics of all calls so far; see ``ToolStatistics``."""
        return self._statistics.metrics()

    async def close(self) -> None:
        states, self._states = self._states, {}
        for name, state in states.items():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await call_plain_or_async(state.close)
            except Exception as error:  # a user's tool may raise anything; the others are closed all the same
                log.warning("tool.close_failed", tool=name, exc_info=error)
        if self._borrowed is not None:
            await self._borrowed.close()

    def _counted(
        self, result: ToolResult, began: float, tool: str = "", config: ToolConfig | None = None
    ) -> ToolResult:
        """A tool's result is cut by its config; our own message about a call that reached no tool by the default."""
        self._statistics.count(result.status, time.perf_counter() - began, tool)
        self._box.counts[result.status] += 1
        return cut_result(result, config or ToolConfig(), self._max_chars)

    async def _run(self, tool: RegisteredTool, arguments: Mapping[str, Any]) -> ToolResult:
        name = tool.tool.name
        await take_place(tool.running, _QUEUE_S, f"no call of the tool {name} ended within {_QUEUE_S:g} s")
        try:
            scope = asyncio.timeout(tool.timeout_s)
            try:
                async with scope:
                    said = await call_plain_or_async(self._state(tool).call, arguments)
            except ToolError as error:
                return ToolResult(status=ToolStatus.TOOL_ERROR, text=f"Error: {error}")
            except DeadlineError as error:
                raise InfrastructureError(error.message) from error
            except RollmillError:
                raise
            except (Exception, SystemExit) as error:  # a user's tool may raise anything: told, and never a reward
                if isinstance(error, TimeoutError) and scope.expired():
                    limit = f"TimeoutError: stopped after {tool.timeout_s:g} s"
                    return ToolResult(status=ToolStatus.TIME_LIMIT, text=limit)
                log.warning("tool.failed", tool=name, exc_info=error)
                raise InfrastructureError(f"the tool {name} raised {told(error)}") from error
        finally:
            tool.running.release()
        return said if isinstance(said, ToolResult) else ToolResult(text=str(said))

    def _state(self, registered: RegisteredTool) -> Any:
        tool = registered.tool
        if not registered.has_state:
            return tool
        if tool.name not in self._states:
            assert isinstance(tool, StatefulTool)
            self._states[tool.name] = tool.open()
        return self._states[tool.name]
