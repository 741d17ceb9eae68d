"""Byte planes of the delta codec: each is nothing (all zero), raw, or one zstd frame, whichever is smallest.

A plane begins with one byte of coding and four of length (of the body; of the plane itself when it is all zero).
``PlaneReader`` walks over untrusted bytes and raises ``CorruptDataError`` rather than allocate or read more than the
caller expects.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from services.common.errors import CorruptDataError

_HEADER = struct.Struct("<BI")
PLANE_HEADER_BYTES = _HEADER.size
_ZERO, _RAW, _ZSTD = 0, 1, 2

# Planes are drawn independently, so there are no repetitions to find: only the entropy coder is wanted. zstd's own level 1
# finds chance repetitions, which costs up to a third of a plane of gaps, and time.
_ENTROPY_ONLY = {
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}

_local = threading.local()  # zstandard's contexts must not be shared between threads


def pack_plane(plane: npt.NDArray[np.uint8]) -> bytes:
    """Header and body of one plane."""
    if not plane.any():
        return _HEADER.pack(_ZERO, len(plane))
    raw = plane.tobytes()
    compressed = _compressor().compress(raw)
    if len(compressed) < len(raw):
        return _HEADER.pack(_ZSTD, len(compressed)) + compressed
    return _HEADER.pack(_RAW, len(raw)) + raw


def pack_varint(value: int) -> bytes:
    """A number as ``PlaneReader.varint`` reads it."""
    coded = bytearray()
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    coded.append(value)
    return bytes(coded)


class PlaneReader:
    """A cursor over the bytes of a coded tensor."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._cursor = 0

    @property
    def at_end(self) -> bool:
        return self._cursor == len(self._data)

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        end = self._cursor + size
        if end > len(self._data):
            raise CorruptDataError(f"delta ends {end - len(self._data)} bytes early")
        taken = self._data[self._cursor : end]
        self._cursor = end
        return taken

    def unpack(self, header: struct.Struct) -> tuple[Any, ...]:
        return header.unpack(self.take(header.size))

    def varint(self) -> int:
        """A number below 2**35: seven bits per byte, lowest first, the top bit set in all bytes but the last."""
        value = 0
        for shift in range(0, 35, 7):
            [byte] = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptDataError("delta holds a number that does not end")

    def plane(self, *, at_least: int, at_most: int) -> npt.NDArray[np.uint8]:
        """The next plane, whose size must lie within the bounds."""
        coding, size = self.unpack(_HEADER)
        if coding == _ZERO and size <= at_most:
            plane = np.zeros(size, dtype=np.uint8)
        elif coding == _RAW:
            plane = np.frombuffer(self.take(size), dtype=np.uint8)
        elif coding == _ZSTD:
            plane = np.frombuffer(_decompress(self.take(size), at_most), dtype=np.uint8)
        else:
            raise CorruptDataError(f"delta holds a plane of coding {coding} and size {size}, which is unknown here")
        if not at_least <= len(plane) <= at_most:
            raise CorruptDataError(
                f"delta holds a plane of {len(plane)} bytes where {at_least} to {at_most} were expected"
            )
        return plane


def _decompress(body: memoryview, limit: int) -> bytes:
    try:
        # A frame that says it is larger than it may be is refused before anything is allocated for it.
        if not 0 < zstandard.frame_content_size(body) <= limit:
            raise CorruptDataError(f"delta holds a zstd frame of other size than the at most {limit} bytes expected")
        return _decompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"delta holds a broken zstd frame: {error}") from error


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        parameters = zstandard.ZstdCompressionParameters(**_ENTROPY_ONLY)
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
