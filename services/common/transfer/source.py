"""What the server side of ``WeightService`` asks of whoever holds weights: a publisher's store, or a relay.

Protocols and small records; no gRPC, no ZeroMQ, no data of their own.

    servicer, bulk server  --payload(request)-->  PayloadSource  --open(payload id)-->  PayloadReader
                           <--Payload-----------                 <--bytes at an offset--

A payload's name is global: the same name is the same bytes, here and at every relay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.common.weights.manifest import BaseVersion, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRequest:
    """What a receiver wants, and what it can take.

    >>> PayloadRequest(run_id="r", policy="model0", version=7).base is None
    True
    """

    run_id: str
    policy: str
    version: int
    base: BaseVersion | None = None  # held by the receiver; None asks for the full snapshot
    link_bytes_per_s: float = 0.0  # as the receiver measured it; 0 when unknown


class PayloadReader(Protocol):
    """The bytes of one payload, leased until ``close``. Used from one event loop."""

    @property
    def size_bytes(self) -> int: ...

    async def read(self, offset: int, size: int) -> memoryview:
        """At least 1 and at most ``size`` bytes from ``offset`` (< ``size_bytes``), valid until ``close``.

        Waits where these bytes have not been received yet.

        Raises:
            DeadlineError: they did not come.
            NotFoundError: they never will.
        """
        ...

    def file(self) -> tuple[Path, int] | None:
        """Path and begin of the payload when it lies whole in a file that others may map; None otherwise."""
        ...

    def close(self) -> None:
        """End the lease. Views given out must not be used any more."""
        ...


class PayloadSource(Protocol):
    """One policy's weights as somebody holds them."""

    def payload(self, request: PayloadRequest) -> Payload:
        """What to fetch to hold the version. Called in a thread: encoding may take seconds.

        Raises:
            VersionUnavailableError: another run's version, or one that is not held.
            BaseUnavailableError: the base is not held with that digest; ask without one.
        """
        ...

    def open(self, payload_id: str) -> PayloadReader:
        """Lease a payload. ``NotFoundError`` when it is gone: the receiver asks for the manifest again."""
        ...


class MemoryReader:
    """A payload that lies whole in memory (a mapped file, or bytes), and what ends its lease."""

    def __init__(
        self,
        data: memoryview,
        release: Callable[[], None] = lambda: None,
        file: tuple[Path, int] | None = None,
    ) -> None:
        self._data = data
        self._release: Callable[[], None] | None = release
        self._file = file

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    async def read(self, offset: int, size: int) -> memoryview:
        return self._data[offset : offset + size]

    def file(self) -> tuple[Path, int] | None:
        return self._file

    def close(self) -> None:
        """Closing twice does no harm."""
        if self._release is not None:
            release, self._release = self._release, None
            release()
