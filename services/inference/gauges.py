"""What rollouts wait for: seconds summed by cause, reported as shares of the slots' time. Pure bookkeeping."""

from __future__ import annotations

import time
from collections import defaultdict


class WaitShares:
    """``add`` seconds by cause; ``take`` gives each cause's share of ``num_slots`` x the time since the last take."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.monotonic()

    def add(self, cause: str, seconds: float) -> None:
        self._seconds[cause] += seconds

    def take(self) -> dict[str, float]:
        now = time.monotonic()
        whole = max(now - self._since, 1e-9) * self._num_slots
        # A wait is added when it ends, so one longer than the period may exceed its share.
        shares = {f"share_waiting_{cause}": min(1.0, s / whole) for cause, s in self._seconds.items()}
        self._seconds = defaultdict(float, dict.fromkeys(self._seconds, 0.0))
        self._since = now
        return shares
