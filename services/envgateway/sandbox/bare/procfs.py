"""Reads /proc: the tree below a process, its use of resources, its writes, and the mark of a slot.

Every function accepts a process that may end during the call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 0x4  # in the flags of /proc/<pid>/stat


_SOCKET_BYTES, _PIPE_BYTES = 212_992, 65_536  # the kernel's default size, unless changed


class Usage(NamedTuple):
    """Resources of a set of live processes; ``cpu_s`` includes their reaped children."""

    processes: int
    cpu_s: float
    resident_bytes: int


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # the process has ended
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _words_behind(path: str, name: bytes) -> list[bytes]:
    """The words behind a name at the begin of a line; empty when the process is gone, or the kernel tells no such thing."""
    _, _, rest = (b"\n" + _read(path)).partition(b"\n" + name)
    return rest.partition(b"\n")[0].split()


# Whether this kernel lists children (CONFIG_PROC_CHILDREN); without them every look is a scan of /proc.
_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _stat(pid: int | str) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the state on; empty when the process is gone."""
    data = _read(f"/proc/{pid}/stat")
    return data[data.rfind(b")") + 2 :].split()


def parent(pid: int | str = "self") -> int:
    """The parent of a process; our own one also where the parent is in another pid namespace, in the numbers of /proc."""
    fields = _stat(pid)
    return int(fields[1]) if fields else -1


def children(pid: int) -> list[int]:
    """Direct children, of all threads."""
    if not _HAS_CHILDREN_FILES:
        return [other for other in all_pids() if parent(other) == pid]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        found.extend(map(int, _read(f"/proc/{pid}/task/{thread}/children").split()))
    return found


def descendants(roots: Iterable[int]) -> list[int]:
    """The roots and everything below them."""
    seen: dict[int, None] = {}
    pending = list(roots)
    while pending:
        pid = pending.pop()
        if pid not in seen:
            seen[pid] = None
            pending.extend(children(pid))
    return list(seen)


def usage(pids: Iterable[int], seen: dict[int, int] | None = None) -> Usage:
    """Resources of processes. ``seen`` keeps each process's own CPU ticks between calls: a program that never waits for
    its children (or ignores SIGCHLD, so that the kernel drops their time) is charged for their last known time."""
    processes, ticks, pages = 0, 0, 0
    for pid in pids:
        fields = _stat(pid)
        if not fields:
            continue
        # a zombie keeps its accounted time until reaped, and holds no memory, unless only its first thread has ended
        is_alive = fields[0] != b"Z" or int(fields[17]) > 1
        processes += is_alive
        own = int(fields[11]) + int(fields[12])
        ticks += own + int(fields[13]) + int(fields[14])
        pages += int(fields[21]) if fields[0] != b"Z" else _pages_of_threads(pid) if is_alive else 0
        if seen is not None:
            seen[pid] = max(own, seen.get(pid, 0))
    if seen is not None:
        ticks = max(ticks, sum(seen.values()))
    return Usage(processes, ticks / _TICKS_PER_S, pages * _PAGE_BYTES)


def _pages_of_threads(pid: int) -> int:
    """Memory of a process whose first thread has ended: the kernel reports no memory under that thread."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return max((_pages(f"/proc/{pid}/task/{thread}/statm") for thread in threads), default=0)


def _pages(path: str) -> int:
    fields = _read(path).split()
    return int(fields[1]) if len(fields) > 1 else 0


def waited_cpu_s(pid: int) -> float:
    """CPU time of the children that the process has reaped."""
    fields = _stat(pid)
    return (int(fields[13]) + int(fields[14])) / _TICKS_PER_S if fields else 0.0


def proportional_bytes(pids: Iterable[int]) -> int:
    """Memory with each shared page counted once, divided among the sharing processes (PSS); slower than ``usage``."""
    shares = [_words_behind(f"/proc/{pid}/smaps_rollup", b"Pss:") for pid in pids]
    return sum(int(share[0]) * 1024 for share in shares if share)


def buffer_bytes(pids: Iterable[int]) -> int:
    """Upper bound of kernel memory in the sockets and pipes of these processes, each counted once."""
    found: dict[str, int] = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:"):
                    found[target] = _SOCKET_BYTES
                elif target.startswith("pipe:"):
                    found[target] = _PIPE_BYTES
        except OSError:  # the process has ended, or closed the descriptor
            continue
    return sum(found.values())


def resident_bytes(pid: int) -> int:
    return (_pages(f"/proc/{pid}/statm") or _pages_of_threads(pid)) * _PAGE_BYTES


def written_bytes(pid: int) -> int:
    """Bytes written to disk by a process and its reaped children; 0 when unknown."""
    found = _words_behind(f"/proc/{pid}/io", b"write_bytes:")
    return int(found[0]) if found else 0


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory, on the whole machine; 0 where that is unknown."""
    found = _words_behind("/proc/vmstat", b"oom_kill ")
    return int(found[0]) if found else 0


def is_live_child(pid: int) -> bool:
    """Whether a child of ours lives; an ended child may still have to be reaped.

    An exiting child is not live: the first process of a namespace ends only after all processes in the namespace, which
    its exit kills.
    """
    try:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
    except ChildProcessError:
        return False
    fields = _stat(pid)
    return bool(fields) and not int(fields[6]) & _PF_EXITING


def is_child(pid: int) -> bool:
    """Whether a process is our child, live or ended, and was not reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def user(pid: int) -> int:
    """The real uid; -1 when the process is gone. (The owner of /proc/<pid> tells less: root, for processes that must
    not be dumped.)"""
    found = _words_behind(f"/proc/{pid}/status", b"Uid:")
    return int(found[0]) if found else -1


def live_user(pid: int) -> int:
    """The real uid of a live process; -1 when gone, or ended and not reaped yet."""
    return -1 if _words_behind(f"/proc/{pid}/status", b"State:")[:1] == [b"Z"] else user(pid)


def mark(pid: int) -> int:
    """The hard RLIMIT_MSGQUEUE, which the sandbox uses as a mark of the slot; -1 when unknown."""
    found = _words_behind(f"/proc/{pid}/limits", b"Max msgqueue size")  # soft, hard, unit
    return int(found[1]) if found and found[1].isdigit() else -1


def num_tasks_of(uid: int) -> int:
    """Processes and threads of a user, as RLIMIT_NPROC counts them: checks every process."""
    return sum(num_threads(pid) for pid in all_pids() if user(pid) == uid)


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
