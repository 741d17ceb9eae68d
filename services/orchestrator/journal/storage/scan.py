"""Finds the records of a segment, and its damage, by the headers alone, without the index and without decompressing.

After bytes that are no record the scan continues at the next valid header, and reports the skipped bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.common.errors import ConfigError
from services.orchestrator.journal.storage.segments import (
    MAGIC_BYTES,
    MAX_HEADER_BYTES,
    MIN_HEADER_BYTES,
    Header,
    Incomplete,
    Row,
    Unreadable,
    checksum_of,
    header_bytes,
    read_header,
    segment_path,
)

_READ_BYTES = 256 * 1024  # at once, while records are short
_LONG_BYTES = 32 * 1024  # behind a record of this length only the next header is read
_SEARCH_BYTES = 1024 * 1024


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


def header_before(directory: Path, kind: str, segment: int, offset: int, key: str) -> Header | None:
    """The header of the record with this key and a payload at ``offset``; None where there is none."""
    size = header_bytes(key)
    try:
        with segment_path(directory, kind, segment).open("rb", buffering=0) as file:
            return read_header(os.pread(file.fileno(), size, offset - size))
    except (OSError, Unreadable):
        return None


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
