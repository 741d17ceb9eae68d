"""When tokens were sampled: stretches of time for the report, from the engine's hook. Knows no engine.

The hook is called in the engine's thread once per decoding step, so it does next to nothing.
"""

from __future__ import annotations

import threading

JOIN_GAP_S = 0.05  # pauses shorter than this belong to the stretch: a decoding step of a busy machine


class EmissionLog:
    """Begin and end of stretches in which tokens came, in seconds since the epoch."""

    def __init__(self, join_gap_s: float = JOIN_GAP_S) -> None:
        self._join_gap_s = join_gap_s
        self._lock = threading.Lock()
        self._closed: list[tuple[float, float]] = []
        self._begin: float | None = None
        self._end = 0.0

    def on_tokens(self, num_tokens: int, at: float) -> None:
        """``num_tokens`` appeared at the time ``at``."""
        with self._lock:
            if self._begin is None:
                # A stretch that goes on after a report begins where the reported part ended.
                self._begin = self._end if 0 <= at - self._end < self._join_gap_s else at
            elif at - self._end >= self._join_gap_s:
                self._closed.append((self._begin, self._end))
                self._begin = at
            self._end = max(self._end, at)

    def take(self) -> list[tuple[float, float]]:
        """The stretches since the last call, in order."""
        with self._lock:
            taken, self._closed = self._closed, []
            if self._begin is not None:
                taken.append((self._begin, self._end))
                self._begin = None
            return taken
