"""One session at an MCP server, held by a task of its own: the package ties a client to the task that opened the client.

ConnectionFailed     the server did not start, closed the session, sent an invalid answer, or answers nothing any more
CallSlow             no answer in time, and the server answers other requests
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CallToolResult, Implementation
from pydantic import ValidationError as SettingsError

from extras.mcp.settings import McpServerConfig, with_variables
from services.common.errors import ConfigError, InfrastructureError
from services.common.system.child import bound_to_this_process
from services.common.text.tools import ToolStatus, cut_text
from services.common.tools import ToolError, ToolResult

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs each broken connection with its trace; here it is counted
_EVENT_BYTES = 32 << 20  # of the largest event of a server over HTTP
_CONNECT_S = 10.0
_READ_S = 60.0  # above the longest call; the caller's own limit ends a call that hangs
_PING_S = 2.0
_CLOSE_S = 6.0  # above the package's own limits for the end of a process
_SETTLE_S = 1.0  # for the last words of a server that has ended
_MOST_PAGES = 100  # of a list of tools
_CLIENT = Implementation(name="rollmill", version="1")
# Raised by the package's calls for a session that is gone or a server that breaks the protocol.
_FAILURES: tuple[type[Exception], ...] = (MCPError, RuntimeError, ValueError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError,
             anyio.EndOfStream)  # fmt: skip


class ConnectionFailed(Exception):
    """The session is of no more use."""


class CallSlow(Exception):
    """The server works on the call, and has taken too long."""


class Connection:
    """``open`` first, once; ``close`` in any case."""

    def __init__(self, where: str, config: McpServerConfig) -> None:
        """``where`` is the server's key in the recipe. Raises ``ConfigError`` for a program, a directory or a variable that is
        not there."""
        self._where = where
        self._config = config
        if config.command:
            variables = with_variables(config.environment, f"{where}.environment")
            # `python` is then the interpreter of this process, also where its environment is not activated.
            beside = str(Path(sys.executable).parent)
            path = os.pathsep.join([beside, variables.get("PATH", os.environ.get("PATH", os.defpath))])
            if config.directory is not None and not config.directory.is_dir():
                raise ConfigError(f"{where}.directory: there is no directory {config.directory}")
            program = shutil.which(config.command[0], path=path)
            if program is None:
                raise ConfigError(
                    f"{where}.command: there is no program {config.command[0]!r} on the PATH: install it, or write its path"
                )
            command, *arguments = bound_to_this_process([program, *config.command[1:]])
            self._program = StdioServerParameters(
                command=command, args=arguments, env={**variables, "PATH": path}, cwd=config.directory
            )
        else:
            self._headers = with_variables(config.headers, f"{where}.headers")
        self._last_words: deque[bytes] = deque(maxlen=5)  # lines of its standard error
        self._listening: asyncio.Task[None] | None = None  # to them
        self._client: Client | None = None
        self._opened = asyncio.Event()
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

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
            CallSlow, ConnectionFailed: as above.
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
            raise ConnectionFailed(self._failure(f"answers nothing (after {self._config.timeout_s:g} s)")) from None
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
        transport: AbstractAsyncContextManager[Any] = self._over_http() if self._config.url else self._over_pipes()
        async with Client(transport, mode=mode, cache=None, client_info=_CLIENT) as client:
            self._client = client
            self._opened.set()
            await self._leaving.wait()

    @asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        timeout = httpx2.Timeout(_CONNECT_S, read=_READ_S)
        url = str(self._config.url)
        async with httpx2.AsyncClient(headers=self._headers, timeout=timeout) as client:
            async with streamable_http_client(url, http_client=client, max_sse_event_size=_EVENT_BYTES) as streams:
                yield streams

    @asynccontextmanager
    async def _over_pipes(self) -> AsyncIterator[Any]:
        reading, writing = os.pipe()
        self._listening = asyncio.create_task(self._listen(reading), name="read an MCP server's standard error")
        with os.fdopen(writing, "w") as errors:
            async with stdio_client(self._program, errlog=errors) as streams:
                errors.close()  # the server has its own: the pipe ends with the server
                yield streams

    async def _listen(self, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
        )
        try:
            while data := await reader.read(1 << 16):
                self._last_words.extend(line.strip()[:500] for line in data.splitlines() if line.strip())
        finally:
            transport.close()

    async def _tools(self, client: Client) -> Sequence[Any]:
        tools: list[Any] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            try:
                page = await client.list_tools(cursor=cursor)
            except SettingsError as error:
                raise ConfigError(f"{self._where}: {_invalid_list(error)}") from error
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
        """The message about a session that has ended, with the last words of a process."""
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=_SETTLE_S)
        return self._failure(what)

    def _failure(self, what: str) -> str:
        stands = f" (at {self._config.url})" if self._config.url else ""
        if self._last_words:
            stands = f" (its last line on standard error: {self._last_words[-1].decode(errors='replace')})"
        return f"{self._where}: the MCP server {what}{stands}"


def _invalid_list(error: SettingsError) -> str:
    """The error about a list of tools that is not the protocol's, with the place of the tool."""
    first = error.errors()[0]
    root, number, *inside = (*first["loc"], "", "")
    if root != "tools" or not isinstance(number, int):
        return f"the server's list of tools is invalid: {root}: {first['msg']}; correct the server"
    place = ".".join(str(part) for part in inside if part != "")
    return f"the schema of the server's tool {number + 1} is invalid: {place}: {first['msg']}; correct the server"


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


def tool_result(result: CallToolResult, max_chars: int) -> ToolResult:
    """Text blocks one below the other; another block is named with its kind and size; structured content alone is shown as
    JSON. ``is_error`` is the tool's own failure, which the policy is told."""
    text = "\n".join(part for part in map(_shown, result.content) if part)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    text = bounded(text or "(no output)", max_chars)
    if result.is_error:
        return ToolResult(text=f"Error: {text}", status=ToolStatus.TOOL_ERROR)
    return ToolResult(text=text)


def bounded(text: str, max_chars: int) -> str:
    """At most ``max_chars`` characters; the end of a text that is cut says so.

    >>> bounded("0123456789" * 20, 70)
    '0123456789012345678 ...(cut)...  (200 characters, cut to 70)'
    """
    if len(text) <= max_chars:
        return text
    told = f" ({len(text)} characters, cut to {max_chars})"
    return cut_text(text, max(max_chars - len(told), 16), "end") + told


def _shown(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"({block.type} {block.mime_type}, {len(block.data) * 3 // 4} bytes, not shown)"
        case "resource":
            resource = block.resource
            return str(getattr(resource, "text", f"(resource {resource.uri}, not shown)"))
        case _:
            return f"({block.type} {getattr(block, 'uri', '')}, not shown)"
