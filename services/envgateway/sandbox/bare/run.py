"""One run in the supervisor: pipes, used resources, reason of a stop, and verdict."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from . import procfs, wire
from .fork_server import ForkServer
from .slots import DiskQuota, Room, Slot
from .statuses import RunStatus

# --- The status of a program, from the end of its first process.


def ending(exit_code: int, notes: bytes, cpu_s: float, cpu_limit_s: float) -> RunStatus:
    """The status of a process that was not stopped. ``exit_code``: minus the signal where one has killed it; ``notes``: the
    harness's notes behind the ready note."""
    if wire.NO_COMPILE_NOTE in notes and exit_code != 0:
        return RunStatus.COMPILE_ERROR
    if wire.OUT_OF_MEMORY_NOTE in notes:
        return RunStatus.MEMORY_LIMIT
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= cpu_limit_s:
        return RunStatus.TIME_LIMIT
    return RunStatus.RUNTIME_ERROR if exit_code else RunStatus.OK


# --- Input and output of a program.


_READ_BYTES = 1 << 16  # at once: a buffer below the size from which each is a mapping of its own
_MOST_DISCARDED = 1 << 20  # in one look
_USUAL_PIPE, _LARGEST_PIPE = 1 << 16, 1 << 20


class CappedPipe:
    """The read end of a pipe. ``truncated`` says that more than ``cap`` bytes came."""

    def __init__(self, fd: int | None, cap: int) -> None:
        """``fd`` does not block; it is closed at the end of the stream or by ``close``. None for a stream that is empty."""
        self.fd = fd if fd is not None else -1
        self.data = bytearray()
        self.truncated = False
        self.open = fd is not None
        self._cap = self._whole_cap = cap
        if fd is not None and cap > _USUAL_PIPE:
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, min(cap, _LARGEST_PIPE))
            except OSError:  # a smaller pipe is only slower
                pass

    def drain(self) -> None:
        """Read the available output. Data past the cap is dropped, and one read shows the overflow."""
        while self.open and not self.truncated and (chunk := self._read()):
            room = self._cap - len(self.data)
            self.data += chunk[:room]
            self.truncated = len(chunk) > room

    def discard(self) -> None:
        """Past the cap: read and drop output, so that the writer can stop."""
        left = _MOST_DISCARDED
        while self.open and left > 0 and (chunk := self._read()):
            left -= len(chunk)

    def _read(self) -> bytes:
        """One part of the output; empty while none is there, and at the end, which closes the pipe."""
        try:
            chunk = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionResetError:  # of a socket: the end of a process that has left a question unread
            chunk = b""
        if not chunk:
            self.close()
        return chunk

    def take(self) -> bytes:
        """Output since the last call; all output counts towards the cap."""
        data = bytes(self.data)
        self.data.clear()
        self._cap -= len(data)
        return data

    def renew(self) -> None:
        """Free the whole cap again. Output that was not taken stays, unless the cap was exceeded already."""
        if self.truncated:
            self.data.clear()
        self._cap = self._whole_cap
        self.truncated = False

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.fd)


_F_ADD_SEALS, _SEAL_ALL = 1033, 0xF  # seal, shrink, grow, write


def sealed(data: bytes) -> int:
    """A read-only file in memory, at its start: the reader may seek, and no process has to feed the file."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_ALL)
    return fd


# --- One question to a live process: its time limit, and the interruption and kill behind the limit.
#
#     asked ──time or output over──> interrupted (SIGINT) ──grace over──> killed
#       └──────── answered ────────────────┘
#
# An interruption is over when the fork server says that the signal was sent: an answer that arrives earlier is held back,
# so that the signal can never reach the next question.


_GRACE_S = 1.0


class LiveTurn:
    """Deadlines of a question. ``why`` is the status of an interruption, None before one."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._deadline = now + limit_s
        self.asked = now
        self.why: RunStatus | None = None
        self.awaits_signal = False
        self._kill_at = 0.0

    def begin(self, now: float) -> None:
        """The process is there only now: its time runs from here."""
        self._deadline = now + self._limit_s
        self.asked = now

    def stood_still(self, seconds: float) -> None:
        """Leave out a time in which the machine did not go on."""
        self._deadline += seconds
        self._kill_at += seconds

    def check(self, now: float, flooded: bool) -> bool:
        """Whether to interrupt, which is said once."""
        if self.why is not None or not (flooded or now >= self._deadline):
            return False
        self.why = RunStatus.OUTPUT_LIMIT if flooded else RunStatus.TIME_LIMIT
        self.awaits_signal = True
        self._kill_at = now + _GRACE_S
        return True

    def is_beyond_grace(self, now: float) -> bool:
        return self.why is not None and now >= self._kill_at

    @property
    def next_event(self) -> float:
        return self._kill_at if self.why is not None else self._deadline


