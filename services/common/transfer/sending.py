"""Limits the send rate of one sender: a token bucket and a counter that all its transports share.

Independent of contents and transports.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

CHUNK_BYTES = 1 << 20  # the fastest size for gRPC and ZeroMQ; larger gRPC messages are slower

_BURST_S = 0.1  # of unused rate that may be caught up
_CHUNK_S = 0.05  # duration of a chunk of a slow sender: short turns, so that no receiver detects a stall
_SMALLEST_CHUNK = 16 << 10


class SendBudget:
    """Lets at most ``bytes_per_s`` go out, in the order in which senders ask; 0 is no limit. One event loop."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()  # when everything granted so far has gone out
        self.num_bytes_sent = 0
        self.num_bytes_by_transport: Counter[str] = Counter()

    @property
    def chunk_bytes(self) -> int:
        """How much to send at once."""
        if not self._bytes_per_s:
            return CHUNK_BYTES
        return max(_SMALLEST_CHUNK, min(CHUNK_BYTES, int(self._bytes_per_s * _CHUNK_S)))

    async def take(self, num_bytes: int, transport: str) -> None:
        """Wait for the turn of these bytes, and count them. No deadline: the rate bounds the wait, the receiver has one."""
        if self._bytes_per_s:
            begin = max(self._free_at, time.monotonic() - _BURST_S)
            self._free_at = begin + num_bytes / self._bytes_per_s
            if (delay := self._free_at - time.monotonic()) > 0:
                await asyncio.sleep(delay)
        self.num_bytes_sent += num_bytes
        self.num_bytes_by_transport[transport] += num_bytes
