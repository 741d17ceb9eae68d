"""A server as a child process: JSON-RPC messages, one in a line, over its standard input and output.

The package's own transport reads lines of any length into memory and takes seconds to end a process. Here a message is
bounded, the end is quick, the last lines of standard error go into error messages, and the kernel ends the process with the
gateway.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import structlog
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from services.common.errors import ConfigError
from services.common.system.child import bound_to_this_process
from services.common.system.children import end_group, has_ended, how_ended, signal_group

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
        rest = b""
        while data := await process.stderr.read(_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_LINE_BYTES:]
            self.last_words.extend(_text(line) for line in lines if line.strip())
        if rest.strip():
            self.last_words.append(_text(rest))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()[:500]
