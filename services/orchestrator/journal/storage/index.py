"""The journal's index: one SQLite row per record, with the position and the hash of its bytes.

A cache of the segments, which are the truth: rows are added from them later when the index lacks records or cannot be
written (another process has locked the file, the disk is full). Rows are numbered in submission order.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from services.orchestrator.journal.storage.scan import Damage, DamageReason
from services.orchestrator.journal.storage.segments import COLLECTED, Place, Row

INDEX_FILE = "index.sqlite"  # in the journal's directory
IN_MEMORY = Path("")  # SQLite's temporary database: on disk beyond its cache size

# Exceptions of reading an index with changed bytes: values may be of any type, or missing.
UNUSABLE = (sqlite3.Error, TypeError, ValueError, OverflowError)

_VERSION = 2  # of the schema, in user_version; another one is made anew
_SCHEMA = f"""
PRAGMA user_version = {_VERSION};
CREATE TABLE IF NOT EXISTS records (
    number   INTEGER PRIMARY KEY,
    kind     TEXT NOT NULL,
    key      TEXT NOT NULL,
    segment  INTEGER NOT NULL,
    offset   INTEGER NOT NULL,
    length   INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    written_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_key ON records (kind, key);
CREATE TABLE IF NOT EXISTS segments (
    kind        TEXT NOT NULL,
    segment     INTEGER NOT NULL,
    end         INTEGER NOT NULL,
    num_records INTEGER NOT NULL,
    digest      INTEGER NOT NULL,
    key_digest  INTEGER NOT NULL,
    last_number INTEGER NOT NULL,
    last_offset INTEGER NOT NULL,
    last_key    TEXT NOT NULL,
    last_checksum INTEGER NOT NULL,
    PRIMARY KEY (kind, segment)
);
CREATE TABLE IF NOT EXISTS damage (
    kind TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    reason TEXT NOT NULL, num_records INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS highest (number INTEGER NOT NULL);
"""
_COLUMNS = "number, kind, key, segment, offset, length, checksum, written_at"
_DAMAGE = "kind, segment, offset, num_bytes, reason, num_records, number, key"
_MAX_KEYS = 500  # of one SELECT
_WAL_BYTES = 64 * 1024 * 1024  # with a larger -wal file the index adds no rows until a checkpoint has emptied that file
_LOW_BITS = 0xFFFFFFFF


class Indexed(NamedTuple):
    """Indexed part of a segment, and its last record."""

    end: int  # all bytes before this offset were read
    num_records: int
    digest: int  # of the rows, by ``_digest``
    key_digest: int  # of their keys, by ``_key_digest``
    last_number: int
    last_offset: int
    last_key: str
    last_checksum: int


NOTHING = Indexed(0, 0, 0, 0, 0, 0, "", 0)


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
            if read_only:
                if self._version() != _VERSION:
                    raise sqlite3.DatabaseError(f"the index has schema {self._version()}, not {_VERSION}")
            else:
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        # A power cut may cost its last rows, and does not damage the database.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES // 4}")
        if self._version() not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"the index has schema {self._version()}, not {_VERSION}")
        if self._version() == 0:
            self._db.executescript(_SCHEMA)

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(self, place: Place, rows: Sequence[Row], end: int, damage: Sequence[Damage] = ()) -> list[Damage]:
        """Add the findings of a segment up to ``end`` in one transaction.

        Returns ``damage`` and one entry more for every row with the number of another record.
        """
        with _Transaction(self._db):
            return self._add(place, rows, end, damage)

    def add_all(self, rows: Sequence[Row], ends: dict[Place, int]) -> None:
        """Add written rows of any segments in one transaction."""
        with _Transaction(self._db):
            for place, end in ends.items():
                self._add(place, [row for row in rows if (row.kind, row.segment) == place], end, ())

    def _add(self, place: Place, rows: Sequence[Row], end: int, damage: Sequence[Damage]) -> list[Damage]:
        told = list(damage)
        insert = f"INSERT INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self._db.execute("SAVEPOINT rows")
        try:
            self._db.executemany(insert, rows)
        except sqlite3.IntegrityError:
            self._db.execute("ROLLBACK TO rows")
            new = []
            for row in rows:
                taken = self._db.execute("SELECT 1 FROM records WHERE number = ?", (row.number,)).fetchone()
                if taken:
                    told.append(_repeated(row))
                else:
                    self._db.execute(insert, row)
                    new.append(row)
            rows = new
        self._db.execute("RELEASE rows")
        known = self.segments(*place).get(place, NOTHING)
        last = rows[-1] if rows else None
        self._db.execute(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *place, end, known.num_records + len(rows), known.digest + sum(map(_digest, rows)),
                known.key_digest + sum(map(_key_digest, rows)),
                *(known[4:] if last is None else (last.number, last.offset, last.key, last.checksum)),
            ),
        )  # fmt: skip
        self._note_damage(told)
        self._raise_highest(max((*(row.number for row in rows), *(span.number for span in told)), default=0))
        return told

    def _note_damage(self, damage: Iterable[Damage]) -> None:
        self._db.executemany(
            f"INSERT INTO damage ({_DAMAGE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(d.kind, d.segment, d.offset, d.num_bytes, d.reason, d.num_records, d.number, d.key) for d in damage],
        )

    def _raise_highest(self, number: int) -> None:
        if number > self.last_number():
            self._db.execute("DELETE FROM highest")
            self._db.execute("INSERT INTO highest VALUES (?)", (number,))

    # --- removing ----------------------------------------------------------------------------------------------------

    def forget(
        self, kind: str, segment: int, damage: Sequence[Damage] = (), runs: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Remove all rows of a segment, and note ``damage`` instead. Known ``runs`` of its numbers save a scan of all
        records of the kind."""
        where = "kind = ? AND segment = ?"
        with _Transaction(self._db):
            if runs is None:
                self._db.execute(f"DELETE FROM records WHERE {where}", (kind, segment))
            for first, last in runs or ():
                self._db.execute(
                    f"DELETE FROM records WHERE number BETWEEN ? AND ? AND +{where}", (first, last, kind, segment)
                )
            for table in ("segments", "damage"):
                self._db.execute(f"DELETE FROM {table} WHERE {where}", (kind, segment))
            self._note_damage(damage)

    def rewrite(self, place: Place, rows: Sequence[Row], end: int, rename: Callable[[], None]) -> None:
        """Replace a segment's rows while ``rename`` replaces its file: all of the old rows remain, or all of the new."""
        with _Transaction(self._db):
            for table in ("records", "segments", "damage"):
                self._db.execute(f"DELETE FROM {table} WHERE kind = ? AND segment = ?", place)
            rename()
            self._add(place, rows, end, ())

    # --- asking ------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        """Every record in order."""
        yield from map(Row._make, self._db.execute(f"SELECT {_COLUMNS} FROM records ORDER BY number"))

    def rows_of(self, kind: str, key: str | None = None) -> Iterator[Row]:
        """Every record of a kind in order; with a key, only its records."""
        where, values = ("kind = ?", (kind,)) if key is None else ("kind = ? AND key = ?", (kind, key))
        query = f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY number"
        yield from map(Row._make, self._db.execute(query, values))

    def select(self, condition: str, values: Sequence[str | int] = ()) -> Iterator[Row]:
        """Rows for which an SQL condition on ``records AS r`` holds, in order."""
        columns = ", ".join(f"r.{name.strip()}" for name in _COLUMNS.split(","))
        query = f"SELECT {columns} FROM records AS r WHERE {condition} ORDER BY r.number"
        yield from map(Row._make, self._db.execute(query, values))

    def last_rows(self, kind: str) -> Iterator[Row]:
        """Every record of a kind, the newest first."""
        query = f"SELECT {_COLUMNS} FROM records WHERE kind = ? ORDER BY number DESC"
        yield from map(Row._make, self._db.execute(query, (kind,)))

    def find(self, kind: str, keys: Iterable[str]) -> list[Row]:
        """Every record of these keys, in order."""
        found: list[Row] = []
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), _MAX_KEYS):
            part = wanted[start : start + _MAX_KEYS]
            marks = ",".join("?" * len(part))
            query = f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND key IN ({marks})"
            found += map(Row._make, self._db.execute(query, (kind, *part)))
        return sorted(found)

    def segments(self, kind: str | None = None, segment: int | None = None) -> dict[Place, Indexed]:
        """Facts of every segment, or of one."""
        where, values = ("", ()) if kind is None else (" WHERE kind = ? AND segment = ?", (kind, segment))
        found = self._db.execute(f"SELECT * FROM segments{where}", values)
        return {(kind, segment): Indexed(*rest) for kind, segment, *rest in found}

    def damage(self) -> list[Damage]:
        """Every damaged span."""
        return [
            Damage(
                kind=kind, segment=segment, offset=offset, num_bytes=num_bytes, reason=DamageReason(reason),
                num_records=num_records, number=number, key=key,
            )
            for kind, segment, offset, num_bytes, reason, num_records, number, key in self._db.execute(
                f"SELECT {_DAMAGE} FROM damage ORDER BY segment, kind, offset"
            )
        ]  # fmt: skip

    def collected(self) -> set[Place]:
        """Segments that retention deleted."""
        names = (row.key.rpartition("/") for row in self.rows_of(COLLECTED))
        return {(kind, int(segment)) for kind, _, segment in names if segment.isdecimal()}

    def gaps(self) -> Iterator[tuple[int, int]]:
        """First and last number of every missing run, up to the highest number."""
        before = 0
        for (number,) in self._db.execute("SELECT number FROM records ORDER BY number"):
            if number > before + 1:
                yield before + 1, number - 1
            before = number
        if self.last_number() > before:
            yield before + 1, self.last_number()

    def num_records(self) -> int:
        return int(self._db.execute("SELECT COALESCE(SUM(num_records), 0) FROM segments").fetchone()[0])

    def last_number(self) -> int:
        """The highest number of a record, including lost ones."""
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM highest").fetchone()[0])

    def is_consistent(self) -> bool:
        """Whether rows and keys match the digests of the segments; takes 2 seconds per million.

        SQLite has no checksums of its own: a changed byte, or a file and its -wal of different times, are read as they
        are.
        """
        found = self._db.execute("SELECT SUM(num_records), SUM(digest), SUM(key_digest) FROM segments").fetchone()
        row = (
            "number || '|' || kind || '|' || key || '|' || segment || '|' || offset || '|' || length || '|' || checksum"
        )
        count, digest = _count_and_sum(self._db.execute(f"SELECT CAST({row} AS BLOB) FROM records"))
        keys = self._db.execute(
            "SELECT CAST(number || '|' || kind || '|' || key AS BLOB) FROM records INDEXED BY records_by_key WHERE kind >= ''"
        )
        return (count, digest, _count_and_sum(keys)[1]) == tuple(value or 0 for value in found)

    def changes(self) -> int:
        """A number that changes whenever another connection changes the file."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # --- the file ----------------------------------------------------------------------------------------------------

    def copy_from(self, other: Index) -> None:
        other._db.backup(self._db)

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


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
                return
            except sqlite3.Error:
                self._rollback()
                raise
        self._rollback()

    def _rollback(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


def _count_and_sum(texts: Iterable[tuple[bytes]]) -> tuple[int, int]:
    count = total = 0
    for (text,) in texts:
        count += 1
        total += xxhash.xxh3_64_intdigest(text) & _LOW_BITS
    return count, total


def _digest(row: Row) -> int:
    number, kind, key, segment, offset, length, checksum, _ = row
    return (
        xxhash.xxh3_64_intdigest(f"{number}|{kind}|{key}|{segment}|{offset}|{length}|{checksum}".encode()) & _LOW_BITS
    )


def _key_digest(row: Row) -> int:
    return xxhash.xxh3_64_intdigest(f"{row.number}|{row.kind}|{row.key}".encode()) & _LOW_BITS


def _repeated(row: Row) -> Damage:
    return Damage(
        kind=row.kind, segment=row.segment, offset=row.offset, num_bytes=row.length, reason=DamageReason.REPEATED,
        num_records=1, number=row.number, key=row.key,
    )  # fmt: skip
