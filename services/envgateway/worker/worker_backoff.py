"""Backs off after repeated sandbox failures: the worker takes no jobs for a while, so other workers can run them."""

from __future__ import annotations

import time

_FAILURES_IN_A_ROW = 3
_FIRST_S = 1.0


class WorkerBackoff:
    """Longer after each further failure, up to ``longest_s``; over with the first job that runs."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._failures = 0
        self._until = 0.0

    def note(self, ran: bool) -> None:
        """Record a job that ran here, or one that the machinery failed."""
        self._failures = 0 if ran else self._failures + 1
        over = self._failures - _FAILURES_IN_A_ROW
        if over >= 0:
            self._until = time.monotonic() + min(self._longest_s, _FIRST_S * 2.0 ** min(over, 30))
        elif ran:
            self._until = 0.0

    @property
    def left_s(self) -> float:
        """Seconds to go; 0 when there is no reason to rest."""
        return max(0.0, self._until - time.monotonic())
