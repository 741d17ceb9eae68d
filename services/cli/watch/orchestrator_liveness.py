"""Reports a stall of the orchestrator without answers. The orchestrator reports the stalls of all others itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from services.common.pb import run_pb2
from services.common.system import disk
from services.common.telemetry.components import ORCHESTRATOR
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.stalls.causes import Cause

LIMIT_S = 10.0  # longer than a restart, and than the deadline of a call
_STATES = {
    "T": "its process is stopped (SIGSTOP): send it SIGCONT",
    "t": "its process is held by a debugger",
    "D": "its process waits for a disk that does not respond",
    "Z": "its process has ended, and its parent has not waited for it",
}


class OrchestratorLiveness:
    """Takes the result of each call to the orchestrator; ``stall`` gives the reason once calls have failed for ``LIMIT_S``."""

    def __init__(
        self,
        address: str,
        pid: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        run_dir: Path | None = None,
    ) -> None:
        """``run_dir``: the directory of the run, if on this machine."""
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
            component=ORCHESTRATOR,
            cause=Cause.SILENT,
            detail=f"{self._address} has not answered for {seconds:.0f} s: {self._reason()}",
            advice=f"its log shows where it hangs if its event loop is blocked ({LogEvent.LOOP_BLOCKED}); replicas and trainers "
            "keep their data and continue when it is back",
        )
        stall.since.FromNanoseconds(int((time.time() - seconds) * 1e9))
        return stall

    def _reason(self) -> str:
        if self._run_dir is not None and disk.free_bytes(self._run_dir) < disk.RESERVE_BYTES:
            return f"the disk of {self._run_dir} is full: free some space, and it continues by itself"
        pid = self._pid()
        if pid is None:
            return "its process, or the network in between, does not respond"
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "its process is gone"
        return _STATES.get(state, "its process is running and does not respond")
