"""Disks: errors of the system and SQLite that say one is full; names that survive a power cut."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

RESERVE_BYTES = 1024 * 1024  # with less than this a disk counts as full

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_FOR_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def says_full(error: BaseException) -> bool:
    """Whether a full disk, or an exhausted quota, caused the error."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode in _FULL_FOR_SQLITE
    return isinstance(error, OSError) and error.errno in _FULL


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can sync directories."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not have it
            raise
    finally:
        os.close(fd)
