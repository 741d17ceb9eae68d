"""Reads the journal: durable records by kind and key, checked against their checksums.

A reader scans the headers of all segments into a temporary SQLite database of its own (about 10 s per million records), and
before each question those bytes that are new. Changes no file. Independent of the meaning of records.
"""

from __future__ import annotations

import heapq
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
import structlog

from services.common.errors import CorruptDataError
from services.common.records import SetAsideReason
from services.common.telemetry.logs import LogEvent
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import SetAside
from services.orchestrator.journal.segments import (
    Damage,
    DamageReason,
    Place,
    Row,
    Unpacker,
    checksum_of,
    collected_in,
    scan,
    segment_path,
    sizes_in,
)

log = structlog.get_logger()

T = TypeVar("T")

MOST_LOGGED = 20  # set-aside records of one start; others are counted, and `rollmill journal RUN list` shows them

# Errors of parsing a record whose bytes are whole.
UNREADABLE = (CorruptDataError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)

_SCHEMA = """
PRAGMA journal_mode=OFF;
CREATE TABLE records (
    number   INTEGER PRIMARY KEY,
    kind     TEXT NOT NULL,
    key      TEXT NOT NULL,
    segment  INTEGER NOT NULL,
    offset   INTEGER NOT NULL,
    length   INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    written_at REAL NOT NULL
);
CREATE INDEX records_by_key ON records (kind, key);
"""
_TEMPORARY = ""  # SQLite's name for a database on disk beyond its cache, which ends with the connection
_ROWS = 20_000  # of one transaction


