"""How often each peer calls what, in a table of bounded size. Knows nothing of gRPC.

Every (peer, method) has a token bucket, kept as one number: the time at which it would be full again. A peer that has not
called for long is forgotten first, which gives it a full bucket, as its silence would have.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.common.errors import CapacityError
from services.common.rpc.limits import Limit

MOST_BUCKETS = 16_384
RETRY_S = 0.5  # after too many calls at once: when one of them ends is not known

_ROUNDING_S = 1e-9

Key = tuple[str, str]  # peer, method


class Rates:
    """Counts calls by peer and method against limits."""

    def __init__(self, most_buckets: int = MOST_BUCKETS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_buckets = most_buckets
        self._clock = clock
        self._full_at: OrderedDict[Key, float] = OrderedDict()  # the one that was used longest ago comes first
        self._running: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._full_at)

    @property
    def num_running(self) -> int:
        return self._running.total()

    @contextmanager
    def call(self, peer: str, method: str, limit: Limit) -> Iterator[None]:
        """One call, counted for as long as it runs.

        Raises:
            CapacityError: the peer calls this too often, or has too many such calls running; it names the limit.
        """
        key = (peer, method)
        if self._running[key] >= limit.concurrent:
            raise CapacityError(
                f"{method}: {limit.concurrent} calls of this peer run already, as many as may at once",
                retry_after_s=RETRY_S,
                limit=f"{method}.concurrent",
            )
        self._take(key, limit)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def _take(self, key: Key, limit: Limit) -> None:
        now = self._clock()
        gap = 1.0 / limit.calls_per_s
        full_at = max(self._full_at.pop(key, now), now)
        early_s = full_at + gap - now - limit.burst * gap
        over = early_s > _ROUNDING_S
        self._full_at[key] = full_at if over else full_at + gap
        if len(self._full_at) > self._most_buckets:
            self._full_at.popitem(last=False)
        if over:
            raise CapacityError(
                f"{key[1]}: this peer calls more often than {limit.calls_per_s:g} times a second",
                retry_after_s=early_s,
                limit=f"{key[1]}.calls_per_s",
            )
