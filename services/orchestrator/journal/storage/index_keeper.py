"""Keeps the index in step with the segments during writes. A failure of the index does not stop the journal.

rows of commits -> pending -> index, FLUSH_S or FLUSH_ROWS later; locked, full or removed: behind -> retry each RETRY_S:
scan of the segments

A transaction costs as much as dozens of rows, so several commits share one. Readers scan records that the index lacks.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from services.orchestrator.journal.storage.index import IN_MEMORY, INDEX_FILE, UNUSABLE, Index, remove_index
from services.orchestrator.journal.storage.index_sync import log_damage, synchronise
from services.orchestrator.journal.storage.scan import Damage
from services.orchestrator.journal.storage.segments import Place, Row

log = structlog.get_logger()

OPEN_S = 2.0  # for a lock of another process, at start
LOCK_S = 0.2  # the same, while records wait
RETRY_S = 1.0  # between attempts to catch up
FLUSH_S = 0.25  # a row waits at most as long for others to share a transaction with
FLUSH_ROWS = 256  # and for at most as many

_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


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