class JournalReader:
    """Reads durable records, beside the writer or without one. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises ``CorruptDataError`` for a journal of a later release, ``ConfigError`` without the right to read it."""
        self._directory = directory
        self._unpacker = Unpacker()
        self._open_files: dict[str, tuple[int, int]] = {}  # kind -> segment and descriptor
        self._ends: dict[Place, int] = {}  # of the scanned parts
        self._damage: dict[Place, list[Damage]] = {}
        self._torn: dict[Place, Damage] = {}  # ends of segments, read again: a write may be in progress
        self._unreadable: dict[int, Damage] = {}  # by number, of records that could not be loaded
        self._db = sqlite3.connect(_TEMPORARY, isolation_level=None, check_same_thread=False)
        try:
            self._db.executescript(_SCHEMA)
            self._refresh()
        except BaseException:
            self._db.close()
            raise

    # --- finding -----------------------------------------------------------------------------------------------------

    def select(self, condition: str, values: Sequence[str | int] = (), order: str = "r.number") -> Iterator[Row]:
        """Rows for which an SQL condition on ``records AS r`` holds, in order."""
        self._refresh()
        query = f"SELECT * FROM records AS r WHERE {condition} ORDER BY {order}"
        return map(Row._make, self._db.execute(query, values))

    def rows(self) -> Iterator[Row]:
        """Every record in order."""
        return self.select("1")

    def rows_of(self, kind: str, key: str | None = None) -> Iterator[Row]:
        """Every record of a kind in order; with a key, only its records."""
        if key is None:
            return self.select("r.kind = ?", (kind,))
        return self.select("r.kind = ? AND r.key = ?", (kind, key))

    def last_rows(self, kind: str) -> Iterator[Row]:
        """Every record of a kind, the newest first."""
        return self.select("r.kind = ?", (kind,), "r.number DESC")

    def rows_below(self, kind: str, prefix: str) -> Iterator[Row]:
        """Every record of a kind with this key prefix, in order; ``prefix`` ends in "/"."""
        # "0" comes right after "/"
        return self.select("r.kind = ? AND r.key >= ? AND r.key < ?", (kind, prefix, prefix[:-1] + "0"))

    def find_rows(self, kind: str, keys: Iterable[str]) -> list[Row]:
        """Every record of these keys, in order."""
        wanted = orjson.dumps(list(keys)).decode()
        return list(self.select("r.kind = ? AND r.key IN (SELECT value FROM json_each(?))", (kind, wanted)))

    def find(self, kind: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The newest intact record of each key; keys without one are absent."""
        found: dict[str, dict[str, Any]] = {}
        for row in reversed(self.find_rows(kind, keys)):
            if row.key not in found and (record := self.load(row)) is not None:
                found[row.key] = record
        return found

    def last_number(self) -> int:
        """The highest number of a record, damaged ones included; 0 in an empty journal."""
        newest = next(self.select("1", order="r.number DESC LIMIT 1"), None)
        return max([0 if newest is None else newest.number, *(span.number for span in self.damage())])

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
        is_gone = reason is DamageReason.LOST and (row.kind, row.segment) in collected_in(self._directory)
        if line is None and not is_gone:
            self._note_unreadable(row, reason)
        return line

    def _note_unreadable(self, row: Row, reason: DamageReason) -> None:
        if row.number in self._unreadable:
            return
        self._unreadable[row.number] = _span_of(row, reason)
        log.error("journal.corrupted", kind=row.kind, key=row.key, segment=row.segment, offset=row.offset)

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
        spans = [span for found in self._damage.values() for span in found]
        return [*spans, *self._torn.values(), *self._unreadable.values()]

    def gaps(self) -> list[tuple[int, int]]:
        """First and last number of every missing run that retention did not delete."""
        deleted = sorted(run for runs in collected_in(self._directory).values() for run in runs)
        last = self.last_number()
        kept = self._db.execute("SELECT number, number FROM records ORDER BY number")
        gaps: list[tuple[int, int]] = []
        before = 0
        for first, end in heapq.merge(kept, deleted, [(last + 1, last + 1)]):
            if first > before + 1:
                gaps.append((before + 1, first - 1))
            before = max(before, end)
        return gaps

    def close(self) -> None:
        for _, fd in self._open_files.values():
            os.close(fd)
        self._open_files.clear()
        self._db.close()

    # --- scanning ----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Find the records written since the last call, and forget those of deleted segments."""
        sizes = sizes_in(self._directory)
        for place in [place for place, end in self._ends.items() if sizes.get(place, -1) < end]:  # deleted, or cut
            self._db.execute("DELETE FROM records WHERE kind = ? AND segment = ?", place)
            del self._ends[place]
            self._damage.pop(place, None)
            self._torn.pop(place, None)
        for place, size in sizes.items():
            if self._ends.get(place) != size:
                self._scan(place, size)

    def _scan(self, place: Place, size: int) -> None:
        self._torn.pop(place, None)
        rows: list[Row] = []
        end = size
        for found in scan(self._directory, *place, start=self._ends.get(place, 0), end=size):
            if isinstance(found, Row):
                rows.append(found)
                if len(rows) == _ROWS:
                    self._add(rows)
                    rows = []
            elif found.reason is DamageReason.TORN:
                self._torn[place], end = found, found.offset
            else:
                self._damage.setdefault(place, []).append(found)
        self._add(rows)
        self._ends[place] = end

    def _add(self, rows: list[Row]) -> None:
        """Of two records with one number the first is kept."""
        self._db.execute("BEGIN")
        count = self._db.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows).rowcount
        self._db.execute("COMMIT")
        for row in rows if count < len(rows) else ():
            kept = self._db.execute("SELECT * FROM records WHERE number = ?", (row.number,)).fetchone()
            if Row._make(kept) != row:
                span = _span_of(row, DamageReason.REPEATED)
                self._damage.setdefault((row.kind, row.segment), []).append(span)


def _span_of(row: Row, reason: DamageReason) -> Damage:
    return Damage(
        kind=row.kind, segment=row.segment, offset=row.offset, num_bytes=row.length, reason=reason, num_records=1,
        number=row.number, key=row.key,
    )  # fmt: skip


# --- records that are set aside --------------------------------------------------------------------------------------

