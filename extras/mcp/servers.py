"""The tools of MCP servers, as trajectories use them: sessions, failures, restarts.

    sessions: episode    a session (a process) per trajectory, from its first use to its end
    sessions: shared     one session for all, made again after a failure

A call that the server did not answer did not happen. It is repeated on a new session, unless the trajectory's session had a
state: then the trajectory is lost, and played again. Either way an infrastructure failure, never a reward.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from extras.mcp.settings import McpServerConfig
from services.common.config.envgateway import MCP, split_name
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.installing import install
from services.common.text.tools import ArgumentSchema, ToolStatus
from services.common.tools import OfferedTool, ToolResult
from services.envgateway.calls import take_place
from services.envgateway.tools.tools import StateLostError

if TYPE_CHECKING:
    from extras.mcp.client import Connection


log = structlog.get_logger()


_ATTEMPTS = 3
_CALL_S = 48.0  # of a call with its repetitions: less than the gateway gives a turn
_PLACE_S = 10.0  # waiting for a session


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool of a server, under the name for policies."""

    name: str
    own_name: str
    description: str
    parameters: Mapping[str, Any]
    schema: ArgumentSchema


_CONCURRENCY = 64  # calls of one server that run at once, over all rollouts


class McpServer:
    """One server of the recipe. Nothing is started before the first trajectory that uses it."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self.name = name
        self.where = f"envgateway.mcp.{name}"
        self.config = config
        self.counts: Counter[str] = Counter()
        self.running = asyncio.Semaphore(_CONCURRENCY)
        self._offers: dict[str, Offer] = {}
        self._listed: Sequence[Any] | None = None
        self._shared: Connection | None = None
        self._opening = asyncio.Lock()
        self._room = asyncio.Semaphore(config.max_sessions)
        self._live: set[Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def gauges(self) -> dict[str, float]:
        counted = {name: float(self.counts[name]) for name in ("calls", "failures", "restarts")}
        return {
            f"mcp_{self.name}_{name}": value for name, value in {**counted, "sessions": float(len(self._live))}.items()
        }

    def offers(self, tool: str = "") -> list[Offer]:
        """The tools that the recipe offers, or one of them by the server's name. Known after a session was opened.

        Raises:
            InvalidRequestError: no such tool.
        """
        if not tool:
            return list(self._offers.values())
        if tool not in self._offers:
            raise InvalidRequestError(
                f"{MCP}{self.name}/{tool}: the server has no tool {tool!r}; it has {', '.join(self._offers)}"
            )
        return [self._offers[tool]]

    async def take_shared(self) -> Connection:
        """The session of all; made where there is none."""
        async with self._opening:
            if self._shared is None:
                self._shared = await self._open()
            return self._shared

    async def take_own(self) -> Connection:
        """A session of its own. Raises ``CapacityError`` where ``max_sessions`` are in use."""
        busy = f"all {self.config.max_sessions} sessions of {self.where} are in use (max_sessions)"
        await take_place(self._room, _PLACE_S, busy)
        return await self._open()

    def drop(self, connection: Connection) -> None:
        """Close a session in the background; its place is free when it is gone."""
        if connection is self._shared:
            self._shared = None
        task = asyncio.create_task(self._close(connection), name=f"close a session of {self.where}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End every session."""
        for connection in list(self._live):
            self.drop(connection)
        if self._closing:
            await asyncio.wait(list(self._closing))

    def failed(self, connection: Connection, error: Exception) -> None:
        """Count a failure of a session in use, and end the session: a new one is made."""
        self.counts["failures"] += 1
        self.counts["restarts"] += 1
        log.warning("mcp.failed", server=self.name, error=str(error))
        self.drop(connection)

    async def _open(self) -> Connection:
        """A new session, its tools read and checked."""
        try:
            from extras.mcp.client import Connection

            connection = Connection(self.where, self.config)
        except (ModuleNotFoundError, ConfigError) as error:
            self._free_place()
            told = error.message if isinstance(error, ConfigError) else f"{self.where}: {PACKAGE_MISSING}"
            raise InvalidRequestError(told) from error
        self._live.add(connection)
        try:
            listed = await connection.open()
            if listed != self._listed:
                self._offers = _checked(listed, self.config, self.where)
                self._listed = listed
        except BaseException as error:
            self.drop(connection)
            if isinstance(error, InfrastructureError):
                self.counts["failures"] += 1
                log.warning("mcp.start_failed", server=self.name, error=error.message)
            if isinstance(error, ConfigError):
                raise InvalidRequestError(error.message) from error
            raise
        return connection

    async def _close(self, connection: Connection) -> None:
        try:
            await connection.close()
        finally:
            if connection in self._live:
                self._live.discard(connection)
                self._free_place()

    def _free_place(self) -> None:
        if self.config.sessions == "episode":
            self._room.release()


