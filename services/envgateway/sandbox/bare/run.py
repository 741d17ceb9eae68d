"""One run as the supervisor sees it: its pipes, what it has used, why it was stopped, and its verdict."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from . import procfs
from .program import OUT_OF_MEMORY
from .slots import Slot
from .zygote import FAILED_TAG, READY, READY_TAG

_FIRST_LOOK_S = 0.010
_LOOK_EVERY_S = 0.010
_LATER_LOOK_EVERY_S = 0.020


@dataclass(frozen=True)
class Limits:
    """As the gateway sends them; the supervisor enforces all but ``file_bytes`` and ``open_files``."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    processes: int
    output_bytes: int
    file_bytes: int
    open_files: int


class Output:
    """One stream of a program, read up to a cap."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd = fd
        self.data = bytearray()
        self.truncated = False
        self.open = True
        self._cap = cap

    def drain(self) -> None:
        """Read what is there. Past the cap nothing is kept, and one read is enough to know it."""
        while self.open and not self.truncated:
            try:
                chunk = os.read(self.fd, 65536)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
                return
            room = self._cap - len(self.data)
            self.data += chunk[:room]
            self.truncated = len(chunk) > room

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.fd)


class Run:
    """Between Start and Ended it is looked at; between Ended and the answer its slot is emptied."""

    def __init__(self, run_id: int, slot: Slot, limits: Limits, fds: tuple[int, int, int], now: float) -> None:
        self.id = run_id
        self.slot = slot
        self.limits = limits
        self.stdout = Output(fds[0], limits.output_bytes)
        self.stderr = Output(fds[1], limits.output_bytes)
        self._note_fd = fds[2]
        self._note = b""
        self.pid: int | None = None
        self.started = now
        self.next_look = now + min(_FIRST_LOOK_S, limits.wall_s)
        self.stop_status: str | None = None  # why the supervisor killed it
        self.detail = ""
        self.ended: float | None = None
        self.wait_status = 0
        self.cpu_s = 0.0
        self.strays_cpu_s = 0.0
        self.peak_memory_bytes = 0

    @property
    def deadline(self) -> float:
        return self.started + self.limits.wall_s

    def look(self, now: float, strays: list[int]) -> str | None:
        """Read output and measure; a status when a limit is passed."""
        self.stdout.drain()
        self.stderr.drain()
        if self.stdout.truncated or self.stderr.truncated:
            return "OUTPUT_LIMIT"
        if now >= self.deadline:
            self.detail = "wall time"
            return "TIME_LIMIT"
        every = _LOOK_EVERY_S if now - self.started < 0.2 else _LATER_LOOK_EVERY_S
        self.next_look = min(now + every, self.deadline)
        self.read_note()
        if self.pid is None:
            return None
        used = procfs.usage(procfs.descendants([self.pid, *strays]))
        self.peak_memory_bytes = max(self.peak_memory_bytes, used.resident_bytes)
        self.cpu_s = max(self.cpu_s, used.cpu_s + self.strays_cpu_s)
        if used.processes > self.limits.processes:
            self.detail = "more processes than allowed"
            return "RUNTIME_ERROR"
        if used.resident_bytes > self.limits.memory_bytes:
            return "MEMORY_LIMIT"
        if self.cpu_s > self.limits.cpu_s:
            self.detail = "CPU time"
            return "TIME_LIMIT"
        return None

    def read_note(self) -> None:
        """The child's own channel: ready (and its pid), failed, or out of memory."""
        try:
            self._note += os.read(self._note_fd, 4096)
        except BlockingIOError:
            pass
        if self.pid is None and self._note[:1] == READY_TAG and len(self._note) >= READY.size:
            self.pid = READY.unpack_from(self._note)[1]

    def close(self) -> None:
        self.stdout.drain()
        self.stderr.drain()
        self.read_note()
        self.stdout.close()
        self.stderr.close()
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
            "truncated": self.stdout.truncated or self.stderr.truncated,
            "wall_s": (self.ended or self.started) - self.started,
            "cpu_s": self.cpu_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "tier": tier,
            "detail": self.detail,
        }
        return head, [bytes(self.stdout.data), bytes(self.stderr.data)]

    def _status(self, wait_signal: int | None, exit_code: int | None) -> str:
        if self.stop_status is not None:
            return self.stop_status
        if self.stdout.truncated or self.stderr.truncated:
            return "OUTPUT_LIMIT"
        if self.pid is None:
            reason = self._note[1:].decode(errors="replace") if self._note[:1] == FAILED_TAG else "never became ready"
            self.detail = f"confinement failed: {reason}"
            return "INFRA_ERROR"
        if self.peak_memory_bytes > self.limits.memory_bytes or OUT_OF_MEMORY in self._note[READY.size :]:
            return "MEMORY_LIMIT"
        if wait_signal is None and exit_code == 0:
            return "OK"
        if wait_signal in (signal.SIGXCPU, signal.SIGKILL) and self.cpu_s >= self.limits.cpu_s:
            self.detail = "CPU time"
            return "TIME_LIMIT"
        return "RUNTIME_ERROR"
