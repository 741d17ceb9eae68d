"""The format of segment files: their names, the bytes of a record, and the damage that readers find.

A segment is a file ``<kind>-000001.jsonl.zst``, a sequence of records, written only at the end. The segments are the
truth; the index is made from them. One kind per file, so that every line has the same columns and `datasets` can open
them. A record is a header in a skippable zstd frame, then a zstd frame with the record's JSON line:

    magic u32 | content length u32 | format u8 | 0 u8 | key length u16 | payload length u32 | number u64 | written_at f64
    | xxh3-64 of the payload u64 | key (UTF-8) | xxh3-64 of all preceding bytes u64 | payload (a zstd frame)

Little-endian. zstd and tools on top (`zstd -dc`, `datasets`, pandas) pass over skippable frames and read a file of
records as plain JSON lines. Each record is a separate frame: a flipped bit costs one record.

Independent of SQLite and the meaning of records.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import xxhash
import zstandard

from services.common.errors import ConfigError, CorruptDataError

COLLECTED = "collected"  # kind of the records that name segments which retention deletes

_NAME = re.compile(r"^([a-z_]+)-(\d{6,15})\.jsonl\.zst$", re.ASCII)
_OLD_NAME = re.compile(r"^[a-z_]+-\d{6,}\.jsonl$")

# No run reaches this number: names of files may have larger ones, and new segments do not continue those.
_MOST_SEGMENTS = 10**12

Place = tuple[str, int]  # kind and segment

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


def segment_path(directory: Path, kind: str, segment: int) -> Path:
    return directory / f"{kind}-{segment:06d}.jsonl.zst"


def sizes_in(directory: Path) -> dict[Place, int]:
    """Bytes of every segment file, in order of segment and kind; 0 for a name that is no file and for a broken link.

    Raises ``ConfigError`` for a journal of plain jsonl segments.
    """
    found: dict[Place, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if match := _NAME.match(entry.name):
                size = _size_of(entry)
                if size is not None:
                    found[match[1], int(match[2])] = size
            elif _OLD_NAME.match(entry.name):
                raise ConfigError(
                    f"the journal in {directory} has plain jsonl segments ({entry.name}), which millrace wrote before its "
                    "segments were compressed (.jsonl.zst): go on with that release, or start a new run directory"
                )
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def _size_of(entry: os.DirEntry[str]) -> int | None:
    """Bytes of a segment file; None for one that was deleted meanwhile."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return 0 if entry.is_symlink() else None
    except OSError:  # a loop of links, or a disk with a read error
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def first_free(segments: Collection[int]) -> int:
    """The number of the next segment."""
    first = max((segment for segment in segments if segment < _MOST_SEGMENTS), default=0) + 1
    while first in segments:
        first += 1
    return first


class DamageReason(StrEnum):
    TORN = "torn"  # the segment ends inside a record
    UNREADABLE = "unreadable"  # bytes that are no record
    CHECKSUM = "checksum"  # a record whose contents differ from the written ones
    LOST = "lost"  # bytes that were there, and are gone
    REPEATED = "repeated"  # a record with the number of another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A span of a segment that is set aside. Its bytes stay where they are.

    >>> print(Damage(kind="versions", segment=2, offset=96, num_bytes=31, reason=DamageReason.TORN))
    versions-000002: 31 bytes at 96: torn
    """

    kind: str
    segment: int
    offset: int
    num_bytes: int
    reason: DamageReason
    num_records: int = 0  # as far as that is known
    number: int = 0  # of the record, where a single header names the record
    key: str = ""

    def __str__(self) -> str:
        told = f"{self.kind}-{self.segment:06d}: {self.num_bytes} bytes at {self.offset}: {self.reason.value}"
        if self.number:
            return f"{told} (record {self.number}, {self.key!r})"
        return f"{told} ({self.num_records} records)" if self.num_records else told


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
