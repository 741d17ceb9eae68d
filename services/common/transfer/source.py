"""The interface of holders of weights (a publisher's store, or a relay) to the server side of ``WeightService``.

Protocols, small records, and the send rate that all transports of one sender share; no gRPC, no ZeroMQ.

    servicer, bulk server  --payload(request)-->  PayloadSource  --open(payload id)-->  PayloadReader
                           <--Payload-----------                 <--bytes at an offset--

A payload's name is global: the same name is the same bytes, here and at every relay.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from services.common.weights.snapshot import Payload, PayloadRequest


class PayloadReader(Protocol):
    """The bytes of one payload, leased until ``close``. Used from one event loop."""

    @property
    def size_bytes(self) -> int: ...

    async def read(self, offset: int, size: int) -> memoryview:
        """At least 1 and at most ``size`` bytes from ``offset`` (< ``size_bytes``), valid until ``close``.

        Waits where these bytes have not been received yet.

        Raises:
            DeadlineError: the bytes did not arrive in time.
            NotFoundError: the bytes will never arrive.
        """
        ...

    def close(self) -> None:
        """End the lease. Views given out must not be used any more."""
        ...


class PayloadSource(Protocol):
    """The weights of one policy, at one holder."""

    def payload(self, request: PayloadRequest) -> Payload:
        """The payload to fetch for a version. Called in a thread, which may wait for a delta.

        Raises:
            PayloadNotReadyError: the delta is not coded within the request's ``wait_s``.
            VersionUnavailableError: a version of another run, or an unknown one.
        """
        ...

    def open(self, payload_id: str) -> PayloadReader:
        """Lease a payload. ``NotFoundError`` when the payload was dropped: the receiver asks for the manifest again."""
        ...


class MemoryReader:
    """A payload that is whole in memory (a mapped file, or bytes), and the function that ends its lease."""

    def __init__(self, data: memoryview, release: Callable[[], None] = lambda: None) -> None:
        self._data = data
        self._release: Callable[[], None] | None = release

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    async def read(self, offset: int, size: int) -> memoryview:
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Closing twice does no harm."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


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
