"""Keeps the index in step with the segments: at the start, and during writes.

``synchronise`` adds missing records, sets lost ones aside, and rejects differing entries. It trusts the indexed part of a
segment when its file is long enough and the header of the last indexed record is at its indexed position. The journal's
own records tell deleted segments from lost ones.

``IndexKeeper`` adds the rows of written commits; a failure of the index does not stop the journal:

    rows of commits -> pending -> index, FLUSH_S or FLUSH_ROWS later
                    -> index locked, full or removed: behind -> retry each RETRY_S: scan of the segments

A transaction costs as much as dozens of rows, so several commits share one. Readers scan records that the index lacks.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog

from services.common.errors import CorruptDataError
from services.orchestrator.journal.storage.index import IN_MEMORY, INDEX_FILE, UNUSABLE, Index, Indexed, remove_index
from services.orchestrator.journal.storage.scan import Damage, DamageReason, header_before, scan
from services.orchestrator.journal.storage.segments import COLLECTED, Place, Row, Unpacker, segment_path, sizes_in

log = structlog.get_logger()

_ROWS = 20_000  # of one transaction
_LOGGED = 20  # damaged spans that are logged one by one

OPEN_S = 2.0  # for a lock of another process, at start
LOCK_S = 0.2  # the same, while records wait
RETRY_S = 1.0  # between attempts to catch up
FLUSH_S = 0.25  # a row waits at most as long for others to share a transaction with
FLUSH_ROWS = 256  # and for at most as many

_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between the index and the segments."""

    sizes: dict[Place, int]  # of all segments
    known: dict[Place, Indexed]
    missing: list[Place]  # indexed, and no file
    replaced: list[Place]  # the file is not the one that was indexed
    shortened: list[Place]  # indexed up to behind the file's end
    behind: list[Place]  # the file has bytes after the indexed ones


def compare(directory: Path, index: Index, ends: Mapping[Place, int] | None = None) -> Comparison:
    """Compare file sizes and one header per segment. ``ends``: own ends of the open segments."""
    known = index.segments()  # before the sizes: a record in progress appears in its segment first
    damaged = {(d.kind, d.segment) for d in index.damage()}
    sizes = {place: min(size, (ends or {}).get(place, size)) for place, size in sizes_in(directory).items()}
    found = Comparison(sizes, known, [place for place in known if place not in sizes], [], [], [])
    for place, size in sizes.items():
        before = known.get(place)
        if before is None:
            (found.replaced if place in damaged else found.behind).append(place)
        elif size < before.end:
            found.shortened.append(place)
        elif not _is_same(directory, place, before) or (size > before.end and place in damaged):
            found.replaced.append(place)
        elif size > before.end:
            found.behind.append(place)
    return found


def synchronise(directory: Path, index: Index, ends: Mapping[Place, int] | None = None) -> list[Damage]:
    """Update the index from the segments; returns the new damage.

    Raises ``sqlite3.Error``, ``OSError``, and ``CorruptDataError`` for records of a later format.
    """
    found = compare(directory, index, ends)
    told: list[Damage] = []
    before_cut = {place: _numbers(index, place) for place in found.shortened}
    for place in (*found.replaced, *found.shortened):
        index.forget(*place)
    for place in found.sizes:  # in their order: of two records with one number the first is kept
        if place in found.replaced or place in found.shortened or place in found.behind:
            told += _scan_into(directory, index, place, found.sizes[place])
    for place, numbers in before_cut.items():
        rewritten = _left_out(directory, index, place)
        gone = {number for number in numbers - _numbers(index, place) if not _is_in(number, rewritten)}
        if gone or not rewritten:
            told += _note_lost(index, place, found.known[place].end, found.sizes[place], len(gone))
    for place, before in ((place, found.known[place]) for place in found.missing):
        lost = [] if place in index.collected() else [_lost(place, before)]
        index.forget(*place, lost)
        told += lost
    return told


