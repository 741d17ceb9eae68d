"""Runs one server as a child process: free port, readiness check, explained failures, end with the parent."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.common.errors import DeadlineError, InfrastructureError
from services.common.security.bundle import without_keys
from services.common.system.child import bound_to_this_process
from services.common.system.children import KILLED_S, has_ended, how_ended, last_lines, output_tail, signal_group
from services.common.system.free_ports import free_ports
from services.inference.engine.served.client import ServerClient
from services.inference.engine.served.environment import PORTS_TRIED

log = structlog.get_logger(__name__)

READY_POLL_S = 0.5
_NEIGHBOURS = 16  # servers that may start at the same moment in this process
_starts = itertools.count()
LEFTOVERS_POLL_S, LEFTOVERS_POLLS = 0.05, 60  # wait for the workers' end after the server's


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server program: its last arguments, its client, and the meaning of its output."""

    name: str  # as in messages
    section: str  # of its settings in a recipe
    connect: Callable[[str, str], ServerClient]  # of an address and a key
    arguments: Callable[[int, int, Path], Sequence[str]]  # of a port, the version of the initial weights, and a file
    """The file has the line ``api-key: KEY``, and is removed when the server is ready."""
    hints: Sequence[tuple[str, str]]  # a pattern of the line with the cause, and a remedy
    port_taken: re.Pattern[str]  # in the output, if another process listens on the port


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """The command of one server; ``argv`` lacks the arguments that each start chooses."""

    name: str
    argv: tuple[str, ...]
    program: Program
    env: Mapping[str, str] = field(default_factory=dict)


class _PortTakenError(InfrastructureError):
    """Another process listens on the server's port."""


class ServerProcess:
    """Starts a server and returns its client; a failure names its cause.

    Each start has a key of its own. Without the key the server refuses all calls but a health check: other users of the
    machine reach its port, and some of its routes unpickle request bodies.
    """

    def __init__(self, command: ServerCommand, log_path: Path, ready_timeout_s: float) -> None:
        self.name = command.name
        self.program = command.program
        self.log_path = log_path
        self._command = command
        self._ready_timeout_s = ready_timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._log_start = 0  # of this start, in the log

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self, version: int) -> ServerClient:
        """Start and wait until the server answers. Call in the main thread: the kernel ends the child when that thread ends.

        Raises:
            InfrastructureError: the server died while loading; the message has its last lines and a remedy.
            DeadlineError: the server did not answer in time.
        """
        key = secrets.token_hex(32)  # a program takes one that begins with "-" for an option
        key_file = _private_file(f"api-key: {key}\n")
        try:
            for _ in range(PORTS_TRIED - 1):
                try:
                    return await self._start(version, key, key_file)
                except _PortTakenError:
                    log.warning("engine_server.port_taken", server=self.name)
            return await self._start(version, key, key_file)
        finally:
            key_file.unlink()

    async def _start(self, version: int, key: str, key_file: Path) -> ServerClient:
        port = free_ports(1 + next(_starts) % _NEIGHBOURS)[-1]
        argv = [*self._command.argv, *self.program.arguments(port, version, key_file)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._child = await asyncio.create_subprocess_exec(
                *bound_to_this_process(argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**without_keys(os.environ), **self._command.env},
                start_new_session=True,  # the workers are in its group and end with the group
            )
        log.info("engine_server.started", server=self.name, pid=self._child.pid, port=port, log=str(self.log_path))
        client = self.program.connect(f"http://127.0.0.1:{port}", key)
        try:
            await self._until_ready(client)
        except BaseException:
            await client.close()
            await self.stop()
            raise
        return client

    async def ended(self) -> str:
        """Wait without a limit for the process's end; returns the exit status and the last output."""
        assert self._child is not None
        return self._exit_message(await self._child.wait(), "")

    def kill(self) -> None:
        """Kill the server and its workers at once."""
        if self._child is not None:
            signal_group(self._child)

    async def stop(self) -> None:
        """Kill the server and its workers.

        The cleanup of their semaphores is given a moment. SIGTERM is not used: the server has no state to save and would
        wait five seconds.
        """
        child = self._child
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        await has_ended(child, KILLED_S)
        for _ in range(LEFTOVERS_POLLS):
            if not signal_group(child, 0):
                return
            await asyncio.sleep(LEFTOVERS_POLL_S)
        if signal_group(child):
            log.warning("engine_server.killed_workers", server=self.name)

    async def _until_ready(self, client: ServerClient) -> None:
        assert self._child is not None
        deadline = asyncio.get_running_loop().time() + self._ready_timeout_s
        while not await client.is_ready():
            if self._child.returncode is not None:
                raise InfrastructureError(self._exit_message(self._child.returncode, " while loading"))
            if self.program.port_taken.search(self._output()):
                # The server would poll the port's owner for two minutes.
                raise _PortTakenError(
                    f"the {self.program.name} server {self.name} found its port taken\n{self._last_lines()}"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineError(
                    f"the {self.program.name} server {self.name} did not answer within {self._ready_timeout_s:g} s "
                    f"({self.program.section}.ready_timeout_s)\n{self._last_lines()}",
                    wait=self.name,
                )
            await asyncio.sleep(READY_POLL_S)

    def _exit_message(self, code: int, when: str) -> str:
        return f"the {self.program.name} server {self.name} {how_ended(code)}{when}{_explained(self._output(), self.program.hints)}\n{self._last_lines()}"

    def _last_lines(self) -> str:
        return last_lines(self.log_path, self._log_start)

    def _output(self) -> str:
        """The end of this start's output."""
        return output_tail(self.log_path, self._log_start)


def _explained(output: str, hints: Sequence[tuple[str, str]]) -> str:
    """The line with the cause, and a remedy; empty if no hint matches."""
    lines = output.splitlines()
    for pattern, hint in hints:
        found = next((line.strip() for line in reversed(lines) if re.search(pattern, line)), None)
        if found is not None:
            return f": {hint}\n  {found[-400:]}"
    return ""


def _private_file(text: str) -> Path:
    """A file that only its owner may read, for text that must not be on a command line or in a log."""
    descriptor, name = tempfile.mkstemp(prefix="rollmill-server-", suffix=".yaml")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return Path(name)