# --- The run.


_LOOK_EVERY_S = 0.010
_LATER_LOOK_EVERY_S = 0.020
_IDLE_LOOK_EVERY_S = 0.250  # of an idle live process
_START_TIMEOUT_S = 30.0  # a fork server that is still importing; the run's own time begins with its process
_BUFFERS_EVERY_S = 0.1
_NO_MEMORY = "the machine or the gateway's cgroup had no memory left, and the kernel killed a process of the program"
_SHARES_PAUSE = 5  # multiple of the time that the last read of the shares took: many mappings make the read slow


@dataclass(frozen=True)
class Limits:
    """Limits of a run, from the gateway; the supervisor enforces all but ``file_bytes`` and ``open_files``."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    processes: int
    output_bytes: int  # of each of stdout and stderr
    answer_bytes: int  # of a harness's answers
    file_bytes: int
    open_files: int
    disk_bytes: int
    num_files: int
    turn_s: float = 0.0  # of one question to a process that lives on between them; 0 for all others


class Run:
    """One run. Between Start and Ended the supervisor checks limits; between Ended and the answer the slot is emptied."""

    def __init__(
        self, run_id: int, slot: Slot, limits: Limits, fds: tuple[int, int, int, int | None], now: float
    ) -> None:
        self.id = run_id
        self.slot = slot
        self.limits = limits
        self.stdout = CappedPipe(fds[0], limits.output_bytes)
        self.stderr = CappedPipe(fds[1], limits.output_bytes)
        self.answer = CappedPipe(fds[3], limits.answer_bytes)
        self.fork_server: ForkServer  # set by the supervisor before anything is asked of the run
        self._note_fd = fds[2]
        self._note = b""
        self.pid: int | None = None
        self.started = now
        self._start_deadline = now + _START_TIMEOUT_S
        self.next_look = now + min(_LOOK_EVERY_S, limits.wall_s)
        self.stop_status: RunStatus | None = None  # reason of the supervisor's kill
        self.detail = ""
        self.ended: float | None = None
        self.wait_status = 0
        self.cpu_s = 0.0
        self.strays_cpu_s = 0.0
        self.adopted_before_s = 0.0  # CPU time that the slot's first process had reaped before this run
        self.peak_memory_bytes = 0
        self._oom_kills_before = procfs.oom_kills()
        self._room = None if slot.has_own_disk else Room(slot.directory, limits.disk_bytes, limits.num_files)
        self._disk_was_full = False
        self._buffer_bytes = 0  # kernel memory of its sockets and pipes
        self._next_buffers = now + _BUFFERS_EVERY_S
        self._next_shares = now
        self._seen_ticks: dict[int, int] = {}
        self.turn: LiveTurn | None = None  # of a live process, during a question
        self._quota = None if slot.has_own_disk else DiskQuota(slot.directory, limits.disk_bytes, limits.num_files, now)

    def begin(self, pid: int, now: float) -> None:
        """The fork server has forked the child: the run's time starts."""
        self.pid = pid
        self.started = now
        self.next_look = now + min(_LOOK_EVERY_S, self.limits.wall_s)
        if self.turn is not None:
            self.turn.begin(now)

    def stood_still(self, seconds: float) -> None:
        """Leave out a time in which the machine, or the supervisor, did not go on."""
        self.started += seconds
        self._start_deadline += seconds
        if self.turn is not None:
            self.turn.stood_still(seconds)

    @property
    def is_live(self) -> bool:
        """Whether the process stays between questions, each with a time and an output of its own."""
        return self.limits.turn_s > 0

    def ask(self, now: float) -> None:
        """A question goes to a live process."""
        self.turn = LiveTurn(self.limits.turn_s, now)
        self.next_look = now + _LOOK_EVERY_S
        for stream in (self.stdout, self.stderr, self.answer):
            stream.renew()

    def end_turn(self) -> tuple[dict[str, Any], list[bytes]]:
        """A live process has answered: the status and the rest of the turn."""
        for stream in (self.stdout, self.stderr):
            stream.drain()
            if stream.truncated:
                stream.discard()
        head = {"interrupted": self.turn.why if self.turn is not None else None, "truncated": self.is_flooded}
        self.turn = None
        return head, [self.stdout.take(), self.stderr.take()]

    @property
    def is_flooded(self) -> bool:
        return self.stdout.truncated or self.stderr.truncated

    @property
    def deadline(self) -> float:
        return self.started + self.limits.wall_s if self.pid is not None else self._start_deadline

    def drain(self) -> None:
        self.stdout.drain()
        self.stderr.drain()
        self.answer.drain()

    def check_limits(self, now: float, strays: list[int]) -> RunStatus | None:
        """Read output and measure; a status when a limit is passed."""
        self.drain()
        if self.answer.truncated or (self.is_flooded and not self.is_live):
            return self._printed_too_much()
        if self.is_flooded:
            self.stdout.discard()
            self.stderr.discard()
        if self.turn is not None and self.turn.is_beyond_grace(now):
            self.detail = "it could not be interrupted"
            return self.turn.why
        self.read_note()
        if now >= self.deadline:
            return self._out_of_time()
        self.next_look = self._after(now)
        if self.pid is None:
            return None
        family = procfs.descendants([self.pid, *strays])
        used = procfs.usage(family, self._seen_ticks)
        self.peak_memory_bytes = max(self.peak_memory_bytes, used.resident_bytes if len(family) == 1 else 0)
        self.cpu_s = max(self.cpu_s, used.cpu_s + self.strays_cpu_s)
        if used.processes > self.limits.processes:
            self.detail = "more processes than allowed"
            return RunStatus.RUNTIME_ERROR
        if self.takes_too_much(family, used.resident_bytes, now):
            return RunStatus.MEMORY_LIMIT
        if self.cpu_s > self.limits.cpu_s:
            self.detail = "CPU time"
            return RunStatus.TIME_LIMIT
        return self.check_disk(now, family)

    def _after(self, now: float) -> float:
        """Time of the next check: soon at first, seldom for an idle live process."""
        if self.is_live and self.turn is None:
            return min(now + _IDLE_LOOK_EVERY_S, self.deadline)
        began = self.turn.asked if self.turn is not None else self.started
        event = self.turn.next_event if self.turn is not None else self.deadline
        return min(now + (_LOOK_EVERY_S if now - began < 0.2 else _LATER_LOOK_EVERY_S), max(event, now), self.deadline)

    def check_disk(self, now: float, family: list[int], last: bool = False) -> RunStatus | None:
        over = self._quota.exceeded(now, family, last) if self._quota is not None else ""
        if over:
            self.detail = f"disk quota: {over}"
            return RunStatus.RUNTIME_ERROR
        return None

    def _out_of_time(self) -> RunStatus:
        if self.pid is None:
            self.detail = "the fork server did not fork"
        elif not self._note:  # the program has not begun, and can neither remove nor write the note
            self.detail = "confinement took all of the program's time"
        else:
            self.detail = "wall time"
            return RunStatus.TIME_LIMIT
        return RunStatus.INFRA_ERROR

    def takes_too_much(self, family: list[int], resident_bytes: int, now: float) -> bool:
        """The sum of resident sets counts a page that children share once for each: decide by the shares.

        Asking for the shares takes the kernel a step for each mapping, so the supervisor does so seldom where the call
        is slow; in between, the largest process decides.
        """
        if now >= self._next_buffers:
            self._buffer_bytes = procfs.buffer_bytes(family)
            self._next_buffers = now + _BUFFERS_EVERY_S
        resident_bytes += self._buffer_bytes
        if resident_bytes <= self.limits.memory_bytes:
            return False
        if len(family) > 1:
            resident_bytes = max(map(procfs.resident_bytes, family)) + self._buffer_bytes
            if resident_bytes <= self.limits.memory_bytes and now >= self._next_shares:
                began = time.monotonic()
                resident_bytes = procfs.proportional_bytes(family) + self._buffer_bytes
                self._next_shares = now + _SHARES_PAUSE * (time.monotonic() - began)
        self.peak_memory_bytes = max(self.peak_memory_bytes, resident_bytes)
        return resident_bytes > self.limits.memory_bytes

    def _printed_too_much(self) -> RunStatus | None:
        if self.answer.truncated:
            self.detail = "the answer is too large"
        return RunStatus.OUTPUT_LIMIT if self.is_flooded or self.answer.truncated else None

    def read_note(self) -> None:
        """The child's own channel: ready or failed, then events with a verdict of their own.

        A socket, which unlike a pipe cannot be opened by name: the program cannot read written notes back.
        """
        if len(self._note) > 64:
            return
        try:
            self._note += os.read(self._note_fd, 4096)
        except (BlockingIOError, ConnectionResetError):
            pass

    def left_its_process(self) -> None:
        """The first process has ended: a last check of resources that are gone with the process."""
        self._disk_was_full = self._room is not None and self._room.was_short()

    def close(self) -> None:
        self.drain()
        self.read_note()
        for stream in (self.stdout, self.stderr, self.answer):
            stream.close()
        os.close(self._note_fd)

    def result(self, tier: str) -> tuple[dict[str, Any], list[bytes]]:
        """The answer's head and blobs. The supervisor's own reason comes before the exit status."""
        exit_code = os.waitstatus_to_exitcode(self.wait_status)
        status = self._status(exit_code)
        head = {
            "kind": "result",
            "id": self.id,
            "status": status,
            "exit_code": exit_code if exit_code >= 0 else None,
            "signal": -exit_code if exit_code < 0 else None,
            "truncated": self.is_flooded,
            "wall_s": (self.ended or self.started) - self.started,
            "cpu_s": self.cpu_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "tier": tier,
            "detail": self.detail,
            "slot_s": time.monotonic() - self.started if self.pid is not None else 0.0,
        }
        return head, [bytes(self.stdout.data), bytes(self.stderr.data), bytes(self.answer.data)]

    def _status(self, exit_code: int) -> RunStatus:
        if self.stop_status is not None:
            return self.stop_status
        if self._printed_too_much() and not self.is_live:
            return RunStatus.OUTPUT_LIMIT
        if not self._note.startswith(wire.READY_NOTE):
            failed = self._note.startswith(wire.FAILED_NOTE)
            reason = self._note[1:].decode(errors="replace") if failed else "never became ready"
            self.detail = f"confinement failed: {reason}"
            return RunStatus.INFRA_ERROR
        if self.peak_memory_bytes > self.limits.memory_bytes:
            return RunStatus.MEMORY_LIMIT
        status = ending(exit_code, self._note[1:64], self.cpu_s, self.limits.cpu_s)
        if status is RunStatus.TIME_LIMIT:
            self.detail = "CPU time"
        if status in (RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR):
            # A compiler tells of a part of itself that was killed as of an error.
            may_be_killed = exit_code == -signal.SIGKILL or status is RunStatus.COMPILE_ERROR
            if lack := self._lack(may_be_killed):
                self.detail = lack
                return RunStatus.INFRA_ERROR
        return status

    def _lack(self, may_be_killed: bool) -> str:
        """What the machine had too little of, for a program that has failed; empty when the program is at fault."""
        if self._disk_was_full:
            place = os.path.dirname(os.path.dirname(self.slot.directory))
            return f"{place} has no room for envgateway.sandbox.disk_bytes ({self.limits.disk_bytes}): free space there"
        return _NO_MEMORY if may_be_killed and procfs.oom_kills() > self._oom_kills_before else ""
