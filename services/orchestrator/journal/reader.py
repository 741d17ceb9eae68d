"""Reads the journal: durable records by kind and key, checked against their checksums.

Trusts an index that fits the segments, and scans the records that it lacks. Without such an index, scans all segments
into an index of its own. Changes no file. Independent of the meaning of records.
"""

from __future__ import annotations

import heapq
import math
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import orjson
import structlog

from services.common.errors import CorruptDataError
from services.common.records import SetAsideReason
from services.common.telemetry.logs import LogEvent
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import SetAside
from services.orchestrator.journal.index import IN_MEMORY, INDEX_FILE, UNUSABLE, Index, is_in_place, place_of
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.segments import (
    COLLECTED,
    Damage,
    DamageReason,
    Place,
    Row,
    Unpacker,
    checksum_of,
    scan,
    segment_path,
    sizes_in,
)

log = structlog.get_logger()

T = TypeVar("T")

LOCK_S = 1.0  # for a lock of another process
MOST_LOGGED = 20  # set-aside records of one start; others are counted, and `rollmill journal RUN list` shows them

# Errors of parsing a record whose bytes are whole.
UNREADABLE = (CorruptDataError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)


class JournalReader:
    """Reads durable records, beside the writer or without one. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises ``CorruptDataError`` for a journal of a later release."""
        self._directory = directory
        self._unpacker = Unpacker()
        self._open_files: dict[str, tuple[int, int]] = {}  # kind -> segment and descriptor
        self._unreadable: dict[int, Damage] = {}  # by number, of records that could not be loaded
        self._tail: list[Row] = []  # behind the index, in order of numbers
        self._tail_ends: dict[Place, int] = {}
        self._tail_damage: dict[Place, list[Damage]] = {}
        self._ends: dict[Place, int] = {}  # of the indexed parts
        self._changes = -1  # of the index when ``_ends`` was read
        self._indexes: list[Index] = []  # the last one counts; others may still serve an iteration
        self._own = False  # whether that one was made by this reader
        try:
            self._indexes.append(Index(directory / INDEX_FILE, timeout_s=LOCK_S, read_only=True))
            self._check(self._index.unfit(directory))
        except UNUSABLE as error:
            self._scan(error)

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
            self._scan(error)
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
                    if self._own:
                        raise
                    self._scan(error)

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
        if line is None and reason is DamageReason.CHECKSUM and not is_in_place(self._directory, row):
            # The index has changed bytes, or the header is damaged, too.
            others = scan(self._directory, row.kind, row.segment)
            row = next((found for found in others if isinstance(found, Row) and found.number == row.number), row)
            line, reason = self._read(row)
        is_gone = reason is DamageReason.LOST and any(self.rows_of(COLLECTED, f"{row.kind}/{row.segment}"))
        if line is None and not is_gone:
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

    def _check(self, contradiction: str) -> None:
        if contradiction:
            raise sqlite3.DatabaseError(contradiction)

    def _scan(self, reason: Exception) -> None:
        """Make an index of all segments for this reader."""
        log.warning("journal.read_without_index", directory=str(self._directory), reason=str(reason))
        self._indexes.append(Index(IN_MEMORY, timeout_s=LOCK_S))
        self._index.catch_up(self._directory, torn_ends=False)
        self._own = True
        self._changes = -1
        self._tail, self._tail_ends, self._tail_damage = [], {}, {}

    def _refresh(self) -> None:
        """Find the records written since the last call."""
        try:
            self._scan_tails()
        except UNUSABLE as error:
            self._scan(error)
            self._scan_tails()

    def _scan_tails(self) -> None:
        changes = self._index.changes()
        if changes != self._changes:
            # Before the sizes: a record in progress appears in its segment first.
            self._ends = {place: end for place, end, *_ in self._index.segments()}
            self._changes = changes
            self._tail = [row for row in self._tail if row.offset >= self._ends.get((row.kind, row.segment), 0)]
        sizes = sizes_in(self._directory)
        new: list[Row] = []
        for place, size in sizes.items():
            end = self._ends.get(place, 0)
            self._check(f"{place[0]}-{place[1]:06d} has {size} bytes, not {end}" if size < end else "")
            start = max(end, self._tail_ends.get(place, 0))
            if size > start:
                new += self._scan_tail(place, start)
        if new:
            self._tail = sorted([*self._tail, *new])
        missing = self._ends.keys() - sizes.keys()
        if missing and not self._own:
            collected = self._index.collected() | {place_of(row) for row in self._tail if row.kind == COLLECTED}
            self._check(f"{min(missing - collected)} is gone" if missing - collected else "")

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


# --- records that are set aside --------------------------------------------------------------------------------------

_Identity = int | tuple[str, int, int]  # the record's number, else its kind, segment and offset


