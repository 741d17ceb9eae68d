"""One run as the supervisor sees it: its pipes, what it has used, why it was stopped, and its verdict."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from . import memcg, messages, procfs
from .forkserver import Zygote
from .quota import DiskQuota
from .slots import Slot
from .turn import Turn

_FIRST_LOOK_S = 0.010
_LOOK_EVERY_S = 0.010
_LATER_LOOK_EVERY_S = 0.020
_IDLE_LOOK_EVERY_S = 0.250  # of a process that nobody has asked anything
_MOST_DISCARDED = 1 << 20  # in one look
_START_TIMEOUT_S = 30.0  # a fork server that is still importing; the run's own time begins with its process
_BUFFERS_EVERY_S = 0.1
_SHARES_PAUSE = 5  # times what a look at the shares took: a program with many mappings makes it slow
_F_SETPIPE_SZ = 1031
_LARGEST_PIPE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """As the gateway sends them; the supervisor enforces all but ``file_bytes`` and ``open_files``."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    processes: int
    output_bytes: int  # of each of stdout and stderr
    answer_bytes: int  # of what a harness answers
    file_bytes: int
    open_files: int
    disk_bytes: int
    num_files: int
    turn_s: float = 0.0  # of one question to a process that lives on between them; 0 for all others


class Output:
    """One stream of a program, read up to a cap."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd = fd
        self.data = bytearray()
        self.truncated = False
        self.open = True
        self._cap = self._whole_cap = cap
        if cap > 65536:
            try:
                fcntl.fcntl(fd, _F_SETPIPE_SZ, min(cap, _LARGEST_PIPE))
            except OSError:  # a smaller pipe is only slower
                pass

    def drain(self) -> None:
        """Read what is there. Past the cap nothing is kept, and one read is enough to know it."""
        while self.open and not self.truncated:
            try:
                chunk = os.read(self.fd, 1 << 18)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
                return
            room = self._cap - len(self.data)
            self.data += chunk[:room]
            self.truncated = len(chunk) > room

    def discard(self) -> None:
        """Past the cap: read on without keeping it, so that the writer gets the chance to stop."""
        left = _MOST_DISCARDED
        while self.open and left > 0:
            try:
                chunk = os.read(self.fd, 1 << 18)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
            left -= len(chunk)

    def take(self) -> bytes:
        """What has come since the last call; the cap goes on counting it."""
        data = bytes(self.data)
        self.data.clear()
        self._cap -= len(data)
        return data

    def renew(self) -> None:
        """The whole cap is free again. What has come and was not taken stays, unless it was too much already."""
        if self.truncated:
            self.data.clear()
        self._cap = self._whole_cap
        self.truncated = False

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.fd)


class Run:
    """Between Start and Ended it is looked at; between Ended and the answer its slot is emptied."""

    def __init__(self, run_id: int, slot: Slot, limits: Limits, fds: tuple[int, int, int, int], now: float) -> None:
        self.id = run_id
        self.slot = slot
        self.limits = limits
        self.stdout = Output(fds[0], limits.output_bytes)
        self.stderr = Output(fds[1], limits.output_bytes)
        self.answer = Output(fds[3], limits.answer_bytes)
        self.zygote: Zygote  # set by the supervisor before anything is asked of the run
        self._note_fd = fds[2]
        self._note = b""
        self.pid: int | None = None
        self.started = now
        self._start_deadline = now + _START_TIMEOUT_S
        self.next_look = now + min(_FIRST_LOOK_S, limits.wall_s)
        self.stop_status: str | None = None  # why the supervisor killed it
        self.detail = ""
        self.ended: float | None = None
        self.wait_status = 0
        self.cpu_s = 0.0
        self.strays_cpu_s = 0.0
        self.adopted_before_s = 0.0  # what the slot's room had waited for before this run
        self.peak_memory_bytes = 0
        self._group = _InGroup(slot) if slot.memory is not None else None
        self._buffer_bytes = 0  # what its sockets and pipes may hold, where no cgroup counts it
        self._next_buffers = now + _BUFFERS_EVERY_S
        self._next_shares = now
        self._seen_ticks: dict[int, int] = {}
        self.turn: Turn | None = None  # of a process that lives on, while it is asked something
        self._quota = None if slot.has_own_disk else DiskQuota(slot.directory, limits.disk_bytes, limits.num_files, now)

    def begin(self, pid: int, now: float) -> None:
        """The fork server has forked it: its time runs from here."""
        self.pid = pid
        self.started = now
        self.next_look = now + min(_FIRST_LOOK_S, self.limits.wall_s)
        if self.turn is not None:
            self.turn.begin(now)

    @property
    def is_live(self) -> bool:
        """Whether it lives on between questions, each with a time and an output of its own."""
        return self.limits.turn_s > 0

    def ask(self, now: float) -> None:
        """A live process is asked something."""
        self.turn = Turn(self.limits.turn_s, now)
        self.next_look = now + _FIRST_LOOK_S
        for stream in (self.stdout, self.stderr, self.answer):
            stream.renew()

    def end_turn(self) -> tuple[dict[str, Any], list[bytes]]:
        """A live process has answered: what else came of it."""
        for stream in (self.stdout, self.stderr):
            stream.drain()
            if stream.truncated:
                stream.discard()
        head = {"interrupted": self.turn.why if self.turn is not None else "", "truncated": self.is_flooded}
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

    def look(self, now: float, strays: list[int]) -> str | None:
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
        if self._group is not None and self._group.look(family, self.limits.memory_bytes):
            return "MEMORY_LIMIT"
        self.cpu_s = max(self.cpu_s, used.cpu_s + self.strays_cpu_s)
        if used.processes > self.limits.processes:
            self.detail = "more processes than allowed"
            return "RUNTIME_ERROR"
        if self._takes_too_much(family, used.resident_bytes, now):
            return "MEMORY_LIMIT"
        if self.cpu_s > self.limits.cpu_s:
            self.detail = "CPU time"
            return "TIME_LIMIT"
        return self.look_at_disk(now, family)

    def _after(self, now: float) -> float:
        """The next look: soon at first, seldom at a live process that does nothing."""
        if self.is_live and self.turn is None:
            return min(now + _IDLE_LOOK_EVERY_S, self.deadline)
        began = self.turn.asked if self.turn is not None else self.started
        event = self.turn.next_event if self.turn is not None else self.deadline
        return min(now + (_LOOK_EVERY_S if now - began < 0.2 else _LATER_LOOK_EVERY_S), max(event, now), self.deadline)

    def look_at_disk(self, now: float, family: list[int], last: bool = False) -> str | None:
        over = self._quota.exceeded(now, family, last) if self._quota is not None else ""
        if over:
            self.detail = f"disk quota: {over}"
            return "RUNTIME_ERROR"
        return None

    def _out_of_time(self) -> str:
        if self.pid is None:
            self.detail = "the fork server did not fork"
        elif not self._note:  # the program has not begun, and can neither take the note away nor write it
            self.detail = "confinement took all of the program's time"
        else:
            self.detail = "wall time"
            return "TIME_LIMIT"
        return "INFRA_ERROR"

    def _takes_too_much(self, family: list[int], resident_bytes: int, now: float) -> bool:
        """The sum of resident sets counts a page that children share once for each: decide by the shares.

        Asking for the shares takes the kernel a step for each mapping, so it is done seldom where it is slow; in between,
        and where a cgroup holds the limit, the largest process decides.
        """
        if self._group is None and now >= self._next_buffers:
            self._buffer_bytes = procfs.buffer_bytes(family)
            self._next_buffers = now + _BUFFERS_EVERY_S
        resident_bytes += self._buffer_bytes
        if resident_bytes <= self.limits.memory_bytes:
            return False
        if len(family) > 1:
            resident_bytes = procfs.least_bytes(family) + self._buffer_bytes
            in_doubt = resident_bytes <= self.limits.memory_bytes and self._group is None
            if in_doubt and now >= self._next_shares:
                began = time.monotonic()
                resident_bytes = procfs.proportional_bytes(family) + self._buffer_bytes
                self._next_shares = now + _SHARES_PAUSE * (time.monotonic() - began)
        self.peak_memory_bytes = max(self.peak_memory_bytes, resident_bytes)
        return resident_bytes > self.limits.memory_bytes

    def _printed_too_much(self) -> str | None:
        if self.answer.truncated:
            self.detail = "the answer is too large"
        return "OUTPUT_LIMIT" if self.is_flooded or self.answer.truncated else None

    def read_note(self) -> None:
        """The child's own channel: ready or failed, then what is a verdict of its own.

        A socket, which unlike a pipe cannot be opened by name: what was written is not for the program to take back.
        """
        if len(self._note) > 64:
            return
        try:
            self._note += os.read(self._note_fd, 4096)
        except (BlockingIOError, ConnectionResetError):
            pass

    def left_its_process(self) -> None:
        """Its first process has ended: a last look at what is gone with the others."""
        if self._group is not None and self._group.has_killed() and self.stop_status is None:
            self.stop_status = "MEMORY_LIMIT"

    def close(self) -> None:
        self.drain()
        self.read_note()
        for stream in (self.stdout, self.stderr, self.answer):
            stream.close()
        os.close(self._note_fd)

    def result(self, tier: str) -> tuple[dict[str, Any], list[bytes]]:
        """The answer's head and blobs. The supervisor's own reason comes before the exit status."""
        wait_signal = os.WTERMSIG(self.wait_status) if os.WIFSIGNALED(self.wait_status) else None
        exit_code = os.WEXITSTATUS(self.wait_status) if os.WIFEXITED(self.wait_status) else None
        status = self._status(wait_signal, exit_code)
        head = {
            "kind": "result",
            "id": self.id,
            "status": status,
            "exit_code": exit_code,
            "signal": wait_signal,
            "truncated": self.is_flooded,
            "wall_s": (self.ended or self.started) - self.started,
            "cpu_s": self.cpu_s,
            "peak_memory_bytes": max(self.peak_memory_bytes, self._group.peak_bytes if self._group is not None else 0),
            "tier": tier,
            "detail": self.detail,
            "slot_s": time.monotonic() - self.started if self.pid is not None else 0.0,
        }
        return head, [bytes(self.stdout.data), bytes(self.stderr.data), bytes(self.answer.data)]

    def _status(self, wait_signal: int | None, exit_code: int | None) -> str:
        if self.stop_status is not None:
            return self.stop_status
        if self._printed_too_much() and not self.is_live:
            return "OUTPUT_LIMIT"
        if not self._note.startswith(messages.READY_NOTE):
            failed = self._note.startswith(messages.FAILED_NOTE)
            reason = self._note[1:].decode(errors="replace") if failed else "never became ready"
            self.detail = f"confinement failed: {reason}"
            return "INFRA_ERROR"
        if self.peak_memory_bytes > self.limits.memory_bytes:
            return "MEMORY_LIMIT"
        notes = self._note[1:64]
        if messages.NO_COMPILE_NOTE in notes and exit_code != 0:
            return "COMPILE_ERROR"
        if messages.OUT_OF_MEMORY_NOTE in notes:
            return "MEMORY_LIMIT"
        if wait_signal is None and exit_code == 0:
            return "OK"
        if wait_signal in (signal.SIGXCPU, signal.SIGKILL) and self.cpu_s >= self.limits.cpu_s:
            self.detail = "CPU time"
            return "TIME_LIMIT"
        return "RUNTIME_ERROR"


class _InGroup:
    """A run in its slot's cgroup: moved there at its first look, killed when the kernel kills one of its processes."""

    def __init__(self, slot: Slot) -> None:
        assert slot.memory is not None
        self._memory: memcg.SlotMemory = slot.memory
        self._moved: set[int] = set()
        self._kills_before = 0
        self._bytes_before = 0
        self.peak_bytes = 0

    def look(self, family: list[int], limit_bytes: int) -> bool:
        """Whether the limit was passed."""
        if not self._moved:
            self._begin(limit_bytes)
        new = [pid for pid in family if pid not in self._moved]
        for pid in new if not self._moved else memcg.missing(new, self._memory):
            if not self._memory.move(pid):
                new.remove(pid)
        self._moved.update(new)
        return self.has_killed()

    def _begin(self, limit_bytes: int) -> None:
        try:
            self._memory.limit(limit_bytes)
        except OSError:  # what the kernel still holds there cannot be freed yet; the old limit stays
            pass
        self._kills_before = self._memory.num_kills()
        self._bytes_before = self._memory.usage_bytes()  # files that are read stay there until they are in the way

    def has_killed(self) -> bool:
        if not self._moved:
            return False
        self.peak_bytes = max(self.peak_bytes, self._memory.usage_bytes() - self._bytes_before)
        return self._memory.num_kills() > self._kills_before


def never_begun(run_id: int, status: str, tier: str) -> tuple[dict[str, Any], list[bytes]]:
    """The answer's head and blobs for a run that had no process."""
    head = {
        "kind": "result", "id": run_id, "status": status, "exit_code": None, "signal": None, "truncated": False,
        "wall_s": 0.0, "cpu_s": 0.0, "peak_memory_bytes": 0, "tier": tier, "detail": "", "slot_s": 0.0,
    }  # fmt: skip
    return head, [b"", b"", b""]
