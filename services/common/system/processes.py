"""Runs, watches and ends child processes.

    process_group    an asyncio child and everything that the child starts, ended at the end of a block
    end_group, exited, has_ended   the end of such a child, whose pipes another process may hold open
    start_logged     a child that writes a log
    end              the end of another child: a grace, SIGKILL, and a wait with a deadline
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
from typing import IO, Any, Protocol

import structlog

from services.common.errors import DeadlineError, InfrastructureError
from services.common.system.child import DIE_WITH_PARENT

log = structlog.get_logger()
TAIL_BYTES = 64 * 1024
NUM_LAST_LINES = 12
PIPES_S = 1.0  # from the end of a killed process to the end of its pipes
LOOK_S = 0.005
KILLED_S = 10.0  # from SIGKILL to the end, which a call of the kernel, as of a file server that is gone, may hold up


@asynccontextmanager
async def process_group(*command: str, grace_s: float = 0.0, **options: Any) -> AsyncIterator[Process]:
    """Start a command, as ``asyncio.create_subprocess_exec`` does, and end its whole group at the end of the block, as
    ``end_group`` does.

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
        await end_group(process, grace_s)


async def end_group(process: Process, grace_s: float = 0.0) -> None:
    """Kill a process and its group, and close its pipes, where one that has left the group holds them open.

    With a grace, the end of its input comes first, then SIGTERM to its group; after each it has ``grace_s`` to end.
    """
    try:
        if grace_s and process.stdin is not None:
            process.stdin.close()
            await has_ended(process, grace_s)
        if grace_s and process.returncode is None:
            signal_group(process, signal.SIGTERM)
            await has_ended(process, grace_s)
    finally:
        signal_group(process)
        try:
            if not await has_ended(process, KILLED_S):
                log.error("child.not_ended", pid=process.pid, after_s=KILLED_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PIPES_S):
                    await process.wait()
        finally:
            transport = getattr(process, "_transport", None)  # nothing public closes our ends of its pipes
            if transport is not None:
                transport.close()


async def exited(process: Process, look_s: float = LOOK_S) -> int:
    """Wait for the exit code. ``Process.wait`` waits for the pipes too, which a process that has left the group may hold
    open for ever."""
    while process.returncode is None:  # noqa: ASYNC110 - asyncio tells of the exit alone nowhere else
        await asyncio.sleep(look_s)
    return process.returncode


async def has_ended(process: Process, limit_s: float) -> bool:
    """Whether it ends in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await exited(process)
    return process.returncode is not None


class ChildProcess(Protocol):
    """A child that is waited for without an event loop; ``subprocess.Popen`` is one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def signal_group(child: Process | ChildProcess, how: int = signal.SIGKILL) -> bool:
    """Signal the process group of a child that was started with ``start_new_session``; False if the group is empty.

    The kernel keeps the number of a group that has processes. So where the child has been waited for, and a process has its
    number, the group was empty, and the number is another process's now.
    """
    try:
        if child.returncode is not None and is_there(child.pid):
            return False
        os.killpg(child.pid, how)
    except ProcessLookupError:
        return False
    return True


def is_there(pid: int) -> bool:
    """Whether a process has this number, its own or that of an earlier one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def end(child: ChildProcess, grace_s: float = 0.0, *, own_group: bool = False) -> bool:
    """Wait ``grace_s`` for the end of a child, then kill the child; with ``own_group``, also everything that it started.
    Returns whether it has ended within the grace."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    ended = child.returncode is not None
    if own_group:
        signal_group(child)
    elif not ended:
        os.kill(child.pid, signal.SIGKILL)  # not waited for: its number is its own
    try:
        child.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        log.error("child.not_ended", pid=child.pid, after_s=KILLED_S)
    return ended


def start_logged(
    command: Sequence[str], log_file: Path, environment: Mapping[str, str] = os.environ, *, own_group: bool
) -> ChildProcess:
    """Start a command without input, with its output at the end of a file; the child finds DIE_WITH_PARENT."""
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, DIE_WITH_PARENT: str(os.getpid())},
            start_new_session=own_group,
        )


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
        """Kill the child; with ``own_group``, also everything that it started, where it has ended itself too."""
        if self._own_group:
            signal_group(self._process)
        else:
            self._process.kill()

    def close(self, grace_s: float = 0.0) -> None:
        """End the child's input, wait ``grace_s`` for the child's end, then kill the child; with ``own_group``, also what it
        leaves behind."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # closing flushes, and the child may be dead
                pipe.close()
        end(self._process, grace_s, own_group=self._own_group)

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