def _identity(number: int, kind: str, segment: int, offset: int) -> _Identity:
    return number or (kind, segment, offset)


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
                    noted = entries.set_aside_from_json(record)
                    found._known[_identity(noted.number, noted.kind, noted.segment, noted.offset)] = noted
            except (KeyError, TypeError, ValueError):
                log.warning("journal.unreadable", kind=row.kind, segment=row.segment, offset=row.offset)
        return found

    def __contains__(self, row: Row) -> bool:
        return _identity(row.number, row.kind, row.segment, row.offset) in self._known

    def __iter__(self) -> Iterator[SetAside]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def add(self, row: Row, reason: SetAsideReason, detail: str = "") -> None:
        """Set a record aside; a repetition has no effect."""
        identity = _identity(row.number, row.kind, row.segment, row.offset)
        if identity in self._known:
            return
        noted = SetAside(
            kind=row.kind, key=row.key, number=row.number, segment=row.segment, offset=row.offset, reason=reason,
            detail=detail,
        )  # fmt: skip
        self._known[identity] = self._new[identity] = noted

    def add_span(self, span: Damage) -> Row:
        """Set an unreadable span aside; returns its row, as far as the span names one."""
        row = Row(span.number, span.kind, span.key, span.segment, span.offset, 0, 0)
        self.add(row, SetAsideReason.DAMAGED, str(span))
        return row

    def is_new(self, row: Row) -> bool:
        """Whether this process set the record aside."""
        return _identity(row.number, row.kind, row.segment, row.offset) in self._new

    def write(self, journal: Journal) -> None:
        """Write the records set aside since the last call to the journal and the log."""
        for noted in list(self._new.values())[:MOST_LOGGED]:
            log.error(LogEvent.RECORD_SET_ASIDE, **entries.set_aside_to_json(noted))
        if self._new:
            log.error("journal.set_aside_in_all", records=len(self._new), see="rollmill journal RUN list --set-aside")
        for noted in self._new.values():
            record = entries.set_aside_to_json(noted)
            journal.submit(entries.SET_ASIDE, f"{noted.kind}/{noted.segment}/{noted.offset}", record.copy)
        self._new.clear()

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
    closed = f"EXISTS (SELECT 1 FROM records AS c WHERE c.kind = '{entries.CLOSED}' AND c.key = r.key)"
    rows = list(
        reader.select(f"r.kind = '{entries.GROUP}' AND NOT {closed}", (), lambda row: row.kind == entries.GROUP)
    )
    closed_since = {row.key for row in reader.find_all_rows(entries.CLOSED, [row.key for row in rows])}
    return [row for row in rows if row.key not in closed_since]


# --- retention -------------------------------------------------------------------------------------------------------


def collect(
    journal: Journal,
    oldest_checkpoint_steps: Mapping[str, int],
    live_groups: Collection[str],
    *,
    current: Mapping[str, int] | None = None,
) -> list[Place]:
    """Delete the closed segments of which the run can need no record, and return them. Blocking: call from a thread.

    Needed are trajectories of batches since the oldest kept checkpoint of their policy and of live task groups, and the
    newest state. All other kinds stay for ever: they are small, and metrics, fates and traces are made from them
    (docs/journal.md). A segment with damage stays.

    ``oldest_checkpoint_steps``: by policy, the oldest checkpoint that its trainer may start from. ``live_groups`` are task
    groups that are running or have sequences in a buffer; ``current`` are the open segments at a moment before the listing
    of these groups (default: now), so that later records stay.

    Raises ``OSError``, and ``InfrastructureError`` where the journal cannot delete a segment.
    """
    current = journal.current_segments() if current is None else current
    with closing(JournalReader(journal.directory)) as reader:
        stays = {(d.kind, d.segment) for d in reader.damage() if d.reason is not DamageReason.TORN}
        needed: dict[str, Iterable[Row]] = {entries.STATE: _newest(reader, entries.STATE)}
        trajectories = needed_trajectories(reader, oldest_checkpoint_steps, live_groups)
        if trajectories is not None:
            needed[entries.TRAJECTORY] = trajectories
        stays |= {(row.kind, row.segment) for rows in needed.values() for row in rows}
    removed = [
        place
        for place in sizes_in(journal.directory)
        if place[0] in needed and place[1] < current.get(place[0], 0) and place not in stays
    ]
    for kind, segment in removed:
        journal.remove_segments(kind, [segment])
    return removed


def needed_trajectories(
    reader: JournalReader, oldest_checkpoint_steps: Mapping[str, int], live_groups: Collection[str]
) -> list[Row] | None:
    """Rows of the needed trajectories: of batches after the oldest kept checkpoint, and of live task groups. None while one of these
    batches is unreadable: a failing disk may return the batch later."""
    keys: dict[str, None] = {}
    for row in reader.rows_of(entries.BATCH):
        policy, _, step = row.key.rpartition("/")
        if not step.isdecimal() or int(step) <= oldest_checkpoint_steps.get(policy, 0):
            continue
        try:
            batch = entries.batch_from_json(reader.load(row) or {})
            slots = [split_sequence_id(entry.sequence_id)[:2] for entry in batch.entries]
        except (CorruptDataError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("journal.nothing_collected", batch=row.key, reason=f"{type(error).__name__}: {error}")
            return None
        keys |= dict.fromkeys(entries.trajectory_key(group, index) for group, index in slots)
    rows = {row.number: row for row in reader.find_all_rows(entries.TRAJECTORY, keys)}
    for name in live_groups:
        rows |= {row.number: row for row in reader.rows_below(entries.TRAJECTORY, f"{name}/")}
    return list(rows.values())


def _newest(reader: JournalReader, kind: str) -> Iterator[Row]:
    """Rows of a kind from the newest back to the first readable one."""
    for row in reader.last_rows(kind):
        yield row
        if reader.load(row) is not None:
            return
