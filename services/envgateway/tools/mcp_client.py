"""One session at an MCP server, held by a task of its own: the package ties a client to the task that opened the client.

ConnectionFailed     the server did not start, closed the session, or sent an invalid answer
└── CallHung         no answer in time, neither to the call nor to another request
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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import structlog
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_PARAMS, CallToolResult, Implementation, jsonrpc_message_adapter
from pydantic import ValidationError as SettingsError

from services.common.config.envgateway import McpServerConfig, with_variables
from services.common.errors import ConfigError, InfrastructureError
from services.common.system.child import bound_to_this_process
from services.common.system.processes import end_group, has_ended, how_ended, signal_group
from services.common.text.tools import ToolStatus, cut_text
from services.common.tools import ToolError, ToolResult

# --- A server as a child process: JSON-RPC messages, one in a line, over its standard input and output.


log = structlog.get_logger()
MAX_MESSAGE_BYTES = 32 << 20
_LINE_BYTES = 1 << 16  # of standard error
_KEPT_LINES = 5
_END_S = 0.5  # from the end of standard input, and from SIGTERM, to the next stronger means
_SETTLE_S = 1.0
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")


class ServerProcess:
    """The process of one server, and its last words."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path | None, where: str
    ) -> None:
        """Raises ``ConfigError`` for a program or directory that is not there; ``where`` is the key in the recipe."""
        self._environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(environment)
        # `python` is then the interpreter of this process, also where its environment is not activated.
        beside = str(Path(sys.executable).parent)
        self._environment["PATH"] = os.pathsep.join([beside, self._environment.get("PATH", os.defpath)])
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"{where}.directory: there is no directory {directory}")
        program = shutil.which(command[0], path=self._environment.get("PATH"))
        if program is None:
            raise ConfigError(
                f"{where}.command: there is no program {command[0]!r} on the PATH: install it, or write its path"
            )
        self._command = [program, *command[1:]]
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None  # to its standard error
        self.last_words: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def settle(self) -> None:
        """Wait for the exit code of a process that is about to end, and for its last words; not for long."""
        if self._process is not None and await has_ended(self._process, _SETTLE_S) and self._listening is not None:
            await asyncio.wait({self._listening}, timeout=_SETTLE_S)

    def how_it_stands(self) -> str:
        """For error messages: the exit, and the last line of standard error."""
        code = self._process.returncode if self._process is not None else None
        ended = "" if code is None else f"it {how_ended(code)}"
        said = f"its last line on standard error: {self.last_words[-1]}" if self.last_words else ""
        return "; ".join(part for part in (ended, said) if part)

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """Start the process; yields the streams of messages for ``mcp.Client``; at the end no process is left."""
        self._process = process = await asyncio.create_subprocess_exec(
            *bound_to_this_process(self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            cwd=self._directory,
            start_new_session=True,
            limit=MAX_MESSAGE_BYTES,
        )
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        pumps = [
            asyncio.create_task(self._read(process, incoming), name="read from an MCP server"),
            asyncio.create_task(self._write(process, outgoing, incoming), name="write to an MCP server"),
        ]
        self._listening = asyncio.create_task(self._listen(process), name="read an MCP server's standard error")
        pumps.append(self._listening)
        try:
            yield read, write
        finally:
            with anyio.CancelScope(shield=True):
                await end_group(process, _END_S)
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                for stream in (read, write, incoming, outgoing):
                    stream.close()

    async def _read(self, process: asyncio.subprocess.Process, incoming: Any) -> None:
        assert process.stdout is not None
        with incoming:  # its end tells the client that the server is gone
            while True:
                try:
                    line = await process.stdout.readline()
                except ValueError:  # no end of line within the limit
                    self.last_words.append(f"(a message of more than {MAX_MESSAGE_BYTES >> 20} MiB)")
                    signal_group(process)
                    return
                if not line:
                    return
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError:  # a server that prints: its output is no message
                    self.last_words.append(f"(on standard output) {_text(line)}")
                    continue
                try:
                    await incoming.send(message)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return

    async def _write(self, process: asyncio.subprocess.Process, outgoing: Any, incoming: Any) -> None:
        assert process.stdin is not None
        try:
            async for message in outgoing:
                process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()
        except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            incoming.close()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(_LINE_BYTES):
            self.last_words.extend(_text(line) for line in data.splitlines() if line.strip())


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()[:500]


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
        """The message about a session that has ended, with the exit of a process that is about to end."""
        if self._process is not None:
            await self._process.settle()
        return self._failure(what)

    def _failure(self, what: str) -> str:
        stands = self._process.how_it_stands() if self._process is not None else f"at {self._config.url}"
        return f"{self._where}: the MCP server {what}{f' ({stands})' if stands else ''}"


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


_NO_TEXT = "(no output)"


def tool_result(result: CallToolResult, max_chars: int) -> ToolResult:
    """Text blocks one below the other; another block is named with its kind and size; structured content alone is shown as
    JSON. ``is_error`` is the tool's own failure, which the policy is told."""
    text = "\n".join(part for part in map(_shown, result.content) if part)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    text = bounded(text or _NO_TEXT, max_chars)
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
