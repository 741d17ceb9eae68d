"""A range of a payload while it is being received. It outlives the streams that bring it, so another goes on where one broke.

Also the seam between what is fetched and how: ``Transport``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from services.common.errors import CorruptDataError
from services.common.weights.manifest import ALIGNMENT, Payload


class ByteRange:
    """Bytes ``start`` to ``end`` of a payload, and where they go; ``offset`` is the next one due.

    >>> wanted = ByteRange(2, 4, memoryview(bytearray(2)))
    >>> wanted.put(2, b"x")
    >>> wanted.offset, wanted.is_complete
    (3, False)
    """

    def __init__(
        self, start: int, end: int, into: memoryview, on_received: Callable[[int], None] = lambda offset: None
    ) -> None:
        """``into`` has room for exactly this range; ``on_received`` is told the offset after every piece."""
        if not 0 <= start <= end or len(into) != end - start:
            raise ValueError(f"{len(into)} bytes of room for bytes {start} to {end}")
        self.start, self.end, self.offset = start, end, start
        self._into = into
        self._on_received = on_received

    @property
    def is_complete(self) -> bool:
        return self.offset == self.end

    @property
    def room(self) -> memoryview:
        """What is still to be filled; write at its begin, then ``advance``."""
        return self._into[self.offset - self.start :]

    def advance(self, offset: int, num_bytes: int) -> None:
        """Count bytes that came. ``CorruptDataError`` when they are not those that were due."""
        if offset != self.offset or num_bytes > self.end - offset:
            raise CorruptDataError(
                f"{num_bytes} bytes at {offset} came where bytes {self.offset} to {self.end} were due"
            )
        self.offset += num_bytes
        self._on_received(self.offset)

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Copy bytes that came, as ``advance``."""
        room = self.room
        if offset == self.offset and len(data) <= len(room):
            room[: len(data)] = data
        self.advance(offset, len(data))


class Transport(Protocol):
    """One way to bring bytes from one source."""

    @property
    def name(self) -> str:
        """As in ``weights.transports`` of a recipe."""
        ...

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        """Fill the range from its offset to its end.

        What came stays in ``wanted`` whatever is raised, so that another stream or transport can go on.

        Raises:
            InfrastructureError, DeadlineError, NotFoundError: this way does not work now; another may.
            CorruptDataError: what came cannot be the payload.
        """
        ...


def receive_buffer(size_bytes: int) -> memoryview:
    """Room for a payload, aligned as its tensors are. Not zeroed, and in large pages where the kernel has them."""
    room = np.empty(size_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room.data[begin : begin + size_bytes]