def log_damage(damage: list[Damage], directory: Path) -> None:
    """Log each span, and their sum."""
    for span in damage[:_LOGGED]:
        log.error("journal.damaged", span=str(span), directory=str(directory), effect="its bytes stay where they are")
    if damage:
        log.error("journal.damage", spans=len(damage), num_bytes=sum(span.num_bytes for span in damage))


def _scan_into(directory: Path, index: Index, place: Place, size: int) -> list[Damage]:
    told: list[Damage] = []
    rows: list[Row] = []
    damage: list[Damage] = []
    before = index.segments(*place).get(place)
    for found in scan(directory, *place, start=0 if before is None else before.end, end=size):
        if isinstance(found, Damage):
            damage.append(found)
            continue
        rows.append(found)
        if len(rows) >= _ROWS:
            told += index.add(place, rows, found.offset + found.length, damage)
            rows, damage = [], []
    return told + index.add(place, rows, size, damage)


def _is_same(directory: Path, place: Place, before: Indexed) -> bool:
    if not before.num_records:
        return True
    header = header_before(directory, *place, before.last_offset, before.last_key)
    return header is not None and (header.number, header.key, header.checksum) == (
        before.last_number, before.last_key, before.last_checksum
    )  # fmt: skip


def _numbers(index: Index, place: Place) -> set[int]:
    return {row.number for row in index.select("r.kind = ? AND r.segment = ?", place)}


def _left_out(directory: Path, index: Index, place: Place) -> list[tuple[int, int]]:
    """Runs of record numbers that compaction left out of a segment, from its readable records."""
    runs: list[tuple[int, int]] = []
    for row in index.rows_of(COLLECTED, f"{place[0]}/{place[1]}/part"):
        try:
            with segment_path(directory, COLLECTED, row.segment).open("rb", buffering=0) as file:
                line = Unpacker().unpack(os.pread(file.fileno(), row.length, row.offset))
            runs += [(int(first), int(last)) for first, last in orjson.loads(line)["numbers"]]
        except (OSError, CorruptDataError, KeyError, TypeError, ValueError):
            continue
    return runs