_Identity = int | tuple[str, int, int]


def _identity(of: Row | SetAside) -> _Identity:
    """The record's number, else its kind, segment and offset."""
    return of.number or (of.kind, of.segment, of.offset)


class Quarantine:
    """Set-aside records: damaged, unreadable or unusable ones, each named once in the journal itself.

    A record is known by its number, so a later record of the same slot is valid; damaged bytes without a known record are
    identified by their position. A start reads the set-aside records of earlier starts and does not check them again, so
    no record is tried twice, and a restart alone does not grow the journal.
    """

    def __init__(self) -> None:
        self._known: dict[_Identity, SetAside] = {}
        self._new: dict[_Identity, SetAside] = {}  # of these, not in the journal yet

    @classmethod
    def of(cls, reader: JournalReader) -> Quarantine:
        """With the set-aside records of earlier processes."""
        found = cls()
        for row in reader.rows_of(entries.SET_ASIDE):
            try:
                if (record := reader.load(row)) is not None:
                    noted = entries.from_json(SetAside, record)
                    found._known[_identity(noted)] = noted
            except (KeyError, TypeError, ValueError):
                log.warning("journal.unreadable", kind=row.kind, segment=row.segment, offset=row.offset)
        return found

    def __contains__(self, row: Row) -> bool:
        return _identity(row) in self._known

    def __iter__(self) -> Iterator[SetAside]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def add(self, row: Row, reason: SetAsideReason, detail: str = "") -> None:
        """Set a record aside; a repetition has no effect."""
        if row in self:
            return
        noted = SetAside(
            kind=row.kind, key=row.key, number=row.number, segment=row.segment, offset=row.offset, reason=reason,
            detail=detail,
        )  # fmt: skip
        self._known[_identity(row)] = self._new[_identity(row)] = noted

    def add_span(self, span: Damage) -> Row:
        """Set an unreadable span aside; returns its row, as far as the span names one."""
        row = Row(span.number, span.kind, span.key, span.segment, span.offset, 0, 0)
        self.add(row, SetAsideReason.DAMAGED, str(span))
        return row

    def is_new(self, row: Row) -> bool:
        """Whether this process set the record aside."""
        return _identity(row) in self._new

    def take_new(self) -> list[SetAside]:
        """The records set aside since the last call, which are logged; the caller journals them."""
        for noted in list(self._new.values())[:MOST_LOGGED]:
            log.error(LogEvent.RECORD_SET_ASIDE, **entries.to_json(noted))
        if self._new:
            log.error("journal.set_aside_in_all", records=len(self._new), see="rollmill journal RUN list --set-aside")
        found = list(self._new.values())
        self._new.clear()
        return found

    def counts(self) -> Counter[tuple[str, SetAsideReason]]:
        """Records by kind and reason."""
        return Counter((noted.kind, noted.reason) for noted in self._known.values())


def decode(reader: JournalReader, row: Row, aside: Quarantine, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """A record, or None for one that is, or now was, set aside."""
    if row in aside:
        return None
    try:
        record = reader.load(row)
        if record is not None:
            return parse(record)
    except UNREADABLE as error:
        aside.add(row, SetAsideReason.UNREADABLE, f"{type(error).__name__}: {error}")
        return None
    aside.add(row, SetAsideReason.DAMAGED)
    return None


# --- selections of records -------------------------------------------------------------------------------------------


def numbered(row: Row) -> tuple[str, int | None]:
    """Policy and number of the key of a version or batch; None for a key without them."""
    policy, _, number = row.key.rpartition("/")
    return policy, int(number) if number.isdecimal() else None


def open_groups(reader: JournalReader) -> list[Row]:
    """Task groups that no record closes."""
    closed = "EXISTS (SELECT 1 FROM records AS c WHERE c.kind = ? AND c.key = r.key)"
    return list(reader.select(f"r.kind = ? AND NOT {closed}", (entries.GROUP, entries.CLOSED)))
