"""Number of cores that this process may use: its CPU affinity, limited by the quota of its control group."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import shutil
import socket
import sqlite3
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # such as "200000 100000": two cores' worth of time


def num_cores(quota: Path = _QUOTA) -> float:
    """Cores; a fraction where the quota of the control group is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        time, period = quota.read_text().split()
    except (OSError, ValueError):  # no control group of version 2
        return cores
    return cores if time == "max" else min(cores, int(time) / int(period))


# --- Disks: errors of the system and SQLite that say one is full; names that survive a power cut.


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


# --- Finds ports for processes that start in a moment, which no other process takes meanwhile.


LOOPBACK = "127.0.0.1"
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_BEGIN = 32768  # of Linux's ephemeral range
_FIRST = 1024  # that needs no privilege
_WIDTH = 10_000  # ports below it that are looked at
_STRIDE = 37  # between the places of two processes with neighbouring ids


@contextlib.contextmanager
def complete_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory, which becomes ``target``, in place of an earlier one, when the block ends without an error."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_directory(partial)
        if target.exists():
            shutil.rmtree(target)
        os.rename(partial, target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def free_ports(count: int, hosts: Sequence[str] = (LOOPBACK,), avoid: Collection[int] = ()) -> list[int]:
    """Different ports without a listener at any of these addresses of this machine, and not in ``avoid``.

    Raises:
        OSError: there are not as many.
    """
    try:
        end = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = _DEFAULT_BEGIN
    begin = max(_FIRST, end - _WIDTH)
    if end - begin < _WIDTH // 10:  # the kernel may choose any port
        begin, end = _FIRST, 1 << 16
    found: list[int] = []
    for step in range(end - begin):
        if len(found) == count:
            return found
        port = begin + (os.getpid() * _STRIDE + step) % (end - begin)
        if port not in avoid and all(is_free(port, host) for host in hosts):
            found.append(port)
    raise OSError(f"no {count} ports between {begin} and {end} are free")


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there; ``host`` is an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


# --- Makes glibc keep freed memory, for processes that free and allocate the same megabytes repeatedly; free memory in
# bytes.


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_HEAP_BLOCK = 32 * 1024 * 1024  # the most that every glibc accepts
_KEPT = 1024 * 1024 * 1024


def keep_freed_memory(*, one_arena: bool = False) -> bool:
    """Serve blocks of up to 32 MiB from the heap, and return heap to the kernel only above 1 GiB.

    ``one_arena`` keeps one heap for all threads: for a process whose threads hand buffers to each other (a weight
    publisher), so that one reuses the memory that another frees. False when the C library has no such settings, or
    refused one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_HEAP_BLOCK, _M_TRIM_THRESHOLD: _KEPT}
    if one_arena:
        settings[_M_ARENA_MAX] = 1
    answers = [mallopt(parameter, value) for parameter, value in settings.items()]
    return all(answer == 1 for answer in answers)


def available_bytes() -> int:
    """Memory that this process can take before the machine, or its cgroup, runs out: without what can be reclaimed."""
    with open("/proc/meminfo") as file:
        of_machine = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # cgroup v1, or none
        return of_machine
    if limit == "max":
        return of_machine
    return min(of_machine, int(limit) - int(used) + int(stat.get("inactive_file", 0)))


# --- Collects reference cycles in small steps, in a process that holds many objects and must answer at once.


_SWEEP_EVERY_S = 0.5
_NEVER = 1 << 30  # of the second generation, before Python's own full collection
_GROWTH = 2.0
_FEWEST = 1_000_000  # blocks; fewer are counted as so many


class GarbageSweeper:
    """One for a process. ``run`` goes beside its work, and restores the collector at the end.

    ``num_full``: full collections so far.
    """

    def __init__(self, *, fewest: int = _FEWEST) -> None:
        self._fewest = fewest
        # Blocks after the last full collection. At the start these are of modules: a collection finds no garbage among
        # them, and in a forked process it would copy the pages that the process shares with its parent.
        self._after_full = sys.getallocatedblocks()
        self.num_full = 0

    async def run(self) -> None:
        """Ends by cancellation."""
        thresholds = gc.get_threshold()
        # What a fork server, or a test run, has set aside stays there: it is large, and shared with other processes.
        was_frozen = gc.get_freeze_count() > 0
        gc.set_threshold(*thresholds[:2], _NEVER)
        try:
            while True:
                self.sweep()
                await asyncio.sleep(_SWEEP_EVERY_S)
        finally:
            if not was_frozen:
                gc.unfreeze()
            gc.set_threshold(*thresholds)

    def sweep(self) -> None:
        """Collect the objects made since the last sweep, or all where memory has doubled; freeze the survivors."""
        # blocks and not ``gc.get_freeze_count``, which walks all that is set aside
        is_full = sys.getallocatedblocks() > _GROWTH * max(self._after_full, self._fewest)
        if is_full:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if is_full:
            self.num_full += 1
            self._after_full = sys.getallocatedblocks()
