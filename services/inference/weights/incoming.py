"""A payload while it arrives, in stripes: what is there already can be read by others. One event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from services.common.aio import deadline
from services.common.errors import NotFoundError, OffsetOutOfRangeError
from services.common.weights.manifest import Payload
from services.inference.weights.fetch_range import ByteRange

PROGRESS_TIMEOUT_S = 20.0  # below the 30 s after which a receiver gives a silent stream up


class Incoming:
    """Room for the payload, and how far each stripe of it has come."""

    def __init__(self, payload: Payload, data: memoryview, on_bytes: Callable[[], None] = lambda: None) -> None:
        """``on_bytes`` is called whenever some have come."""
        self.payload = payload
        self.data = data
        self._stripes: list[ByteRange] = []
        self._failed = False
        self._on_bytes = on_bytes
        self._progress = asyncio.Event()

    def stripe(self, start: int, end: int) -> ByteRange:
        """The part of the payload that somebody is about to fetch."""
        wanted = ByteRange(start, end, self.data[start:end], self._received)
        self._stripes.append(wanted)
        return wanted

    def fail(self) -> None:
        """No more will come."""
        self._failed = True
        self._received(0)

    def num_readable(self, offset: int) -> int:
        """Bytes that are there from an offset on."""
        for stripe in self._stripes:
            if stripe.start <= offset < stripe.end:
                return max(0, stripe.offset - offset)
        return 0

    def reader(self, hold: AbstractContextManager[None]) -> IncomingReader:
        """``hold`` keeps the buffer unchanged: a snapshot's becomes the mirror, which later deltas write into."""
        return IncomingReader(self, hold)

    async def wait_readable(self, offset: int) -> int:
        """Wait until there is a byte at the offset; how many there are.

        Raises:
            NotFoundError: it will not come.
            DeadlineError: nothing at all came for a while.
        """
        while not (num_readable := self.num_readable(offset)):
            if self._failed:
                raise NotFoundError(f"payload {self.payload.payload_id!r} did not arrive here")
            progress = self._progress
            async with deadline(PROGRESS_TIMEOUT_S, f"byte {offset} of {self.payload.payload_id} at a relay"):
                await progress.wait()
        return num_readable

    def _received(self, offset: int) -> None:
        self._on_bytes()
        # Everybody who waits looks again; a new event for whoever waits after that.
        self._progress.set()
        self._progress = asyncio.Event()


class IncomingReader:
    """A ``PayloadReader`` over what has come so far."""

    def __init__(self, incoming: Incoming, hold: AbstractContextManager[None]) -> None:
        self._incoming = incoming
        self._hold: AbstractContextManager[None] | None = hold
        hold.__enter__()
        self.size_bytes = incoming.payload.size_bytes

    async def read(self, offset: int, size: int) -> memoryview:
        if not 0 <= offset < self.size_bytes:
            raise OffsetOutOfRangeError(f"offset {offset} of a payload of {self.size_bytes} bytes")
        there = await self._incoming.wait_readable(offset)
        return self._incoming.data[offset : offset + min(size, there)]

    def file(self) -> tuple[Path, int] | None:
        return None

    def close(self) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.__exit__(None, None, None)
