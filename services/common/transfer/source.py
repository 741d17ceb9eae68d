"""The interface of holders of weights (a publisher's store, or a relay) to the server side of ``WeightService``.

Protocols and small records; no gRPC, no ZeroMQ, no data of their own.

    servicer, bulk server  --payload(request)-->  PayloadSource  --open(payload id)-->  PayloadReader
                           <--Payload-----------                 <--bytes at an offset--

A payload's name is global: the same name is the same bytes, here and at every relay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.common.weights.manifest import Payload, PayloadRequest


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
        """The payload to fetch for a version. Called in a thread: encoding may take seconds.

        Raises:
            PayloadNotReadyError: encoding takes longer than the request's ``wait_s``.
            VersionUnavailableError: a version of another run, or an unknown one.
            BaseUnavailableError: no base with that digest; ask without a base.
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
