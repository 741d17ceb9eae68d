"""The gateway's tools by name: the built-in ones, and those that the recipe names by import path.

Holds the limits that all trajectories share of a tool: calls at once, time of a call, length of a result.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from services.common import tools
from services.common.config.envgateway import MCP, ToolConfig
from services.common.errors import ConfigError, DeadlineError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.importing import check_names, told
from services.common.text.tools import (
    MalformedCall,
    ToolStatistics,
    ToolStatus,
    cut_text,
    parse_json_call,
    problem_with,
)
from services.common.tools import (
    DEFAULT_TIMEOUT_S,
    AnyTool,
    StatefulTool,
    ToolError,
    ToolResult,
    ToolState,
    check_tool,
    schema_of,
)
from services.envgateway.calls import call_plain_or_async, take_place
from services.envgateway.tools.mcp import McpTools
from services.envgateway.tools.tools import RegisteredTool

if TYPE_CHECKING:
    from services.envgateway.tools.mcp import McpServer


DEFAULT_CONCURRENCY = 64


class ToolBox:
    """All tools of a gateway. ``counts`` has finished calls by status, and ``infrastructure`` for those without a
    status."""

    def __init__(
        self,
        tools: Iterable[AnyTool],
        limits: Mapping[str, ToolConfig] | None = None,
        servers: Mapping[str, McpServer] | None = None,
    ) -> None:
        """``servers``: those whose tools are named ``mcp:SERVER``.

        Raises:
            ConfigError: a tool that is none, a schema that cannot be checked, or limits of no tool.
        """
        self.servers = servers or {}
        limits = limits or {}
        tools = list(tools)
        for tool in tools:
            check_tool(tool, "envgateway.tools", in_replica=False)
        check_names([(tool.name, tool) for tool in tools], "envgateway.tools")
        self._tools = {tool.name: _registered(tool, limits.get(tool.name, ToolConfig())) for tool in tools}
        for name in limits:
            if name not in self._tools:
                raise ConfigError(f"envgateway.tools.limits.{name}: no such tool; there is {', '.join(self.names)}")
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        return sorted([*self._tools, *(f"{MCP}{name}" for name in self.servers)])

    def named(self, names: Sequence[str]) -> list[RegisteredTool]:
        """Raises ``InvalidRequestError`` for a tool that the gateway does not have."""
        for name in names:
            if name not in self._tools:
                raise InvalidRequestError(f"no tool {name!r}; the gateway has {', '.join(self.names)}")
        return [self._tools[name] for name in names]

    @property
    def gauges(self) -> dict[str, float]:
        """Finished calls by status; and sessions, calls and failures of each MCP server."""
        counted = {f"tool_calls_{name}": float(n) for name, n in self.counts.items()}
        return counted | {name: n for server in self.servers.values() for name, n in server.gauges.items()}

    async def close(self) -> None:
        """End the sessions at MCP servers."""
        for server in self.servers.values():
            await server.close()


def load_tools(paths: Iterable[str]) -> list[AnyTool]:
    """One object of each class. Loaded at start: a typo costs a second, not a run.

    Raises:
        ConfigError: names the path and the fault.
    """
    return tools.load_tools(list(paths), "envgateway.tools", in_replica=False)


def cut_result(result: ToolResult, config: ToolConfig, max_chars: int | None = None) -> ToolResult:
    """The part of a result that the policy sees; ``max_chars`` has precedence over the config's."""
    most = config.max_chars if max_chars is None else max_chars
    return ToolResult(status=result.status, text=cut_text(result.text, most, config.cut))


def _registered(tool: AnyTool, config: ToolConfig) -> RegisteredTool:
    own_s = getattr(tool, "timeout_s", DEFAULT_TIMEOUT_S)
    concurrency: int = config.concurrency or getattr(tool, "concurrency", None) or DEFAULT_CONCURRENCY
    return RegisteredTool(
        tool=tool,
        config=config,
        timeout_s=None if own_s is None else config.timeout_s or own_s,
        running=asyncio.Semaphore(concurrency),
        has_state=isinstance(tool, StatefulTool),
    )


# --- The tool calls of one trajectory: reading them, checking them, running them, counting them.


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
