"""A memory cgroup per slot, where the machine grants one: the kernel counts all memory that a program causes.

The count includes memory that /proc does not show: shared memory that is mapped and not resident, buffers of sockets
and pipes, page tables, files in memory. Needs version 2; found by trying.

Moving a process into a cgroup may wait for every core to pass a quiet point, some 15 ms, so a helper process moves
them, and only for runs that live long enough to be looked at. Memory from before the move is counted in the resident set
only.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket

from .statuses import RunStatus

_PREFIX = "rollmill-sandbox-"
_PR_SET_PDEATHSIG = 1
_LONGEST_ORDER = 64


class SlotMemory:
    """The cgroup of one slot; numbers are of all processes of one run together, from its first ``look`` on."""

    def __init__(self, directory: str, orders: socket.socket) -> None:
        os.mkdir(directory)
        self.directory = directory
        self._orders = orders  # to the helper, which knows this cgroup by the end of its name
        self._limit = 0
        self._usage_fd = self._open("memory.current")
        self._kills_fd = self._open("memory.events")
        self._kills_before = self._refusals_before = 0
        self._bytes_before = 0
        self._moved: set[int] = set()
        self.peak_bytes = 0

    def _open(self, name: str) -> int:
        return os.open(f"{self.directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def limit(self, limit_bytes: int) -> None:
        """Bound memory, and thereby swap. Raises ``OSError`` where the kernel refuses the limit."""
        if limit_bytes == self._limit:
            return
        _write(f"{self.directory}/memory.max", str(limit_bytes))
        _write_if_there(f"{self.directory}/memory.swap.max", "0")
        _write_if_there(f"{self.directory}/memory.oom.group", "1")
        self._limit = limit_bytes

    def renew(self) -> None:
        """Another run begins."""
        self._moved.clear()
        self.peak_bytes = 0

    def look(self, family: list[int], limit_bytes: int) -> RunStatus | None:
        """Order the run's new processes into the cgroup; ``killed``."""
        if not self._moved:
            try:
                self.limit(limit_bytes)
            except OSError:  # memory that the kernel cannot free yet; the old limit stays
                pass
            self._kills_before, self._refusals_before = self._count(b"oom_kill"), self._count(b"oom")
            self._bytes_before = self.usage_bytes()  # files that are read stay there until they are in the way
        new = [pid for pid in family if pid not in self._moved]
        if self._moved and new:
            inside = set(map(int, _lines(f"{self.directory}/cgroup.procs")))
            new = [pid for pid in new if pid not in inside]
        self._moved.update(pid for pid in new if self._move(pid))
        return self.killed()

    def _move(self, pid: int) -> bool:
        """Order a process into the cgroup, soon. False when the helper is behind: the next look orders it again."""
        try:
            self._orders.send(f"{os.path.basename(self.directory)} {pid}".encode())
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):  # the helper is gone; its end is the supervisor's
            pass
        return True

    def usage_bytes(self) -> int:
        """Bytes that the kernel counts now; 0 when unknown."""
        try:
            return int(os.pread(self._usage_fd, 64, 0))
        except (OSError, ValueError):
            return 0

    def killed(self) -> RunStatus | None:
        """Why the kernel has killed a process for want of memory: at the run's limit (MEMORY_LIMIT), or because the machine,
        or a cgroup above, had none (INFRA_ERROR). None when it has killed none."""
        if not self._moved:
            return None
        self.peak_bytes = max(self.peak_bytes, self.usage_bytes() - self._bytes_before)
        if self._count(b"oom_kill") <= self._kills_before:
            return None
        return RunStatus.MEMORY_LIMIT if self._count(b"oom") > self._refusals_before else RunStatus.INFRA_ERROR

    def _count(self, event: bytes) -> int:
        """How often an event has happened since the cgroup was made."""
        try:
            found = re.search(rb"^%b (\d+)" % event, os.pread(self._kills_fd, 1024, 0), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0

    def close(self) -> None:
        for fd in (self._usage_fd, self._kills_fd):
            os.close(fd)
        _remove(self.directory)


class MemoryGroups:
    """The cgroups of all slots below one of this process's own, and the helper that moves processes there."""

    def __init__(self, directory: str, num_slots: int) -> None:
        self._directory = directory
        # refused where a cgroup has processes of its own, unless enabled before
        _write_if_there(f"{os.path.dirname(directory)}/cgroup.subtree_control", "+memory")
        os.mkdir(directory)
        _write(f"{directory}/cgroup.subtree_control", "+memory")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self.slots = [SlotMemory(f"{directory}/slot-{index}", self._channel) for index in range(num_slots)]
        for slot in self.slots[:1]:
            slot.limit(1 << 30)  # the kernel takes a limit, or there is no bound
        self.mover_pid = os.fork()
        if self.mover_pid == 0:
            _be_mover(theirs, [slot.directory for slot in self.slots])
        theirs.close()

    def close(self) -> None:
        self._channel.close()
        try:
            os.waitpid(self.mover_pid, 0)
        except ChildProcessError:  # reaped with the strays
            pass
        for slot in self.slots:
            slot.close()
        _remove(self._directory)


def _be_mover(orders: socket.socket, directories: list[str]) -> None:
    """Never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        kept = orders.fileno()
        os.closerange(0, kept)
        os.closerange(kept + 1, 1 << 16)
        targets = {
            os.path.basename(directory): os.open(f"{directory}/cgroup.procs", os.O_WRONLY) for directory in directories
        }
        while order := orders.recv(_LONGEST_ORDER):
            slot, pid = order.split()
            try:
                os.write(targets[slot.decode()], pid)
            except OSError:  # the process has ended
                pass
    finally:
        os._exit(0)


def grant(num_slots: int) -> MemoryGroups | str:
    """Cgroups for these slots, or why the machine grants none."""
    base = _own_cgroup()
    if not base:
        return "no memory controller of cgroup version 2 is mounted for this process"
    _sweep(base)
    try:
        return MemoryGroups(f"{base}/{_PREFIX}{os.getpid()}", num_slots)
    except OSError as error:
        _sweep(base, os.getpid())
        return str(error)


def _own_cgroup() -> str:
    """The directory of this process's cgroup, if that has the memory controller; else empty."""
    own = next((line.split(":", 2)[2] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), None)
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        if after.split()[0] == "cgroup2" and own is not None:
            path = _below(mounted, root, own)
            if "memory" in " ".join(_lines(f"{path}/cgroup.controllers")).split():
                return path
    return ""


def _below(mounted: str, root: str, path: str) -> str:
    """A cgroup's directory; ``root`` is the part of the hierarchy that is mounted."""
    inner = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    return os.path.join(mounted, inner.lstrip("/")).rstrip("/")


def _sweep(base: str, pid: int | None = None) -> None:
    """Remove cgroups of supervisors that were killed, or of this one."""
    for name in _names(base):
        owner = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and (owner == str(pid) or (pid is None and not os.path.exists(f"/proc/{owner}"))):
            for slot in _names(f"{base}/{name}"):
                if slot.startswith("slot-"):
                    _remove(f"{base}/{name}/{slot}")
            _remove(f"{base}/{name}")


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _write_if_there(path: str, text: str) -> None:
    try:
        _write(path, text)
    except OSError:  # a kernel without this limit; the main limit is set
        pass


def _remove(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:  # a process is still in the cgroup: the next supervisor sweeps
        pass
