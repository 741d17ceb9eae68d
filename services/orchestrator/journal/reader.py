"""Reads the journal: durable records by kind and key, checked against their checksums.

Trusts the index as far as the segments confirm the index. Scans records that the index lacks. When the index
contradicts the segments, or another process has locked the index, reads from a private index made from the segments.
Changes no file. Independent of the meaning of records.
"""

from __future__ import annotations

import heapq
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.common.errors import CorruptDataError
from services.orchestrator.journal.storage.index import IN_MEMORY, INDEX_FILE, NOTHING, UNUSABLE, Index, Indexed
from services.orchestrator.journal.storage.index_keeper import compare, synchronise
from services.orchestrator.journal.storage.scan import Damage, DamageReason, header_before, scan
from services.orchestrator.journal.storage.segments import (
    COLLECTED,
    Place,
    Row,
    Unpacker,
    checksum_of,
    segment_path,
    sizes_in,
)

log = structlog.get_logger()

LOCK_S = 1.0  # for a lock of another process


class JournalReader:
    """Reads durable records, beside the writer or without one. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises ``ConfigError`` for a journal of an earlier release, ``CorruptDataError`` for one of a later."""
        self._directory = directory
        self._unpacker = Unpacker()
        self._open_files: dict[str, tuple[int, int]] = {}  # kind -> segment and descriptor
        self._unreadable: dict[int, Damage] = {}  # by number, of records that could not be loaded
        self._tail: list[Row] = []  # behind the index, in order of numbers
        self._tail_ends: dict[Place, int] = {}
        self._tail_damage: dict[Place, list[Damage]] = {}
        self._known: dict[Place, Indexed] = {}
        self._changes = -1  # of the index when ``_known`` was read
        self._indexes: list[Index] = []
        self._private = False
        try:
            self._use_shared()
        except UNUSABLE as error:
            self._use_private(error)

    # --- finding -----------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        """Every record in order."""
        return self._ordered(lambda index: index.rows(), lambda row: True)

    def rows_of(self, kind: str, key: str | None = None) -> Iterator[Row]:
        """Every record of a kind in order; with a key, only its records."""
        return self._ordered(
            lambda index: index.rows_of(kind, key), lambda row: row.kind == kind and key in (None, row.key)
        )

    def select(self, condition: str, values: Sequence[str | int], is_wanted: Callable[[Row], bool]) -> Iterator[Row]:
        """Rows for which an SQL condition on ``records AS r`` holds, in order; ``is_wanted`` says the same of a row that is
        not in the index yet."""
        return self._ordered(lambda index: index.select(condition, values), is_wanted)

    def last_rows(self, kind: str) -> Iterator[Row]:
        """Every record of a kind, the newest first."""
        self._refresh()
        before: float = math.inf
        for row in [row for row in reversed(self._tail) if row.kind == kind]:
            before = row.number
            yield row
        try:
            for row in self._index.last_rows(kind):
                if row.number < before:
                    before = row.number
                    yield row
        except sqlite3.Error as error:
            self._use_private(error)
            yield from (row for row in self._index.last_rows(kind) if row.number < before)

    def last_number(self) -> int:
        """The highest number of a record; 0 in an empty journal."""
        self._refresh()
        return max(self._index.last_number(), max((row.number for row in self._tail), default=0))

    def find_rows(self, kind: str, keys: Iterable[str]) -> list[Row]:
        """The first record of each existing key."""
        first: dict[str, Row] = {}
        for row in self._find(kind, keys):
            first.setdefault(row.key, row)
        return list(first.values())

    def find_all_rows(self, kind: str, keys: Iterable[str]) -> Iterator[Row]:
        """Every record of these keys, in order."""
        return self._find(kind, keys)

    def rows_below(self, kind: str, prefix: str) -> Iterator[Row]:
        """Every record of a kind with this key prefix, in order; ``prefix`` ends in "/"."""
        condition = "r.kind = ? AND r.key >= ? AND r.key < ?"  # "0" comes right after "/"
        return self.select(
            condition, (kind, prefix, prefix[:-1] + "0"), lambda row: row.kind == kind and row.key.startswith(prefix)
        )

    def segment_sizes(self, kind: str) -> dict[int, int]:
        """Bytes of every segment file of a kind."""
        return {segment: size for (found, segment), size in sizes_in(self._directory).items() if found == kind}

    def find(self, kind: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The newest intact record of each key; keys without one are absent."""
        found: dict[str, dict[str, Any]] = {}
        for row in reversed(list(self._find(kind, keys))):
            if row.key not in found and (record := self.load(row)) is not None:
                found[row.key] = record
        return found

    def _find(self, kind: str, keys: Iterable[str]) -> Iterator[Row]:
        wanted = set(keys)
        return self._ordered(lambda index: index.find(kind, wanted), lambda row: row.kind == kind and row.key in wanted)

    def _ordered(self, ask: Callable[[Index], Iterable[Row]], is_wanted: Callable[[Row], bool]) -> Iterator[Row]:
        self._refresh()
        last = 0
        while True:
            index = self._index
            try:
                rows = ask(index)
                if self._tail:
                    rows = heapq.merge(rows, [row for row in self._tail if is_wanted(row)])
                for row in rows:
                    if row.number > last:  # the index may have got the tail's rows meanwhile
                        last = row.number
                        yield row
                return
            except UNUSABLE as error:
                if index is self._index:
                    self._use_private(error)

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self, row: Row) -> dict[str, Any] | None:
        """One record, or None (logged, and listed in ``damage``) when its bytes do not match their checksum."""
        line = self.load_line(row)
        if line is None:
            return None
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        if isinstance(record, dict):
            return record
        self._note_unreadable(row, DamageReason.CHECKSUM)  # not by this project's writer
        return None

    def load_line(self, row: Row) -> bytes | None:
        """The same as the written JSON line."""
        line, reason = self._read(row)
        if line is None:
            moved = self._moved(row)
            if moved is None:  # deleted: collected, or reported as a gap
                return None
            row = moved
            line, reason = self._read(row)
        if line is None:
            self._note_unreadable(row, reason)
        return line

    def _note_unreadable(self, row: Row, reason: DamageReason) -> None:
        if row.number in self._unreadable:
            return
        self._unreadable[row.number] = Damage(
            kind=row.kind, segment=row.segment, offset=row.offset, num_bytes=row.length, reason=reason, num_records=1,
            number=row.number, key=row.key,
        )  # fmt: skip
        log.error("journal.corrupted", kind=row.kind, key=row.key, segment=row.segment, offset=row.offset)

    def _moved(self, row: Row) -> Row | None:
        """The current position of a record in a segment that may have been rewritten since; None for a deleted record."""
        opened = self._open_files.pop(row.kind, None)
        if opened is not None:
            os.close(opened[1])
        found = next(self.select("r.number = ?", (row.number,), lambda found: found.number == row.number), None)
        if found is None or self._is_in_place(found):
            return found
        # The index has the places in the file that was there before, or the record's header is damaged, too.
        rows = scan(self._directory, found.kind, found.segment)
        return next((other for other in rows if isinstance(other, Row) and other.number == found.number), found)

    def _is_in_place(self, row: Row) -> bool:
        header = header_before(self._directory, row.kind, row.segment, row.offset, row.key)
        return header is not None and (header.number, header.checksum) == (row.number, row.checksum)

    def _read(self, row: Row) -> tuple[bytes | None, DamageReason]:
        """A line, or the reason for which the line is unreadable."""
        try:
            payload = os.pread(self._open(row), row.length, row.offset)
            if len(payload) == row.length and checksum_of(payload) == row.checksum:
                return self._unpacker.unpack(payload), DamageReason.CHECKSUM
        except OSError as error:  # no file, or a disk with a read error
            log.warning("journal.not_read", kind=row.kind, segment=row.segment, offset=row.offset, error=str(error))
            return None, DamageReason.LOST
        except CorruptDataError:
            pass
        return None, DamageReason.CHECKSUM

    def _open(self, row: Row) -> int:
        segment, fd = self._open_files.get(row.kind, (0, -1))
        if segment != row.segment:
            new = os.open(segment_path(self._directory, row.kind, row.segment), os.O_RDONLY | os.O_CLOEXEC)
            if fd >= 0:
                os.close(fd)
            self._open_files[row.kind] = (row.segment, fd := new)
        return fd

    # --- missing records ---------------------------------------------------------------------------------------------

    def damage(self) -> list[Damage]:
        """Damaged spans, and records that this reader could not load. During writes, the last record of the newest
        segments may count as torn."""
        self._refresh()
        behind = [span for spans in self._tail_damage.values() for span in spans]
        return [*self._index.damage(), *behind, *self._unreadable.values()]

    def gaps(self) -> list[tuple[int, int]]:
        """First and last number of every missing run that retention did not delete."""
        present = [(row.number, row.number) for row in self._tail]
        for row in self.rows_of(COLLECTED):
            record = self.load(row)
            present += [] if record is None else map(tuple, record["numbers"])
        return list(_without(self._index.gaps(), sorted(present)))

    def close(self) -> None:
        for _, fd in self._open_files.values():
            os.close(fd)
        self._open_files.clear()
        for index in self._indexes:
            index.close()

    # --- staying up to date ------------------------------------------------------------------------------------------

    @property
    def _index(self) -> Index:
        return self._indexes[-1]

    def _use_shared(self) -> None:
        self._indexes.append(Index(self._directory / INDEX_FILE, timeout_s=LOCK_S, read_only=True))
        found = compare(self._directory, self._index)
        self._check(bool(found.replaced or found.shortened))
        self._check(not set(found.missing) <= self._index.collected())

    def _check(self, contradicts: bool) -> None:
        if contradicts:
            raise sqlite3.DatabaseError("the index contradicts the segments")

    def _use_private(self, reason: Exception) -> None:
        if self._private:
            raise reason
        log.warning("journal.read_without_index", directory=str(self._directory), reason=str(reason))
        private = Index(IN_MEMORY, timeout_s=LOCK_S)
        try:
            if self._indexes:
                private.copy_from(self._index)
            usable = private.is_consistent()
        except UNUSABLE:
            usable = False
        if not usable:
            private.close()
            private = Index(IN_MEMORY, timeout_s=LOCK_S)
        synchronise(self._directory, private)
        self._indexes.append(private)
        self._private = True
        self._tail, self._tail_ends, self._tail_damage = [], {}, {}

    def _refresh(self) -> None:
        """Index the records written since the last call."""
        if self._private:
            synchronise(self._directory, self._index)
            return
        try:
            self._scan_tails()
        except UNUSABLE as error:
            self._use_private(error)

    def _scan_tails(self) -> None:
        changes = self._index.changes()
        if changes != self._changes:
            self._known = self._index.segments()  # before the sizes: a record in progress appears in its segment first
            self._changes = changes
            self._tail = [
                row for row in self._tail if row.offset >= self._known.get((row.kind, row.segment), NOTHING).end
            ]
        sizes = sizes_in(self._directory)
        missing = self._known.keys() - sizes.keys()
        if missing:
            self._check(not missing <= self._index.collected())
        new: list[Row] = []
        for place, size in sizes.items():
            known = self._known.get(place, NOTHING)
            self._check(size < known.end)
            if size < self._tail_ends.get(place, 0):  # rewritten since
                del self._tail_ends[place]
                self._tail = [row for row in self._tail if (row.kind, row.segment) != place]
            start = max(known.end, self._tail_ends.get(place, 0))
            if size > start:
                new += self._scan_tail(place, start)
        if new:
            self._tail = sorted([*self._tail, *new])

    def _scan_tail(self, place: Place, start: int) -> Iterator[Row]:
        self._tail_damage[place] = []
        for found in scan(self._directory, *place, start=start):
            if isinstance(found, Row):
                self._tail_ends[place] = found.offset + found.length
                yield found
            else:  # read again next time: a write may be in progress
                self._tail_damage[place].append(found)


def _without(gaps: Iterable[tuple[int, int]], present: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of ``gaps`` that no run of ``present`` covers; both in order."""
    at = 0
    for begin, end in gaps:
        while at < len(present) and present[at][0] <= end:
            if present[at][0] > begin:
                yield begin, present[at][0] - 1
            begin = max(begin, present[at][1] + 1)
            if present[at][1] > end:
                break
            at += 1
        if begin <= end:
            yield begin, end
