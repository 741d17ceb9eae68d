"""Whether a disk is full: by what is left of it, and by what the system and SQLite say of it."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path

RESERVE_BYTES = 1024 * 1024  # with less than this a disk counts as full

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_FOR_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def free_bytes(place: Path) -> int:
    """Bytes that may still be written where ``place`` lies."""
    return shutil.disk_usage(place).free


def says_full(error: BaseException) -> bool:
    """Whether it is an error that a full disk, or a quota that is used up, causes."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode in _FULL_FOR_SQLITE
    return isinstance(error, OSError) and error.errno in _FULL
