"""Payload bytes in a file that the source has on this host: mapped, not sent.

The mapping is private and copy-on-write, so nothing that the receiver does reaches the file; the file is sealed, so
nothing reaches the receiver. It outlives the file's name. A tensor that is to change should still be copied out of the
mapping first: as long as any part of it is mapped, the whole file keeps its memory.
"""

from __future__ import annotations

import mmap
import os
import stat

from services.common.errors import InfrastructureError
from services.common.weights.manifest import Payload
from services.inference.weights.fetch_range import ByteRange


def map_payload(path: str, begin: int, size_bytes: int) -> memoryview:
    """The payload as writable memory that takes none until it is written.

    Raises:
        InfrastructureError: the file is gone, or is not what was offered.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise InfrastructureError(f"the offered file {path} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or begin < 0 or found.st_size < begin + size_bytes:
            raise InfrastructureError(f"the offered file {path} has no {size_bytes} bytes from {begin}")
        shift = begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(descriptor, shift + size_bytes, access=mmap.ACCESS_COPY, offset=begin - shift)
    except OSError as error:
        raise InfrastructureError(f"the offered file {path} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return memoryview(mapped)[shift:]


class MappedTransport:
    """Ranges copied out of the mapping; who wants the whole payload takes ``map_payload``."""

    name = "mapped"

    def __init__(self, path: str, begin: int) -> None:
        self._path = path
        self._begin = begin

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        mapped = map_payload(self._path, self._begin, payload.size_bytes)
        wanted.put(wanted.offset, mapped[wanted.offset : wanted.end])

    def whole(self, payload: Payload) -> memoryview:
        """The payload without a copy; as ``map_payload``."""
        return map_payload(self._path, self._begin, payload.size_bytes)
