"""Notices an orchestrator that does not answer: it names everybody else's stalls, and somebody has to name its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from services.common import disk
from services.common.pb import run_pb2

LIMIT_S = 10.0  # longer than a restart takes, and than the deadline of a question
_STATES = {
    "T": "its process is stopped (SIGSTOP): send it SIGCONT",
    "t": "its process is held by a debugger",
    "D": "its process waits for a disk that does not answer",
    "Z": "its process has ended and nobody has cleared it away",
}


class Silence:
    """Told of each answer and of each question without one; ``stall`` says what is wrong once that lasts."""

    def __init__(
        self,
        address: str,
        pid: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        run_dir: Path | None = None,
    ) -> None:
        """``run_dir``: where its run lies, when that is on this machine."""
        self._address = address
        self._pid = pid
        self._clock = clock
        self._run_dir = run_dir
        self._since = clock()
        self._silent = False

    def answered(self) -> None:
        self._since = self._clock()
        self._silent = False

    def missed(self) -> None:
        self._silent = True

    @property
    def stall(self) -> run_pb2.Stall | None:
        seconds = self._clock() - self._since
        if not self._silent or seconds < LIMIT_S:
            return None
        stall = run_pb2.Stall(
            component="orchestrator",
            cause="silent",
            detail=f"{self._address} has not answered for {seconds:.0f} s: {self._what()}",
            advice="its log tells where it hangs if its event loop is blocked (watchdog.loop_blocked); replicas and trainers "
            "keep what they have and go on when it is back",
        )
        stall.since.FromNanoseconds(int((time.time() - seconds) * 1e9))
        return stall

    def _what(self) -> str:
        if self._run_dir is not None and disk.free_bytes(self._run_dir) < disk.RESERVE_BYTES:
            return f"the disk of {self._run_dir} is full: free some, and it goes on by itself"
        pid = self._pid()
        if pid is None:
            return "its process, or the way there, does not react"
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "its process is gone"
        return _STATES.get(state, "its process lives and does not react")
