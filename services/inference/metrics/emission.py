"""Records the time intervals in which an engine samples tokens, for the report to the orchestrator.

An engine calls ``on_tokens`` in its thread once per decoding step, so the method must be cheap.
"""

from __future__ import annotations

import threading
from collections import deque

from services.common.records.types import Interval

JOIN_GAP_S = 0.05  # pauses shorter than this belong to the interval: a decoding step of a busy machine
STEP_TIMES = 4.0  # and those shorter than so many decoding steps: one of a large model on a CPU takes seconds
MAX_JOIN_GAP_S = 10.0  # longer than any decoding step: where answers have one token, all gaps are pauses
_GAPS = 16  # their lower quartile is the duration of a step: most gaps are one, some are pauses


class EmissionLog:
    """The intervals in which tokens came."""

    def __init__(self, join_gap_s: float = JOIN_GAP_S) -> None:
        self._join_gap_s = join_gap_s
        self._gaps: deque[float] = deque([0.0] * _GAPS, maxlen=_GAPS)
        self._lock = threading.Lock()
        self._closed: list[Interval] = []
        self._begin: float | None = None
        self._end = 0.0

    def on_tokens(self, num_tokens: int, at: float) -> None:
        """Record that ``num_tokens`` were sampled at the time ``at``."""
        with self._lock:
            gap = at - self._end
            joined = gap < max(self._join_gap_s, min(MAX_JOIN_GAP_S, STEP_TIMES * sorted(self._gaps)[_GAPS // 4]))
            if self._begin is None:
                # An interval that goes on after a report begins where the reported part ended.
                self._begin = self._end if gap >= 0 and joined else at
            elif not joined:
                self._closed.append((self._begin, self._end))
                self._begin = at
            self._gaps.append(gap)
            self._end = max(self._end, at)

    def take(self) -> list[Interval]:
        """The intervals since the last call, in order."""
        with self._lock:
            taken, self._closed = self._closed, []
            if self._begin is not None:
                taken.append((self._begin, self._end))
                self._begin = None
            return taken
