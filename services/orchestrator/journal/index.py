"""The journal's index: one SQLite row per durable record, saying where its bytes lie and what they must hash to.

A record exists exactly when its row is committed. Rows are numbered in the order in which records were submitted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

INDEX_FILE = "index.sqlite"  # in the journal's directory

Durability = Literal["process", "power"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    number   INTEGER PRIMARY KEY,
    kind     TEXT NOT NULL,
    key      TEXT NOT NULL,
    segment  INTEGER NOT NULL,
    offset   INTEGER NOT NULL,
    length   INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    written_at REAL NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS records_by_key ON records (kind, key);
"""
_COLUMNS = "number, kind, key, segment, offset, length, checksum, written_at"
_MAX_KEYS = 500  # of one SELECT
_LOCK_TIMEOUT_S = 10.0  # for whoever else has the file open


@dataclass(frozen=True, slots=True)
class Row:
    """Where one record lies."""

    number: int
    kind: str
    key: str
    segment: int
    offset: int
    length: int
    checksum: int  # of the line, by ``checksum_of``
    written_at: float = 0.0  # seconds since the epoch; 0 in a journal that lacks it


def checksum_of(line: bytes) -> int:
    """xxh3-64, moved into the signed integers that SQLite holds."""
    return xxhash.xxh3_64_intdigest(line) - (1 << 63)


class Index:
    """Used by one thread at a time; readers open their own."""

    def __init__(self, path: Path, durability: Durability) -> None:
        # Statements and transactions are ours (isolation_level None); the connection moves from the opening thread to
        # the writer thread, never used by both at once.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_LOCK_TIMEOUT_S)
        self._db.execute("PRAGMA journal_mode=WAL")
        # NORMAL survives kill -9; FULL also waits for the disk at every commit.
        self._db.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
        self._db.executescript(_SCHEMA)
        self._add_missing_column()

    def _add_missing_column(self) -> None:
        """A journal of an earlier release has rows without their time."""
        columns = {name for _, name, *_ in self._db.execute("PRAGMA table_info(records)")}
        if "written_at" not in columns:
            self._db.execute("ALTER TABLE records ADD COLUMN written_at REAL NOT NULL DEFAULT 0")

    def append(self, rows: Sequence[Row]) -> None:
        """All rows, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(
                f"INSERT INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(r.number, r.kind, r.key, r.segment, r.offset, r.length, r.checksum, r.written_at) for r in rows],
            )
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def rows(self) -> Iterator[Row]:
        """Every record in order."""
        for values in self._db.execute(f"SELECT {_COLUMNS} FROM records ORDER BY number"):
            yield Row(*values)

    def rows_of(self, kind: str, key: str | None = None) -> Iterator[Row]:
        """Every record of a kind in order; of one key where that is named."""
        where, values = ("kind = ?", (kind,)) if key is None else ("kind = ? AND key = ?", (kind, key))
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY number", values):
            yield Row(*row)

    def select(self, condition: str, values: Sequence[str | int] = ()) -> Iterator[Row]:
        """Rows for which an SQL condition on ``records AS r`` holds, in order."""
        columns = ", ".join(f"r.{name.strip()}" for name in _COLUMNS.split(","))
        query = f"SELECT {columns} FROM records AS r WHERE {condition} ORDER BY r.number"
        for row in self._db.execute(query, values):
            yield Row(*row)

    def last_rows(self, kind: str) -> Iterator[Row]:
        """Every record of a kind, the newest first."""
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM records WHERE kind = ? ORDER BY number DESC", (kind,)):
            yield Row(*row)

    def find(self, kind: str, keys: Iterable[str]) -> list[Row]:
        """Every record of these keys, in order."""
        found: list[Row] = []
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), _MAX_KEYS):
            part = wanted[start : start + _MAX_KEYS]
            marks = ",".join("?" * len(part))
            query = f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND key IN ({marks})"
            found += [Row(*values) for values in self._db.execute(query, (kind, *part))]
        return sorted(found, key=lambda row: row.number)

    def last_number(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM records").fetchone()[0])

    def ends(self) -> dict[tuple[str, int], int]:
        """Where the last durable record of each (kind, segment) ends."""
        query = "SELECT kind, segment, MAX(offset + length) FROM records GROUP BY kind, segment"
        return {(kind, segment): end for kind, segment, end in self._db.execute(query)}

    def forget(self, kind: str, segment: int) -> None:
        """Remove the rows of a segment that is about to be deleted."""
        self._db.execute("DELETE FROM records WHERE kind = ? AND segment = ?", (kind, segment))

    def close(self) -> None:
        self._db.close()
