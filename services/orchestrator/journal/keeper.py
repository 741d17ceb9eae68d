"""Keeps the index in step with the segments that are being written. Nothing that happens to the index stops the journal.

rows of a commit -> index; locked, full or removed: behind -> tried again each RETRY_S: scanned from the segments
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from services.orchestrator.journal.catching_up import log_damage, synchronise
from services.orchestrator.journal.damage import Damage
from services.orchestrator.journal.index import IN_MEMORY, INDEX_FILE, UNUSABLE, Index, Row, remove_index
from services.orchestrator.journal.segments import Place

log = structlog.get_logger()

OPEN_S = 2.0  # for a lock of another process, at start
LOCK_S = 0.2  # the same, while records wait
RETRY_S = 1.0  # between attempts to catch up

_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


class _NoRoom(sqlite3.OperationalError):
    """The -wal file is too long."""


class IndexKeeper:
    """Opened by one thread, then used by the writer thread alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / INDEX_FILE
        self.found: list[Damage] = []  # that was not known before this start
        self._index = self._open()
        self._inode = _inode(self._path)
        self.behind = ""  # why the index lacks records; empty when it has all
        self._tried_at = 0.0

    def last_number(self) -> int:
        """The highest that a record was ever given."""
        return self._index.last_number()

    def add(self, rows: Sequence[Row], ends: Mapping[Place, int]) -> None:
        """Note what was written; ``ends`` are those of all segments that are being written."""
        due = time.monotonic() - self._tried_at >= RETRY_S
        if self.behind and not due:
            return
        try:
            if due:
                self._tried_at = time.monotonic()
                self._check_file()
            if self.behind:
                log_damage(synchronise(self._directory, self._index, ends), self._directory)
                log.info("journal.index_caught_up", directory=str(self._directory))
                self.behind = ""
            else:
                written = {(row.kind, row.segment) for row in rows}
                self._index.add_all(rows, {place: ends[place] for place in written})
        except UNUSABLE as error:
            self._fall_behind(error)

    def _check_file(self) -> None:
        if _inode(self._path) != self._inode:
            raise sqlite3.DatabaseError("the index was removed or replaced")
        if not self._index.has_room():
            raise _NoRoom("readers keep the index's -wal file from being emptied")

    def forget(self, kind: str, segment: int, runs: Sequence[tuple[int, int]]) -> None:
        """A segment with these runs of numbers is deleted, and a record says so."""
        try:
            self._index.forget(kind, segment, runs=runs)
        except UNUSABLE as error:
            self._fall_behind(error)

    def replace(self, place: Place, rows: Sequence[Row], end: int, rename: Callable[[], None]) -> bool:
        """Have ``rename`` put a file with these rows in the place of a closed segment. False, and nothing has changed, while
        the index cannot be written."""
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
        self._index.close()

    def _fall_behind(self, error: Exception) -> None:
        if not self.behind:
            log.warning("journal.index_behind", reason=str(error), effect="records are written; it catches up later")
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
                raise sqlite3.DatabaseError("the index is damaged: its rows are not those that it was given")
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
    """Whether it is enough to try again: a lock, or a full disk. Else the file is not usable any more."""
    return isinstance(error, _NoRoom) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
