"""Limits the rate of logged events, so that a client cannot fill the disk: one event per kind and second (or another
period)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

TELL_AGAIN_S = 1.0


class Repeats:
    """Kinds are kept for ever, so they must come from a bounded set, never from a peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, every_s: float = TELL_AGAIN_S) -> None:
        self._clock = clock
        self._every_s = every_s
        self._told: dict[tuple[str, ...], float] = {}
        self._untold: Counter[tuple[str, ...]] = Counter()

    def tell(self, *kind: str) -> dict[str, int] | None:
        """None: keep quiet about this one. Otherwise fields for its log line: how many of its kind were kept quiet."""
        now = self._clock()
        if kind in self._told and now - self._told[kind] < self._every_s:
            self._untold[kind] += 1
            return None
        self._told[kind] = now
        return {"and_before": count} if (count := self._untold.pop(kind, 0)) else {}
