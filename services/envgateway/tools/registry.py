"""The gateway's tools by name: the built-in ones, and those that the recipe names by import path.

Holds the limits that all trajectories share of a tool: calls at once, time of a call, length of a result.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from services.common import tools
from services.common.config.envgateway import MCP, ToolConfig
from services.common.errors import ConfigError, DeadlineError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.importing import check_names, told
from services.common.text.tools import ArgumentSchema, MalformedCall, ToolCall, cut_text
from services.common.tools import DEFAULT_TIMEOUT_S, AnyTool, ToolResult, ToolSession, check_tool
from services.envgateway.calls import THREADS, take_place
from services.envgateway.tools.mcp import McpServer, McpSession, open_tools
from services.envgateway.tools.tools import RegisteredTool

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


def _registered(tool: AnyTool, config: ToolConfig) -> RegisteredTool:
    own_s = getattr(tool, "timeout_s", DEFAULT_TIMEOUT_S)
    concurrency: int = getattr(tool, "concurrency", None) or DEFAULT_CONCURRENCY
    return RegisteredTool(
        tool=tool,
        schema=ArgumentSchema(tool.parameters),
        timeout_s=None if own_s is None else config.timeout_s or own_s,
        config=config,
        running=asyncio.Semaphore(concurrency),
    )


log = structlog.get_logger()
_QUEUE_S = 10.0  # waiting for a place among the running calls of a tool


class GatewayToolSession(ToolSession):
    """The calls of one trajectory, within the limits that all share. Whatever a tool raises is an infrastructure failure."""

    def __init__(
        self,
        box: ToolBox,
        names: Sequence[str],
        max_chars: int | None = None,
        borrowed: Sequence[RegisteredTool] = (),
        sessions: Sequence[McpSession] = (),
    ) -> None:
        """``names``: the tools that may be called; ``max_chars``: of a response, before the tools' own; ``borrowed``: tools of
        MCP servers, whose ``sessions`` are closed with this one.

        Raises:
            InvalidRequestError: a tool that the gateway does not have, or two of one name.
        """
        tools = [*box.named(names), *borrowed]
        super().__init__(tools, THREADS, max_chars or ToolConfig().max_chars)
        if len(self._tools) < len(tools):
            raise InvalidRequestError(f"two tools have one name among {', '.join(one.tool.name for one in tools)}")
        self._box = box
        self._sessions = sessions
        self._most = max_chars

    @classmethod
    async def open(cls, box: ToolBox, names: Sequence[str], max_chars: int | None = None) -> GatewayToolSession:
        """A session that also offers tools of MCP servers: names that begin with ``mcp:``.

        Raises:
            InvalidRequestError: as above; an MCP server that cannot be used.
            InfrastructureError, CapacityError: an MCP server does not start, or has no session free.
        """
        remote = [name for name in names if name.startswith(MCP)]
        local = [name for name in names if not name.startswith(MCP)]
        borrowed, sessions = await open_tools(box.servers, remote, max_chars)
        try:
            return cls(box, local, max_chars, borrowed, sessions)
        except BaseException:
            for session in sessions:
                await session.close()
            raise

    async def answer(self, content: str | ToolCall | MalformedCall) -> ToolResult:
        try:
            result = await super().answer(content)
        except RollmillError:
            self._box.counts["infrastructure"] += 1
            raise
        self._box.counts[result.status] += 1
        return result

    async def close(self) -> None:
        await super().close()
        for session in self._sessions:
            await session.close()

    async def _run(self, one: RegisteredTool, arguments: Mapping[str, Any]) -> ToolResult:
        name, most = one.tool.name, self._most or one.config.max_chars
        await take_place(one.running, _QUEUE_S, f"no call of the tool {name} ended within {_QUEUE_S:g} s")
        try:
            result = await super()._run(one, arguments)
        except DeadlineError as error:
            raise InfrastructureError(error.message) from error
        except RollmillError:
            raise
        except (Exception, SystemExit) as error:  # a user's tool may raise anything: told, and never a reward
            log.warning("tool.failed", tool=name, exc_info=error)
            raise InfrastructureError(f"the tool {name} raised {told(error)}") from error
        finally:
            one.running.release()
        return ToolResult(status=result.status, text=cut_text(result.text, most, one.config.cut))