PACKAGE_MISSING = f"the package mcp is not installed here: {install('mcp')}"


class McpSession:
    """One trajectory's use of a server. ``close`` in any case."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._own: Connection | None = None
        self._has_state = False
        self._lost = ""

    async def connected(self) -> Connection:
        """The session to use now.

        Raises:
            CapacityError: ``max_sessions`` are in use.
            InvalidRequestError: a schema of the server is invalid; with the tool's name.
            InfrastructureError: the server does not start.
        """
        if self._server.config.sessions == "shared":
            return await self._server.take_shared()
        if self._own is None:
            self._own = await self._server.take_own()
        return self._own

    async def call(self, offer: Offer, arguments: Mapping[str, Any], max_chars: int) -> ToolResult:
        """Call a tool; the arguments match its schema. A result of more than ``max_chars`` is cut.

        Raises:
            ToolError: the server refuses the arguments.
            StateLostError: the session's state is gone with the server.
            InfrastructureError, CapacityError: the call did not happen.
        """
        from extras.mcp.client import CallSlow, ConnectionFailed, tool_result

        config, began, why, is_slow = self._server.config, time.monotonic(), "", False
        for _ in range(_ATTEMPTS):
            if self._lost:
                raise StateLostError(self._lost)
            if why and time.monotonic() - began + config.timeout_s > _CALL_S:
                break
            connection = await self.connected()
            self._server.counts["calls"] += 1
            try:
                result = tool_result(await connection.call(offer.own_name, dict(arguments)), max_chars)
                self._has_state = True
                return result
            except (CallSlow, ConnectionFailed) as error:
                # Over a network the answer may have been lost: only a call that is slow a second time is slow itself.
                if isinstance(error, CallSlow) and (config.url is None or is_slow):
                    self._has_state = True
                    limit = f"TimeoutError: stopped after {config.timeout_s:g} s"
                    return ToolResult(status=ToolStatus.TIME_LIMIT, text=limit)
                is_slow, why = isinstance(error, CallSlow), str(error)
                self._server.failed(connection, error)
                if self._own is not None:
                    self._own = None
                    self._lost = f"{error}; the session's state is lost" if self._has_state else ""
        raise InfrastructureError(why)

    async def close(self) -> None:
        """End the session, in the background."""
        connection, self._own = self._own, None
        if connection is not None:
            self._server.drop(connection)


def _checked(listed: Sequence[Any], config: McpServerConfig, where: str) -> dict[str, Offer]:
    """The offered tools by the server's names.

    Raises:
        ConfigError: an invalid schema, with the tool's name; a tool that the recipe names and the server lacks; no tool.
    """
    names = [tool.name for tool in listed]
    for wanted in config.tools:
        if wanted not in names:
            raise ConfigError(
                f"{where}.tools names {wanted!r}, which the server lacks; it has {', '.join(names) or 'no tools'}"
            )
    if not names:
        raise ConfigError(f"{where}: the server has no tools")
    offers = {}
    for tool in listed:
        if config.tools and tool.name not in config.tools:
            continue
        if tool.name in offers:
            raise ConfigError(f"{where}: the server has two tools named {tool.name!r}")
        try:
            schema = ArgumentSchema(tool.input_schema, "inputSchema", is_closed=False)
        except ValueError as error:
            raise ConfigError(
                f"{where}: the schema of the tool {tool.name!r} is invalid: {error}; correct the server, or offer other tools of "
                f"it with {where}.tools"
            ) from error
        description = tool.description or tool.title or tool.name
        offers[tool.name] = Offer(config.prefix + tool.name, tool.name, description, tool.input_schema, schema)
    return offers


class McpTool:
    """A server's tool, bound to a trajectory's session."""

    def __init__(self, session: McpSession, offer: Offer, max_chars: int) -> None:
        self.name = offer.name
        self.description = offer.description
        self.parameters = offer.parameters
        self._session, self._offer, self._max_chars = session, offer, max_chars

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._session.call(self._offer, arguments, self._max_chars)


class McpServers:
    """The servers of a recipe."""

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        self._servers = {name: McpServer(name, config) for name, config in configs.items()}

    @property
    def names(self) -> list[str]:
        """``mcp:SERVER`` for each."""
        return [f"{MCP}{name}" for name in self._servers]

    @property
    def gauges(self) -> dict[str, float]:
        """Sessions, calls and failures of each server."""
        return {name: n for server in self._servers.values() for name, n in server.gauges.items()}

    async def open(self, names: Sequence[str], max_chars: int | None) -> tuple[list[OfferedTool], list[McpSession]]:
        """The tools that a trajectory asks for by names that begin with ``MCP``, and their sessions, which the caller closes.

        Raises:
            InvalidRequestError: an unknown server or tool; a server that cannot be used.
            InfrastructureError, CapacityError: of ``McpSession.connected``.
        """
        sessions: dict[str, McpSession] = {}
        tools: dict[str, OfferedTool] = {}
        try:
            for name in names:
                server_name, tool_name = split_name(name)
                server = self._servers.get(server_name)
                if server is None:
                    raise InvalidRequestError(
                        f"no MCP server {name!r}; envgateway.mcp has {', '.join(self.names) or 'none'}"
                    )
                if server_name not in sessions:
                    sessions[server_name] = McpSession(server)
                    await sessions[server_name].connected()
                most = max_chars or server.config.max_chars
                for offer in server.offers(tool_name):
                    if offer.name in tools:
                        raise InvalidRequestError(
                            f"{name}: there are two tools named {offer.name!r}: name single tools ({MCP}SERVER/TOOL), or "
                            f"write {server.where}.prefix"
                        )
                    tools[offer.name] = OfferedTool(
                        tool=McpTool(sessions[server_name], offer, most),
                        schema=offer.schema,
                        timeout_s=None,  # the session's own
                        max_chars=most,
                        running=server.running,
                    )
        except BaseException:
            for session in sessions.values():
                await session.close()
            raise
        return list(tools.values()), list(sessions.values())

    async def close(self) -> None:
        """End every session."""
        for server in self._servers.values():
            await server.close()


def server_problems(configs: Mapping[str, McpServerConfig], wanted: Sequence[str]) -> list[str]:
    """Servers that cannot be used from this machine, and tools of ``wanted`` that they lack, a line for each."""
    if importlib.util.find_spec("mcp") is None:
        return [f"envgateway.mcp: {PACKAGE_MISSING}"]
    return asyncio.run(_problems(configs, wanted))


async def _problems(configs: Mapping[str, McpServerConfig], wanted: Sequence[str]) -> list[str]:
    servers = McpServers(configs)

    async def problem_of(name: str) -> str | None:
        try:
            _, sessions = await servers.open(
                [one for one in wanted if split_name(one)[0] == name] or [f"{MCP}{name}"], None
            )
            for session in sessions:
                await session.close()
        except RollmillError as error:
            return error.message
        return None

    try:
        found = await asyncio.gather(*map(problem_of, configs))
    finally:
        await servers.close()
    return [problem for problem in found if problem is not None]
