"""Segment files: their names, the bytes of a record, the open segments to which commits are appended, and the scan.

A segment is a file ``<kind>-000001.jsonl.zst``, a sequence of records, written only at the end. The segments are the
truth and all that there is. One kind per file, so that every line has the same columns and `datasets` can open
them. A record is a header in a skippable zstd frame, then a zstd frame with the record's JSON line:

    magic u32 | content length u32 | format u8 | 0 u8 | key length u16 | payload length u32 | number u64 | written_at f64
    | xxh3-64 of the payload u64 | key (UTF-8) | xxh3-64 of all preceding bytes u64 | payload (a zstd frame)

Little-endian. zstd and tools on top (`zstd -dc`, `datasets`, pandas) pass over skippable frames and read a file of
records as plain JSON lines. Each record is a separate frame: a flipped bit costs one record.

A scan reads headers only. After bytes that are no record it continues at the next valid header, and reports the skipped
bytes. Independent of SQLite and the meaning of records. One thread calls a ``SegmentSet``; only ``current`` may be
called from others.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

import orjson
import xxhash
import zstandard

from services.common.errors import ConfigError, CorruptDataError
from services.common.system import machine

COLLECTED = "collected.jsonl"  # in the journal's directory: the deleted segments, and the numbers of their records

_NAME = re.compile(r"^([a-z_]+)-(\d{6,15})\.jsonl\.zst$", re.ASCII)

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

_READ_BYTES = 256 * 1024  # at once, while records are short
_LONG_BYTES = 32 * 1024  # behind a record of this length only the next header is read
_SEARCH_BYTES = 1024 * 1024


def segment_path(directory: Path, kind: str, segment: int) -> Path:
    return directory / f"{kind}-{segment:06d}.jsonl.zst"


def sizes_in(directory: Path) -> dict[Place, int]:
    """Bytes of every segment file, in order of segment and kind; 0 for a name that is no file and for a broken link."""
    found: dict[Place, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if not (match := _NAME.match(entry.name)):
                continue
            size = 0
            try:
                status = entry.stat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            except FileNotFoundError:
                if not entry.is_symlink():
                    continue  # deleted meanwhile
            except OSError:  # a loop of links, or a disk with a read error
                pass
            found[match[1], int(match[2])] = size
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def first_free(segments: Collection[int]) -> int:
    """The number of the next segment."""
    first = max((segment for segment in segments if segment < _MOST_SEGMENTS), default=0) + 1
    while first in segments:
        first += 1
    return first


class Row(NamedTuple):
    """Position of one record."""

    number: int
    kind: str
    key: str
    segment: int
    offset: int  # of the payload, behind the record's header
    length: int  # of the payload
    checksum: int  # of the payload, by ``checksum_of``
    written_at: float = 0.0  # seconds since the epoch


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


class Files:
    """Calls of the operating system; each returns after its completion. All raise ``OSError``."""

    def free_bytes(self, path: Path) -> int:
        """Bytes that can still be written on the file system of ``path``."""
        return shutil.disk_usage(path).free

    def create(self, path: Path) -> int:
        """A new file's descriptor; refuses a file that exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``; an error may leave a part of the data."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Contents of the file survive a power cut; its name does so after ``sync_directory``."""
        os.fsync(fd)

    def sync_file(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def sync_directory(self, path: Path) -> None:
        """Names that were added survive a power cut, where the file system can sync directories."""
        machine.sync_directory(path)

    def close(self, fd: int) -> None:
        os.close(fd)


Durability = Literal["process", "power"]  # failures that an acknowledged record survives


@dataclass(slots=True)
class _Open:
    """The open segment of one kind."""

    segment: int
    fd: int
    size: int = 0


class SegmentSet:
    """The open segments of all kinds, rolled at a size: appends whole commits, numbers records, syncs names and data."""

    def __init__(
        self, directory: Path, *, next_number: int, segment_bytes: int, durability: Durability, files: Files
    ) -> None:
        """``next_number``: number of the next record. Syncs the segments of earlier processes with ``durability:
        power``."""
        self._directory = directory
        self._next_number = next_number
        self._segment_bytes = segment_bytes
        self._durability: Durability = durability
        self._files = files
        self._open: dict[str, _Open] = {}
        self._names_changed = True  # in the directory since its last sync
        sizes = sizes_in(directory)
        # Every start begins new segments: the writer never appends to a segment of an earlier process.
        self._first_segment = first_free({segment for _, segment in sizes})
        if durability == "power":
            # An earlier process may have left unsynced records: from now on they count as acknowledged.
            for place in (place for place, size in sizes.items() if size):
                self._files.sync_file(segment_path(directory, *place))
            self._files.sync_directory(directory.parent)
            self._sync_names()

    def append(self, entries: Sequence[tuple[str, str, bytes]]) -> None:
        """Append one commit of (kind, key, payload); with ``durability: power`` returns after the sync. On an error no
        record is written."""
        # In the order of numbers, so that a killed process leaves no record without those before. One write for neighbours of
        # a kind.
        pieces: list[tuple[str, list[bytes]]] = []
        now = time.time()
        # Segments are rolled between transactions only, so that a failed one can be undone.
        before: dict[str, int] = {}
        for kind in {kind for kind, _, _ in entries}:
            current = self._open.get(kind)
            if current is None or current.size >= self._segment_bytes:
                current = self._begin(kind, current)
            before[kind] = current.size
        try:
            for number, (kind, key, payload) in enumerate(entries, start=self._next_number):
                if not pieces or pieces[-1][0] != kind:
                    pieces.append((kind, []))
                pieces[-1][1].extend((write_header(number, now, key, payload), payload))
            for kind, found in pieces:
                data, current = b"".join(found), self._open[kind]
                self._files.write(current.fd, data, current.size)
                current.size += len(data)
            if self._durability == "power":
                for kind in before:
                    self._files.sync(self._open[kind].fd)
                self._sync_names()
        except BaseException:
            for kind, size in before.items():
                self._open[kind].size = size
                self._files.truncate(self._open[kind].fd, size)
            raise
        self._next_number += len(entries)

    def _begin(self, kind: str, full: _Open | None) -> _Open:
        """Open the first segment of a kind, or the one after a full one."""
        segment = self._first_segment if full is None else full.segment + 1
        fd = self._files.create(segment_path(self._directory, kind, segment))
        if full is not None:
            self._files.close(full.fd)
        self._open[kind] = begun = _Open(segment, fd)
        self._names_changed = True
        return begun

    def current(self) -> dict[str, int]:
        """The open segment of each kind; earlier ones never change again."""
        return {kind: found.segment for kind, found in self._open.copy().items()}  # the writer thread may add one

    def close(self) -> None:
        for found in self._open.values():
            self._files.close(found.fd)

    def _sync_names(self) -> None:
        if self._names_changed:
            self._files.sync_directory(self._directory)
            self._names_changed = False


def delete_segment(directory: Path, kind: str, segment: int) -> None:
    """Delete a closed segment, after the numbers of its records are in ``COLLECTED``, so that they are not taken for lost.

    Raises ``OSError``; the segment then stays.
    """
    note = {"kind": kind, "segment": segment, "numbers": numbers_in(directory, kind, segment)}
    with (directory / COLLECTED).open("ab") as file:
        file.write(b"\n" + orjson.dumps(note) + b"\n")  # a line of its own, also behind one that a crash has cut
        file.flush()
        os.fsync(file.fileno())
    machine.sync_directory(directory)
    segment_path(directory, kind, segment).unlink(missing_ok=True)


def collected_in(directory: Path) -> dict[Place, list[tuple[int, int]]]:
    """The deleted segments, each with first and last of every run of its record numbers."""
    found: dict[Place, list[tuple[int, int]]] = {}
    try:
        lines = (directory / COLLECTED).read_bytes().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a crash has cut
            note = orjson.loads(line)
            found[note["kind"], note["segment"]] = [(first, last) for first, last in note["numbers"]]
    return found


# --- finding the records of a segment by the headers alone, without decompressing ------------------------------------


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


def scan(directory: Path, kind: str, segment: int, start: int = 0, end: int | None = None) -> Iterator[Row | Damage]:
    """Records and damaged spans of a segment from ``start`` to ``end`` (default: its end), in their order.

    From an unreadable position on all is damaged, and so is a name that is no file; a segment that was deleted
    meanwhile has no records. Raises ``ConfigError`` without the right to read the file, and ``CorruptDataError`` for
    records of a later format.
    """
    path = segment_path(directory, kind, segment)
    nothing_read = Damage(kind=kind, segment=segment, offset=0, num_bytes=end or 0, reason=DamageReason.UNREADABLE)
    try:
        if not path.is_file():
            if os.path.lexists(path):
                yield nothing_read
            return
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give this process's user the right to") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        yield nothing_read
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        whole = _Scan(file.fileno(), kind, segment, size if end is None else min(end, size))
        try:
            yield from whole.run(start)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            yield whole.not_read()


def numbers_in(directory: Path, kind: str, segment: int) -> list[tuple[int, int]]:
    """First and last of every run of record numbers in a segment."""
    runs: list[tuple[int, int]] = []
    for number in sorted(found.number for found in scan(directory, kind, segment) if isinstance(found, Row)):
        if runs and runs[-1][1] >= number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


class _Scan:
    def __init__(self, fd: int, kind: str, segment: int, end: int) -> None:
        self._fd = fd
        self._kind = kind
        self._segment = segment
        self._end = end
        self._data = b""  # of the file, from ``_at`` on
        self._at = 0
        self._read_bytes = _READ_BYTES
        self._done = 0

    def not_read(self) -> Damage:
        """The damaged rest after an error of the disk."""
        return self._passed_over(self._done, self._end, False, None)

    def run(self, at: int) -> Iterator[Row | Damage]:
        last: Row | None = None
        while at < self._end:
            self._done = at
            try:
                header = self._header(at)
            except Unreadable as error:
                broken = last if last is not None and not self._is_whole(last) else None
                # A record that is not whole may hide the begin of the next one.
                found = self._next_header(at + 1 if broken is None else broken.offset)
                yield self._passed_over(at, found, isinstance(error, Incomplete), broken)
                last, at = None, found
                continue
            row = Row(
                header.number, self._kind, header.key, self._segment, at + header.num_bytes, header.length,
                header.checksum, header.written_at,
            )  # fmt: skip
            if row.offset + row.length > self._end:
                found = self._next_header(row.offset)
                yield self._passed_over(at, found, True, row)
                last, at = None, found
                continue
            yield row
            last, at = row, row.offset + row.length
            self._read_bytes = _READ_BYTES if row.length < _LONG_BYTES else 4096

    def _header(self, at: int) -> Header:
        """Raises ``Unreadable`` without a valid header, ``Incomplete`` where the segment ends inside one."""
        if self._at <= at:
            try:
                return read_header(self._data, at - self._at)
            except Incomplete:
                pass  # continues after the bytes that were read
        self._fill(at, MIN_HEADER_BYTES)
        try:
            return read_header(self._data)
        except Incomplete as missing:
            if at + len(self._data) >= self._end:
                raise
            self._fill(at, missing.needed)
            return read_header(self._data)

    def _fill(self, at: int, needed: int) -> None:
        self._data = os.pread(self._fd, min(max(needed, self._read_bytes), self._end - at), at)
        self._at = at

    def _is_whole(self, row: Row) -> bool:
        return checksum_of(os.pread(self._fd, row.length, row.offset)) == row.checksum

    def _next_header(self, begin: int) -> int:
        """Position of the next valid header; the end of the segment without one."""
        while begin < self._end:
            data = os.pread(self._fd, min(_SEARCH_BYTES, self._end - begin), begin)
            found = data.find(MAGIC_BYTES)
            while found >= 0:
                try:
                    read_header(os.pread(self._fd, min(MAX_HEADER_BYTES, self._end - begin - found), begin + found))
                    return begin + found
                except Unreadable:
                    found = data.find(MAGIC_BYTES, found + 1)
            begin += max(1, len(data) - len(MAGIC_BYTES) + 1)
        return self._end

    def _passed_over(self, at: int, found: int, cut: bool, row: Row | None) -> Damage:
        """The span up to the next valid header; ``row`` is its record, where known."""
        begin = at if row is None else min(at, row.offset)
        return Damage(
            kind=self._kind,
            segment=self._segment,
            offset=begin,
            num_bytes=found - begin,
            reason=DamageReason.TORN if cut and found == self._end else DamageReason.UNREADABLE,
            num_records=0 if row is None else 1,
            number=0 if row is None else row.number,
            key="" if row is None else row.key,
        )
