"""The journal's index: one SQLite row per record, with the position and the checksum of its bytes.

A cache of the segments, which are the truth. A start trusts an index that fits its segments, and scans only the bytes
behind its rows; it removes any other index, and makes a new one by a scan of all segments (7 µs a record).
``IndexKeeper`` adds the rows of written commits; a failure of the index does not stop the journal:

    rows of commits -> waiting -> index, FLUSH_S or FLUSH_ROWS later: a transaction costs as much as dozens of rows
                    -> locked or full: wait longer; unusable, removed, or MOST_WAITING rows: made anew by a scan

Readers scan the records that the index lacks. Rows are numbered in submission order.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
import xxhash

from services.orchestrator.journal.segments import (
    COLLECTED,
    Damage,
    DamageReason,
    Place,
    Row,
    header_before,
    scan,
    sizes_in,
)

log = structlog.get_logger()

INDEX_FILE = "index.sqlite"  # in the journal's directory
IN_MEMORY = Path("")  # SQLite's temporary database: on disk beyond its cache size

# Exceptions of reading an index with changed bytes: values may be of any type, or missing.
UNUSABLE = (sqlite3.Error, TypeError, ValueError, OverflowError)

OPEN_S = 2.0  # for a lock of another process, at start
LOCK_S = 0.2  # the same, while records wait
RETRY_S = 1.0  # between attempts to write to a locked or full index
FLUSH_S = 0.25  # a row waits at most as long for others to share a transaction with
FLUSH_ROWS = 256  # and for at most as many
MOST_WAITING = 100_000  # rows, about 30 MB

_VERSION = 3  # of the schema, in user_version; another one is made anew
_SCHEMA = f"""
PRAGMA user_version = {_VERSION};
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
CREATE TABLE segments (
    kind        TEXT NOT NULL,
    segment     INTEGER NOT NULL,
    end         INTEGER NOT NULL, -- all bytes before this offset were read
    num_records INTEGER NOT NULL,
    digest      INTEGER NOT NULL, -- of the rows, by _digest
    last_number INTEGER NOT NULL, -- of the last record
    PRIMARY KEY (kind, segment)
);
CREATE TABLE damage (
    kind TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    reason TEXT NOT NULL, num_records INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL
);
CREATE TABLE given (number INTEGER NOT NULL); -- numbers of lost records, which are not given again
"""
_COLUMNS = "number, kind, key, segment, offset, length, checksum, written_at"
_DAMAGE = "kind, segment, offset, num_bytes, reason, num_records, number, key"
_MAX_KEYS = 500  # of one SELECT
_ROWS = 20_000  # of one transaction
_WAL_BYTES = 64 * 1024 * 1024  # with a larger -wal file the index adds no rows until a checkpoint has emptied that file
_LOW_BITS = 0xFFFFFFFF
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_LOGGED = 20  # damaged spans that are logged one by one


class Index:
    """Used by one thread at a time; readers open their own. All methods raise ``sqlite3.Error``."""

    def __init__(self, path: Path, *, timeout_s: float, read_only: bool = False) -> None:
        """``timeout_s``: maximum wait for a lock of another process."""
        # Statements and transactions are ours (isolation_level None); the connection moves from the opening thread to
        # the writer thread, never used by both at once.
        name = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path) if path.name else ""
        self._path = path
        self._db = sqlite3.connect(
            name, isolation_level=None, check_same_thread=False, timeout=timeout_s, uri=read_only
        )
        try:
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if version != _VERSION and (read_only or version):
                raise sqlite3.DatabaseError(f"the index has schema {version}, not {_VERSION}")
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                # A power cut may cost its last rows, and does not damage the database.
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES // 4}")
                if not version:
                    self._db.executescript(_SCHEMA)
        except BaseException:
            self._db.close()
            raise

    # --- writing -----------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row], ends: Mapping[Place, int], damage: Sequence[Damage] = ()) -> list[Damage]:
        """Add the records and the damage of segments up to their ``ends``, in one transaction.

        Returns ``damage`` and one entry more for every row with the number of another record.
        """
        told = list(damage)
        insert = f"INSERT OR IGNORE INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        with _Transaction(self._db):
            if self._db.executemany(insert, rows).rowcount < len(rows):
                kept = {row.number: row for row in self._by_number(row.number for row in rows)}
                # The first of two records with one number is kept.
                told += [
                    Damage(
                        kind=row.kind, segment=row.segment, offset=row.offset, num_bytes=row.length,
                        reason=DamageReason.REPEATED, num_records=1, number=row.number, key=row.key,
                    )
                    for row in rows
                    if kept[row.number] != row
                ]  # fmt: skip
                rows = [row for row in rows if kept[row.number] == row]
            new: dict[Place, list[Row]] = {place: [] for place in ends}
            for row in rows:
                new[row.kind, row.segment].append(row)
            self._db.executemany(
                "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (kind, segment) DO UPDATE SET "
                "end = excluded.end, num_records = num_records + excluded.num_records, "
                "digest = digest + excluded.digest, last_number = MAX(last_number, excluded.last_number)",
                [
                    (*place, ends[place], len(found), sum(map(_digest, found)), found[-1].number if found else 0)
                    for place, found in new.items()
                ],
            )
            self._note(told)
        return told

    def catch_up(self, directory: Path, *, torn_ends: bool = True) -> list[Damage]:
        """Add the records behind the indexed part of each segment, and remove those of deleted segments; returns new damage.
        Without ``torn_ends`` a torn end stays behind the indexed part: a write may be in progress."""
        known = {place: end for place, end, *_ in self.segments()}
        told: list[Damage] = []
        sizes = sizes_in(directory)
        for place in known.keys() - sizes.keys():
            self.forget(place)
        for place, size in sizes.items():
            if known.get(place) == size:
                continue
            rows: list[Row] = []
            damage: list[Damage] = []
            end = size
            for found in scan(directory, *place, start=known.get(place, 0), end=size):
                if isinstance(found, Row):
                    rows.append(found)
                elif torn_ends or found.reason is not DamageReason.TORN:
                    damage.append(found)
                else:
                    end = found.offset
                if len(rows) >= _ROWS:
                    told += self.add(rows, {place: rows[-1].offset + rows[-1].length}, damage)
                    rows, damage = [], []
            told += self.add(rows, {place: end}, damage)
        return told

    def note_lost(self, lost: Iterable[Damage], last_number: int) -> None:
        """Note bytes that are gone, and the highest number that a record ever had."""
        with _Transaction(self._db):
            self._note(lost)
            self._db.execute("INSERT INTO given VALUES (?)", (last_number,))

    def _note(self, damage: Iterable[Damage]) -> None:
        self._db.executemany(
            f"INSERT INTO damage ({_DAMAGE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(d.kind, d.segment, d.offset, d.num_bytes, d.reason, d.num_records, d.number, d.key) for d in damage],
        )

    def forget(self, place: Place, runs: Iterable[tuple[int, int]] | None = None) -> None:
        """Remove all rows of a segment. Known ``runs`` of its numbers save a scan of all records of the kind."""
        with _Transaction(self._db):
            if runs is None:
                self._db.execute("DELETE FROM records WHERE kind = ? AND segment = ?", place)
            for first, last in runs or ():
                self._db.execute(
                    "DELETE FROM records WHERE number BETWEEN ? AND ? AND +kind = ? AND +segment = ?",
                    (first, last, *place),
                )
            for table in ("segments", "damage"):
                self._db.execute(f"DELETE FROM {table} WHERE kind = ? AND segment = ?", place)

    # --- asking ------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        """Every record in order."""
        return self.select("1")

    def rows_of(self, kind: str, key: str | None = None) -> Iterator[Row]:
        """Every record of a kind in order; with a key, only its records."""
        return (
            self.select("r.kind = ?", (kind,)) if key is None else self.select("r.kind = ? AND r.key = ?", (kind, key))
        )

    def select(self, condition: str, values: Sequence[str | int] = (), order: str = "r.number") -> Iterator[Row]:
        """Rows for which an SQL condition on ``records AS r`` holds, in order."""
        columns = ", ".join(f"r.{name.strip()}" for name in _COLUMNS.split(","))
        query = f"SELECT {columns} FROM records AS r WHERE {condition} ORDER BY {order}"
        yield from map(Row._make, self._db.execute(query, values))

    def last_rows(self, kind: str) -> Iterator[Row]:
        """Every record of a kind, the newest first."""
        return self.select("r.kind = ?", (kind,), "r.number DESC")

    def find(self, kind: str, keys: Iterable[str]) -> list[Row]:
        """Every record of these keys, in order."""
        found: list[Row] = []
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), _MAX_KEYS):
            part = wanted[start : start + _MAX_KEYS]
            found += self.select(f"r.kind = ? AND r.key IN ({','.join('?' * len(part))})", (kind, *part))
        return sorted(found)

    def _by_number(self, numbers: Iterable[int]) -> Iterator[Row]:
        wanted = list(numbers)
        for start in range(0, len(wanted), _MAX_KEYS):
            part = wanted[start : start + _MAX_KEYS]
            yield from self.select(f"r.number IN ({','.join('?' * len(part))})", part)

    def segments(self) -> list[tuple[Place, int, int, int]]:
        """(kind and segment, end, number of records, number of the last record) of every segment."""
        query = "SELECT kind, segment, end, num_records, last_number FROM segments"
        return [((kind, segment), *rest) for kind, segment, *rest in self._db.execute(query)]

    def damage(self) -> list[Damage]:
        """Every damaged span."""
        query = f"SELECT {_DAMAGE} FROM damage ORDER BY segment, kind, offset"
        names = [name.strip() for name in _DAMAGE.split(",")]
        found = [dict(zip(names, values, strict=True)) for values in self._db.execute(query)]
        return [Damage(**{**span, "reason": DamageReason(span["reason"])}) for span in found]

    def collected(self) -> set[Place]:
        """Segments that retention deleted."""
        return {place_of(row) for row in self.rows_of(COLLECTED)}

    def gaps(self) -> Iterator[tuple[int, int]]:
        """First and last number of every missing run, up to the highest number."""
        before = 0
        for (number,) in self._db.execute("SELECT number FROM records ORDER BY number"):
            if number > before + 1:
                yield before + 1, number - 1
            before = number
        if self.last_number() > before:
            yield before + 1, self.last_number()

    def last_number(self) -> int:
        """The highest number of a record, including lost ones."""
        tables = ("records", "damage", "given")
        found = (self._db.execute(f"SELECT COALESCE(MAX(number), 0) FROM {table}").fetchone() for table in tables)
        return max(int(number) for (number,) in found)

    def changes(self) -> int:
        """A number that changes whenever another connection changes the file."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # --- comparing with the segments ---------------------------------------------------------------------------------

    def unfit(self, directory: Path) -> str:
        """The contradiction between the index and the segments; empty where the index fits. Looks at the size and at one
        header of each segment."""
        known = self.segments()  # before the sizes: a record in progress appears in its segment first
        damaged = {(d.kind, d.segment) for d in self.damage()}
        last = {row.number: row for row in self._by_number(number for *_, number in known if number)}
        collected = self.collected()
        sizes = sizes_in(directory)
        for place, end, num_records, number in known:
            name = f"{place[0]}-{place[1]:06d}"
            size = sizes.get(place)
            if size is None:
                if place not in collected:
                    return f"{name} is gone"
            elif size < end:
                return f"{name} has {size} bytes, not {end}"
            elif size > end and place in damaged:
                return f"{name} has changed, and had damage"
            elif num_records and not (number in last and is_in_place(directory, last[number])):
                return f"the last record of {name} is not at its place"
        back = damaged & (sizes.keys() - {place for place, *_ in known})
        return f"{min(back)} was lost, and is there again" if back else ""

    def lost(self, directory: Path) -> list[Damage]:
        """Bytes of indexed segments that are gone, those noted earlier included."""
        sizes = sizes_in(directory)
        found = [
            d for d in self.damage() if d.reason is DamageReason.LOST and sizes.get((d.kind, d.segment), 0) <= d.offset
        ]
        collected = self.collected()
        for place, end, *_ in self.segments():
            size = sizes.get(place, 0)
            if size >= end or (place not in sizes and place in collected):
                continue
            query = "SELECT COUNT(*) FROM records WHERE kind = ? AND segment = ? AND offset + length > ?"
            count = self._db.execute(query, (*place, size)).fetchone()[0]
            found.append(
                Damage(
                    kind=place[0],
                    segment=place[1],
                    offset=size,
                    num_bytes=end - size,
                    reason=DamageReason.LOST,
                    num_records=count,
                )
            )
        return found

    def is_consistent(self) -> bool:
        """Whether the rows match the digests of the segments, and the keys the rows; takes 2 seconds per million.

        SQLite has no checksums of its own: a changed byte, or a file and its -wal of different times, are read as they
        are.
        """
        count = digest = 0
        for row in self.rows():
            count += 1
            digest += _digest(row)
        totals = self._db.execute("SELECT COALESCE(SUM(num_records), 0), COALESCE(SUM(digest), 0) FROM segments")
        problems: str = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return totals.fetchone() == (count, digest) and problems == "ok"

    # --- the file ----------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """False while the -wal file is too long, because readers hold its begin."""
        if not self._path.name:
            return True
        wal = self._path.with_name(self._path.name + "-wal")
        if not wal.exists() or wal.stat().st_size < _WAL_BYTES:
            return True
        return not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def set_timeout(self, timeout_s: float) -> None:
        """Set the maximum wait for a lock of another process."""
        self._db.execute(f"PRAGMA busy_timeout = {int(1000 * timeout_s)}")

    def close(self) -> None:
        self._db.close()


