"""One session at an MCP server, held by a task of its own: the package ties a client to the task that opened the client.

ConnectionFailed     the server did not start, closed the session, or sent an invalid answer
└── CallHung         no answer in time, neither to the call nor to another request
CallSlow             no answer in time, and the server answers other requests
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CallToolResult, Implementation
from pydantic import ValidationError

from services.common.config.processes.mcp import McpServerConfig, with_variables
from services.common.errors import ConfigError, InfrastructureError
from services.common.tools import ToolError
from services.envgateway.tools.mcp.stdio import MAX_MESSAGE_BYTES, ServerProcess

_CONNECT_S = 10.0
_READ_S = 60.0  # above the longest call; the caller's own limit ends a call that hangs


@asynccontextmanager
async def http_streams(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """The streams of messages for ``mcp.Client``."""
    transport = _Bounded(httpx2.AsyncHTTPTransport())
    timeout = httpx2.Timeout(_CONNECT_S, read=_READ_S)
    async with httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=transport) as client:
        async with streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams:
            yield streams


class _Bounded(httpx2.AsyncBaseTransport):  # type: ignore[misc]
    """Refuses the rest of an answer to a POST above ``MAX_MESSAGE_BYTES``: the package reads it whole."""

    def __init__(self, inner: httpx2.AsyncHTTPTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if request.method == "POST":
            response.stream = _BoundedStream(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):  # type: ignore[misc]
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for part in self._inner:
            seen += len(part)
            if seen > MAX_MESSAGE_BYTES:
                raise httpx2.ReadError(f"an answer of more than {MAX_MESSAGE_BYTES >> 20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs each broken connection with its trace; here it is counted

_PING_S = 2.0
_CLOSE_S = 4.0
_MOST_PAGES = 100  # of a list of tools
_CLIENT = Implementation(name="rollmill", version="1")
# Raised by the package's calls for a session that is gone or a server that breaks the protocol.
_FAILURES: tuple[type[Exception], ...] = (MCPError, RuntimeError, ValueError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError,
             anyio.EndOfStream)  # fmt: skip


class ConnectionFailed(Exception):
    """The session is of no more use."""


class CallHung(ConnectionFailed):
    """The server answers nothing."""


class CallSlow(Exception):
    """The server works on the call, and has taken too long."""


class Connection:
    """``open`` first, once; ``close`` in any case."""

    def __init__(self, where: str, config: McpServerConfig) -> None:
        """``where`` is the server's key in the recipe. Raises ``ConfigError`` for a program or a variable that is not there."""
        self._where = where
        self._config = config
        self._process: ServerProcess | None = None
        self._headers: dict[str, str] = {}
        if config.command:
            variables = with_variables(config.environment, f"{where}.environment")
            self._process = ServerProcess(config.command, variables, config.directory, where)
        else:
            self._headers = with_variables(config.headers, f"{where}.headers")
        self._client: Client | None = None
        self._opened = asyncio.Event()
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def open(self) -> Sequence[Any]:
        """Start the server or dial it; returns its tools.

        Raises:
            InfrastructureError: no tools within ``start_timeout_s``; with the server's last words.
        """
        self._task = asyncio.create_task(self._hold(), name=f"hold {self._where}")
        self._task.add_done_callback(_look_at)
        opened = asyncio.create_task(self._opened.wait())
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait({self._task, opened}, return_when=asyncio.FIRST_COMPLETED)
                if self._client is None:
                    raise ConnectionFailed(_told(self._task))
                return await self._tools(self._client)
        except TimeoutError:
            raise InfrastructureError(self._failure(f"did not list its tools within {limit_s:g} s")) from None
        except (ConnectionFailed, *_FAILURES) as error:  # type: ignore[misc]
            raise InfrastructureError(await self._ended(f"does not start: {error}")) from error
        finally:
            opened.cancel()

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            ToolError: the server refuses the arguments.
            CallSlow, CallHung, ConnectionFailed: as above.
        """
        assert self._client is not None
        assert self._task is not None
        if self._task.done():
            raise ConnectionFailed(self._failure(f"has closed the session: {_told(self._task)}"))
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._client.call_tool(name, arguments)
        except TimeoutError:
            if await self._answers():
                raise CallSlow(self._failure(f"did not answer a call within {self._config.timeout_s:g} s")) from None
            raise CallHung(self._failure(f"answers nothing (after {self._config.timeout_s:g} s)")) from None
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message[: self._config.max_chars]) from error
            raise ConnectionFailed(await self._ended(f"failed: {error.message[:500]}")) from error
        except _FAILURES as error:
            raise ConnectionFailed(await self._ended(f"failed: {type(error).__name__}: {str(error)[:500]}")) from error

    async def close(self) -> None:
        """End the session and the process; returns when both are gone."""
        self._leaving.set()
        task = self._task
        if task is None or task.done():
            return
        if self._client is not None:  # else it waits for the handshake, which may never come
            await asyncio.wait({task}, timeout=_CLOSE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_S)

    async def _hold(self) -> None:
        # Sessions of an HTTP server exist in the protocol's versions with a handshake only.
        mode = "legacy" if self._config.url and self._config.sessions == "episode" else "auto"
        async with Client(self._transport(), mode=mode, cache=None, client_info=_CLIENT) as client:
            self._client = client
            self._opened.set()
            await self._leaving.wait()

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        if self._process is not None:
            return self._process.streams()
        assert self._config.url is not None
        return http_streams(self._config.url, self._headers)

    async def _tools(self, client: Client) -> Sequence[Any]:
        tools: list[Any] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            try:
                page = await client.list_tools(cursor=cursor)
            except ValidationError as error:
                raise ConfigError(f"{self._where}: {await _invalid_tool(client, cursor, error)}") from error
            tools.extend(page.tools)
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise ConfigError(
            f"{self._where}: the server's list of tools has more than {_MOST_PAGES} pages: it does not end"
        )

    async def _answers(self) -> bool:
        assert self._client is not None
        try:
            async with asyncio.timeout(_PING_S):
                await self._client.list_tools()
        except (TimeoutError, *_FAILURES):  # type: ignore[misc]
            return False
        return True

    async def _ended(self, what: str) -> str:
        """The message about a session that has ended, with the exit of a process that is about to end."""
        if self._process is not None:
            await self._process.settle()
        return self._failure(what)

    def _failure(self, what: str) -> str:
        stands = self._process.how_it_stands() if self._process is not None else f"at {self._config.url}"
        return f"{self._where}: the MCP server {what}{f' ({stands})' if stands else ''}"


async def _invalid_tool(client: Client, cursor: str | None, error: ValidationError) -> str:
    """The error about a list of tools that is not the protocol's, with the name of the tool."""
    first = error.errors()[0]
    root, number, *inside = (*first["loc"], "", "")
    said = f"{'.'.join(str(part) for part in inside if part != '')}: {first['msg']}; correct the server"
    if root != "tools" or not isinstance(number, int):
        return f"the server's list of tools is invalid: {root}: {first['msg']}; correct the server"
    return f"the schema of the tool {await _name_of(client, cursor, number)!r} is invalid: {said}"


async def _name_of(client: Client, cursor: str | None, number: int) -> str:
    """The name of a tool by its place. Nothing public of the package returns a list that the package has refused."""
    try:
        dispatcher = client.session._dispatcher
        page = await dispatcher.send_raw_request("tools/list", {"cursor": cursor} if cursor else None)
        return str(page["tools"][number]["name"])
    except (AttributeError, LookupError, TypeError, MCPError):
        return f"number {number + 1}"


def _look_at(task: asyncio.Task[None]) -> None:
    """Read the reason for the end: where no caller asks for it, asyncio would log an exception that is never retrieved."""
    if not task.cancelled():
        task.exception()


def _told(task: asyncio.Task[None]) -> str:
    """The reason for the end of a session."""
    if not task.done() or task.cancelled():
        return "it was closed"
    error: BaseException | None = task.exception()
    while isinstance(error, BaseExceptionGroup):  # of the package's own tasks
        error = error.exceptions[0]
    return "it was closed" if error is None else f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")
