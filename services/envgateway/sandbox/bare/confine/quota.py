"""Measures a program's disk use where no sized file system bounds the use: a bounded walk over the slot's directory.
Looks also whether the disk has the room that the quota promises.

Untrusted code may move files during the walk: the walk follows no link, opens only directories, and ends as soon as the
quota is passed, so its cost is bounded by the quota.
"""

from __future__ import annotations

import os
import stat

from .. import procfs

_MAX_DEPTH = 64
_FIRST_SWEEP_S, _SWEEP_EVERY_S = 0.05, 0.1
_LITTLE_BYTES = 4096
_REWRITES = 4  # writing the whole quota this many times over is more than any honest program does

_CLOSED = "a directory that is closed to being counted"  # where programs run as our own user; root opens everything


class Room:
    """Free space of the file system of work dirs that have none of their own: other processes fill it, too."""

    def __init__(self, directory: str, disk_bytes: int, num_files: int) -> None:
        """At the start of a program that may use so much."""
        self._directory = directory
        self._was_short = self._is_below(disk_bytes, num_files)

    def was_short(self) -> bool:
        """Whether a program had less than its quota promises: at its start, or because nothing is left now."""
        return self._was_short or self._is_below(_LITTLE_BYTES, 1)

    def _is_below(self, num_bytes: int, num_files: int) -> bool:
        found = os.statvfs(self._directory)
        counts_files = found.f_files > 0  # some file systems make room for files as they come
        return found.f_bavail * found.f_frsize < num_bytes or (counts_files and found.f_favail < num_files)


class DiskQuota:
    """Disk quota of one run. ``exceeded`` names the exceeded limit, for people; empty within the quota."""

    def __init__(self, directory: str, disk_bytes: int, num_files: int, now: float) -> None:
        self._directory = directory
        self._bytes = disk_bytes
        self._files = num_files + 1  # the work dir itself
        self._next = now + _FIRST_SWEEP_S
        self._written: dict[int, int] = {}

    def exceeded(self, now: float, pids: list[int], last: bool = False) -> str:
        if now < self._next and not last:
            return ""
        self._next = now + _SWEEP_EVERY_S
        for pid in pids:
            self._written[pid] = max(self._written.get(pid, 0), procfs.written_bytes(pid))
        if sum(self._written.values()) > _REWRITES * self._bytes:
            return "bytes written"
        try:
            top = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:
            return _CLOSED
        except OSError:  # replaced: the wipe removes the new one
            return ""
        self._left_files = self._files
        self._left_bytes = self._bytes - sum(_unlinked_bytes(pid, os.fstat(top).st_dev) for pid in pids)
        try:
            return self._walk(top, 0) if self._left_bytes >= 0 else "bytes in files"
        finally:
            os.close(top)

    def _walk(self, directory: int, depth: int) -> str:
        if depth > _MAX_DEPTH:
            return "directories nested too deeply"
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    what = self._count(directory, entry, depth)
                    if what:
                        return what
        except PermissionError:
            return _CLOSED
        except OSError:  # removed during the read
            pass
        return ""

    def _count(self, directory: int, entry: os.DirEntry[str], depth: int) -> str:
        self._left_files -= 1
        if self._left_files < 0:
            return "number of files"
        try:
            self._left_bytes -= entry.stat(follow_symlinks=False).st_blocks * 512
            if self._left_bytes < 0:
                return "bytes in files"
            if not entry.is_dir(follow_symlinks=False):
                return ""
            inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except OSError:
            return ""
        try:
            return self._walk(inner, depth + 1)
        finally:
            os.close(inner)


def _unlinked_bytes(pid: int, device: int) -> int:
    """Bytes of files without a name that open descriptors keep."""
    total = 0
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            state = os.stat(f"/proc/{pid}/fd/{name}")
            if state.st_nlink == 0 and state.st_dev == device and stat.S_ISREG(state.st_mode):
                total += state.st_blocks * 512
    except OSError:  # the process has ended, or closed the descriptor
        pass
    return total