def remove_index(path: Path) -> None:
    """Delete the index's files; the segments have all its contents."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def place_of(collected: Row) -> Place:
    """The segment that a record of kind ``collected`` names."""
    kind, _, segment = collected.key.rpartition("/")
    return kind, int(segment) if segment.isdecimal() else 0


def is_in_place(directory: Path, row: Row) -> bool:
    """Whether the record's header is where the row says."""
    header = header_before(directory, row.kind, row.segment, row.offset, row.key)
    return header is not None and (header.number, header.checksum) == (row.number, row.checksum)


def log_damage(damage: list[Damage], directory: Path) -> None:
    """Log each span, and their sum."""
    for span in damage[:_LOGGED]:
        log.error("journal.damaged", span=str(span), directory=str(directory), effect="its bytes stay where they are")
    if damage:
        log.error("journal.damage", spans=len(damage), num_bytes=sum(span.num_bytes for span in damage))


class IndexKeeper:
    """Keeps the index in step with the segments. Opened by one thread, then used by the writer thread only."""

    def __init__(self, directory: Path) -> None:
        """Raises ``OSError``, and ``CorruptDataError`` for records of a later format."""
        self._directory = directory
        self._path = directory / INDEX_FILE
        self._rows: list[Row] = []  # written, and not in the index yet
        self._ends: dict[Place, int] = {}  # of the segments that have them
        self._due_at = 0.0  # time of the next attempt to add them
        self._delayed = ""  # reason for which rows wait longer than usual
        self.found: list[Damage] = []  # that no earlier start reported
        lost: list[Damage] = []
        told: list[Damage] = []
        last_number = 0
        try:
            self._index = Index(self._path, timeout_s=OPEN_S)
            try:
                if not self._index.is_consistent():
                    raise sqlite3.DatabaseError("the index is damaged: its rows differ from the written ones")
                if reason := self._index.unfit(directory):
                    lost, told = self._index.lost(directory), self._index.damage()
                    last_number = self._index.last_number()
                    raise sqlite3.DatabaseError(reason)
                self.found = self._index.catch_up(directory)
                self._index.set_timeout(LOCK_S)
            except BaseException:
                self._index.close()
                raise
        except UNUSABLE as error:
            self._make_anew(str(error))
            if last_number:
                self._index.note_lost(lost, last_number)
            self.found = [span for span in self._index.damage() if span not in told]
        self._inode = _inode(self._path)

    def last_number(self) -> int:
        """The highest number of a record."""
        return self._index.last_number()

    def add(self, rows: Sequence[Row], ends: Mapping[Place, int]) -> None:
        """Take the written rows; they are in the index soon. ``ends`` are the ends of all open segments."""
        if not self._rows:
            self._due_at = time.monotonic() + FLUSH_S
        self._rows += rows
        for row in rows:
            self._ends[row.kind, row.segment] = ends[row.kind, row.segment]
        if self.due_in_s == 0.0 or (len(self._rows) >= FLUSH_ROWS and not self._delayed):
            self.flush()

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the waiting rows are due; None without waiting rows."""
        return max(0.0, self._due_at - time.monotonic()) if self._rows else None

    def flush(self) -> None:
        """Add all waiting rows to the index, or keep them for a later attempt."""
        if not self._rows:
            return
        self._due_at = time.monotonic() + RETRY_S
        try:
            if _inode(self._path) != self._inode:
                raise sqlite3.DatabaseError("the index was removed or replaced")
            if not self._index.has_room():
                raise _NoRoomError("readers keep the index's -wal file from being emptied")
            self._index.add(self._rows, self._ends)
        except UNUSABLE as error:
            self._failed(error)
        else:
            self._rows, self._ends, self._delayed = [], {}, ""

    def forget(self, place: Place, runs: Sequence[tuple[int, int]]) -> None:
        """Remove the rows of a deleted segment with these runs of numbers; the journal has a record of the deletion."""
        self.flush()
        try:
            self._index.forget(place, runs)
        except UNUSABLE as error:  # where that is a lock, the next start removes the rows
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Wait after a lock or a full disk; otherwise the file is unusable."""
        passes = isinstance(error, _NoRoomError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING
        if not passes or len(self._rows) >= MOST_WAITING:
            self._index.close()
            self._make_anew(str(error))
            return
        if not self._delayed:
            log.warning(
                "journal.index_behind", reason=str(error), effect="records are written; the index gets their rows later"
            )
        self._delayed = str(error)

    def _make_anew(self, reason: str) -> None:
        """Scan all segments."""
        log.warning("journal.index_made_anew", directory=str(self._directory), reason=reason)
        self._rows, self._ends, self._delayed = [], {}, ""
        try:
            remove_index(self._path)
            self._index = Index(self._path, timeout_s=LOCK_S)
            self._index.catch_up(self._directory)
        except (sqlite3.Error, OSError) as error:  # readers scan the segments themselves
            log.error("journal.index_not_writable", directory=str(self._directory), reason=str(error))
            self._index = Index(IN_MEMORY, timeout_s=LOCK_S)
            self._index.catch_up(self._directory)
        self._inode = _inode(self._path)

    def close(self) -> None:
        self.flush()
        self._index.close()


class _NoRoomError(sqlite3.OperationalError):
    """The -wal file is too long."""


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def _digest(row: Row) -> int:
    number, kind, key, segment, offset, length, checksum, _ = row
    text = f"{number}|{kind}|{key}|{segment}|{offset}|{length}|{checksum}"
    return xxhash.xxh3_64_intdigest(text.encode()) & _LOW_BITS


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