def _is_in(number: int, runs: list[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in runs)


def _note_lost(index: Index, place: Place, before: int, size: int, num_records: int) -> list[Damage]:
    """Lost bytes after the end of a segment, which was at ``before``."""
    lost = Damage(
        kind=place[0], segment=place[1], offset=size, num_bytes=before - size, reason=DamageReason.LOST,
        num_records=num_records,
    )  # fmt: skip
    return index.add(place, (), index.segments(*place)[place].end, [lost])


def _lost(place: Place, before: Indexed) -> Damage:
    return Damage(
        kind=place[0], segment=place[1], offset=0, num_bytes=before.end, reason=DamageReason.LOST,
        num_records=before.num_records,
    )  # fmt: skip


class _IndexDiskFull(sqlite3.OperationalError):
    """The -wal file is too long."""


class IndexKeeper:
    """Opened by one thread, then used by the writer thread only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / INDEX_FILE
        self.found: list[Damage] = []  # that was not known before this start
        self._index = self._open()
        self._inode = _inode(self._path)
        self.behind = ""  # reason for which the index lacks records; empty when complete
        self._tried_at = 0.0
        self._rows: list[Row] = []  # written, and not in the index yet
        self._ends: dict[Place, int] = {}  # of the segments that have them
        self._pending_since = 0.0

    def last_number(self) -> int:
        """The highest number of a record."""
        return self._index.last_number()

    def add(self, rows: Sequence[Row], ends: Mapping[Place, int]) -> None:
        """Take the written rows; they are in the index soon. ``ends`` are the ends of all open segments."""
        now = time.monotonic()
        if self.behind:
            if now - self._tried_at >= RETRY_S:
                self._catch_up(ends)
            return
        if not self._rows:
            self._pending_since = now
        self._rows += rows
        for row in rows:
            self._ends[row.kind, row.segment] = ends[row.kind, row.segment]
        if len(self._rows) >= FLUSH_ROWS or self.due_in_s == 0.0:
            self.flush()

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the waiting rows are due; None without waiting rows."""
        return max(0.0, self._pending_since + FLUSH_S - time.monotonic()) if self._rows else None

    def flush(self) -> None:
        """Add all waiting rows to the index."""
        if not self._rows:
            return
        rows, ends = self._rows, self._ends
        self._rows, self._ends = [], {}
        try:
            if time.monotonic() - self._tried_at >= RETRY_S:
                self._tried_at = time.monotonic()
                self._check_file()
            self._index.add_all(rows, ends)
        except UNUSABLE as error:
            self._fall_behind(error)

    def _catch_up(self, ends: Mapping[Place, int]) -> None:
        try:
            self._tried_at = time.monotonic()
            self._check_file()
            log_damage(synchronise(self._directory, self._index, ends), self._directory)
            log.info("journal.index_caught_up", directory=str(self._directory))
            self.behind = ""
        except UNUSABLE as error:
            self._fall_behind(error)

    def _check_file(self) -> None:
        if _inode(self._path) != self._inode:
            raise sqlite3.DatabaseError("the index was removed or replaced")
        if not self._index.has_room():
            raise _IndexDiskFull("readers keep the index's -wal file from being emptied")

    def forget(self, kind: str, segment: int, runs: Sequence[tuple[int, int]]) -> None:
        """Remove the rows of a deleted segment with these runs of numbers; the journal has a record of the deletion."""
        self.flush()
        try:
            self._index.forget(kind, segment, runs=runs)
        except UNUSABLE as error:
            self._fall_behind(error)

    def replace(self, place: Place, rows: Sequence[Row], end: int, rename: Callable[[], None]) -> bool:
        """Let ``rename`` replace a closed segment with a file that has these rows. False, without any change, while the
        index cannot be written."""
        self.flush()
        if self.behind:
            return False
        renamed = False

        def take_place() -> None:
            nonlocal renamed
            rename()
            renamed = True

        try:
            self._index.rewrite(place, rows, end, take_place)
        except sqlite3.Error as error:
            self._fall_behind(error)
        return renamed

    def close(self) -> None:
        self.flush()
        self._index.close()

    def _fall_behind(self, error: Exception) -> None:
        if not self.behind:
            log.warning(
                "journal.index_behind", reason=str(error), effect="records are written; the index catches up later"
            )
        self.behind = str(error)
        if not _may_pass(error):
            self._index.close()
            self._index = self._open_new(error)
            self._inode = _inode(self._path)
            self._tried_at = 0.0

    def _open(self) -> Index:
        try:
            return self._trusted()
        except UNUSABLE as error:
            index = self._open_new(error)
            self.found = synchronise(self._directory, index)
            return index

    def _trusted(self) -> Index:
        index = Index(self._path, timeout_s=OPEN_S)
        try:
            if not index.is_consistent():
                raise sqlite3.DatabaseError("the index is damaged: its rows differ from the written ones")
            self.found = synchronise(self._directory, index)
            index.set_timeout(LOCK_S)
        except BaseException:
            index.close()
            raise
        return index

    def _open_new(self, reason: Exception) -> Index:
        log.warning("journal.index_made_anew", directory=str(self._directory), reason=str(reason))
        try:
            remove_index(self._path)
            return Index(self._path, timeout_s=LOCK_S)
        except (sqlite3.Error, OSError) as error:  # readers scan the segments themselves
            log.error("journal.index_not_writable", directory=str(self._directory), reason=str(error))
            return Index(IN_MEMORY, timeout_s=LOCK_S)


def _may_pass(error: Exception) -> bool:
    """Whether a retry is enough: after a lock, or a full disk. Otherwise the file is unusable."""
    return isinstance(error, _IndexDiskFull) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
