"""Byte format of one record: a header in a skippable zstd frame, then a zstd frame with the record's JSON line.

    magic u32 | content length u32 | format u8 | 0 u8 | key length u16 | payload length u32 | number u64 | written_at f64
    | xxh3-64 of the payload u64 | key (UTF-8) | xxh3-64 of all preceding bytes u64 | payload (a zstd frame)

Little-endian. zstd and tools on top (`zstd -dc`, `datasets`, pandas) pass over skippable frames and read a file of
records as plain JSON lines. Each record is a separate frame: a flipped bit costs one record.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import xxhash
import zstandard

from services.common.errors import CorruptDataError

MAGIC = 0x184D2A5D  # one of the 16 of skippable frames
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
FORMAT = 1
MAX_LINE_BYTES = 1 << 28  # of one record, decompressed
MAX_NUMBER = 1 << 62  # of a record; more than SQLite's integers hold are no record's

_FIXED = struct.Struct("<IIBBHIQdQ")
_HASH = struct.Struct("<Q")
MIN_HEADER_BYTES = _FIXED.size + _HASH.size
MAX_HEADER_BYTES = MIN_HEADER_BYTES + 0xFFFF
_LEVEL = 1  # level 3 gains 1%, and takes a third longer


class Header(NamedTuple):
    number: int
    written_at: float  # seconds since the epoch
    key: str
    length: int  # of the payload
    checksum: int  # of the payload, by ``checksum_of``
    num_bytes: int  # of the header itself


class Unreadable(Exception):
    """No record's header at this position."""


class Incomplete(Unreadable):
    """These bytes may be the beginning of a header; the caller must supply ``needed`` bytes."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def checksum_of(data: bytes) -> int:
    """xxh3-64, moved into the signed integers that SQLite holds."""
    return xxhash.xxh3_64_intdigest(data) - (1 << 63)


def header_bytes(key: str) -> int:
    """Length of the header of a record with this key."""
    return MIN_HEADER_BYTES + len(key.encode())


def write_header(number: int, written_at: float, key: str, payload: bytes) -> bytes:
    """The bytes that stand before a payload; ``ValueError`` for a key of more than 65,535 bytes."""
    name = key.encode()
    if len(name) > 0xFFFF:
        raise ValueError(f"a record's key has {len(name)} bytes; at most 65535 are possible: {key[:80]!r}...")
    content = _FIXED.size + len(name) + _HASH.size - 8
    digest = xxhash.xxh3_64_intdigest(payload)
    head = _FIXED.pack(MAGIC, content, FORMAT, 0, len(name), len(payload), number, written_at, digest) + name
    return head + _HASH.pack(xxhash.xxh3_64_intdigest(head))


def read_header(data: bytes, at: int = 0) -> Header:
    """The header that begins at ``at``.

    Raises ``Incomplete`` where ``data`` ends before the header does, ``Unreadable`` without a valid header, and
    ``CorruptDataError`` for a valid header of a later format.
    """
    if len(data) - at < MIN_HEADER_BYTES:
        if MAGIC_BYTES.startswith(data[at : at + 4]):
            raise Incomplete(MIN_HEADER_BYTES)
        raise Unreadable
    magic, content, version, _, key_length, length, number, written_at, digest = _FIXED.unpack_from(data, at)
    size = MIN_HEADER_BYTES + key_length
    if magic != MAGIC or content != size - 8:
        raise Unreadable
    if len(data) - at < size:
        raise Incomplete(size)
    hashed = at + size - _HASH.size
    if xxhash.xxh3_64_intdigest(data[at:hashed]) != _HASH.unpack_from(data, hashed)[0]:
        raise Unreadable
    if version != FORMAT:
        raise CorruptDataError(
            f"the journal has a record of format {version}, and this release reads format {FORMAT}: use the release that "
            "wrote it"
        )
    try:
        key = data[at + _FIXED.size : hashed].decode()
    except UnicodeDecodeError:
        raise Unreadable from None
    if not 0 < number < MAX_NUMBER or not math.isfinite(written_at):
        raise Unreadable
    return Header(number, written_at, key, length, digest - (1 << 63), size)


class Packer:
    """Compresses lines. Used by one thread at a time."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=_LEVEL)

    def pack(self, line: bytes) -> bytes:
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a record has {len(line)} bytes of JSON; at most {MAX_LINE_BYTES} are possible")
        return self._zstd.compress(line)


class Unpacker:
    """Decompresses payloads. Used by one thread at a time."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def unpack(self, payload: bytes) -> bytes:
        """The line; ``CorruptDataError`` for a payload that is not one frame of a bounded size."""
        try:
            size = zstandard.frame_content_size(payload)
            if not 0 <= size <= MAX_LINE_BYTES:
                raise CorruptDataError(f"a record states {size} bytes of JSON; at most {MAX_LINE_BYTES} are possible")
            return self._zstd.decompress(payload)
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"a record cannot be decompressed: {error}") from error
