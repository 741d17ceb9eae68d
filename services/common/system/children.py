"""Runs, watches and ends child processes.

    process_group    an asyncio child and everything that the child starts, killed at the end of a block
    exited, end_group, close_pipes   the end of such a child, whose pipes another process may hold open
    AnsweringChild   a child that answers questions, one JSON line each; killed when an exchange fails
    signal_group     a signal to a child that has a group of its own, and to everything that it started
    how_ended, output_tail, last_lines   the report of an end

The child's own part, to end with its parent, is ``child``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from services.common.errors import DeadlineError, InfrastructureError
from services.common.system.child import DIE_WITH_PARENT

TAIL_BYTES = 64 * 1024
NUM_LAST_LINES = 12
PIPES_S = 1.0  # from the end of a killed process to the end of its pipes
LOOK_S = 0.005


@asynccontextmanager
async def process_group(*command: str, **options: Any) -> AsyncIterator[Process]:
    """Start a command, as ``asyncio.create_subprocess_exec`` does, and kill its whole group at the end of the block.

    A cancellation that arrives while the process starts kills the group too: asyncio alone would kill the process and
    leave its children.

    Raises:
        OSError: the command cannot be started.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, start_new_session=True, **options))
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):  # then nothing was started
            await end_group(await starting)
        raise
    try:
        yield process
    finally:
        await end_group(process)


async def end_group(process: Process) -> None:
    """Kill a process and its group, and close its pipes, where one that has left the group holds them open."""
    signal_group(process.pid)
    try:
        await exited(process)  # ends: it was killed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PIPES_S):
                await process.wait()
    finally:
        close_pipes(process)


async def exited(process: Process, look_s: float = LOOK_S) -> int:
    """Wait for the exit code. ``Process.wait`` waits for the pipes too, which a process that has left the group may hold
    open for ever."""
    while process.returncode is None:  # noqa: ASYNC110 - asyncio tells of the exit alone nowhere else
        await asyncio.sleep(look_s)
    return process.returncode


def close_pipes(process: Process) -> None:
    """Close our ends of the pipes of a process that has ended; readers see the end."""
    transport = getattr(process, "_transport", None)  # nothing public closes them
    if transport is not None:
        transport.close()


def signal_group(pid: int, how: int = signal.SIGKILL) -> bool:
    """Signal the process group of a child that was started with ``start_new_session``; False if the group is empty."""
    try:
        os.killpg(pid, how)
    except ProcessLookupError:
        return False
    return True


class ChildLostError(InfrastructureError):
    """The child ended, did not answer in time or could not be started; another one may succeed."""


class AnsweringChild:
    """A child with questions on its standard input and answers on its standard output, one JSON line each.

    A child that fails during an exchange is killed, so that a late answer is never matched to a later question. The child
    must end at the end of its input; the kernel ends the child with its parent.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] = MappingProxyType({}),
        stderr: IO[bytes] | None = None,
        own_group: bool = False,
    ) -> None:
        """``variables``: added to the environment. ``own_group``: whether to kill everything that the child started, too.

        Raises:
            ChildLostError: the child cannot be started.
        """
        self._name = name
        self._own_group = own_group
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, DIE_WITH_PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1", **variables},
                start_new_session=own_group,
            )
        except OSError as error:  # out of processes or memory
            raise ChildLostError(f"{name} could not be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while the child runs."""
        return self._process.poll()

    def ask(self, wait: str, timeout_s: float, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send the question, if there is one, and read the next answer. ``wait`` names the wait.

        Raises:
            ChildLostError: the child ended or was silent for ``timeout_s``; the child is killed.
        """
        assert self._process.stdin is not None
        try:
            if question is not None:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read_line(wait, timeout_s))
        except (OSError, EOFError, DeadlineError) as error:
            self.kill()
            message = error.message if isinstance(error, DeadlineError) else f"{self._name} ended during {wait}"
            raise ChildLostError(message) from error
        return answer

    def wait(self, timeout_s: float) -> None:
        """Wait for the end. Raises ``ChildLostError`` when the child has not ended after ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildLostError(f"{self._name} has not ended within {timeout_s:g} s") from None

    def kill(self) -> None:
        """Kill the child; with ``own_group``, also everything that it started, where it has ended itself too. No effect once
        its end was noted: its number may be another process's."""
        if self._process.returncode is not None:
            return
        if self._own_group:
            signal_group(self.pid)
        else:
            self._process.kill()

    def close(self, grace_s: float = 0.0) -> None:
        """End the child's input, wait ``grace_s`` for the child's end, then kill the child; with ``own_group``, also what it
        leaves behind."""
        is_new = self._process.returncode is None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # closing flushes, and the child may be dead
                pipe.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()  # ends: it was killed
        if self._own_group and is_new:
            signal_group(self.pid)

    def _read_line(self, wait: str, timeout_s: float) -> bytes:
        """Raises ``EOFError`` at the end of the output, ``DeadlineError`` without a whole line in time."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        looking = select.poll()  # ``select.select`` takes no descriptor from 1024 on
        looking.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not looking.poll(math.ceil(1000 * max(0.0, deadline - time.monotonic()))):
                raise DeadlineError(f"{wait} took longer than {timeout_s:g} s", wait=wait)
            data = os.read(descriptor, TAIL_BYTES)
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def how_ended(code: int) -> str:
    """An exit code in words.

    >>> how_ended(-9), how_ended(2)
    ('was killed by SIGKILL', 'exited with 2')
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def output_tail(path: Path, start: int = 0) -> str:
    """The end of a file that a child writes, at most ``TAIL_BYTES``, from ``start`` on; empty without a file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(path: Path, start: int = 0) -> str:
    """The last lines of such a file, for a message that tells of the child's end."""
    lines = output_tail(path, start).strip().splitlines()[-NUM_LAST_LINES:]
    shown = "\n".join(f"    {line}" for line in lines) or "    (no output)"
    return f"  last lines of {path}:\n{shown}"
