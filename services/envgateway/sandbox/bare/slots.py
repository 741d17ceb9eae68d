"""Slots: one user, one work directory, one program at a time; found empty before the next begins.

Finds and kills all processes of a slot, clears its files, and measures what a program has written there. Limits and
verdicts are other modules' part.
"""

from __future__ import annotations

import errno
import os
import signal
import stat

from . import procfs
from .confinement import PidNamespace


class Slot:
    """``uid`` is the slot's own user at tiers 2 and 1 and the gateway's elsewhere."""

    def __init__(self, index: int, uid: int, mark: int, tier: str, base_dir: str) -> None:
        self.index = index
        self.uid = uid
        self.mark = mark
        self.own_user = tier in ("2", "1")
        self.has_own_disk = tier == "2"
        self._pid_namespace: PidNamespace | None = None
        self._wipes = 0
        self.remover: int | None = None  # the process that removes moved trees
        self._has_retried = False  # whether a second process removes the rest
        self._clean_state: tuple[tuple[int, ...], ...] | None = None  # of both directories; None is unknown
        self.directory = os.path.join(base_dir, f"slot-{index}")
        self.work_dir = os.path.join(self.directory, "work")
        os.makedirs(self.directory, mode=0o711, exist_ok=True)
        self.wipe(at_once=True)

    def _make_work_dir(self) -> None:
        os.mkdir(self.work_dir, 0o700)
        if self.own_user:
            os.chown(self.work_dir, self.uid, self.uid)

    def pid_namespace(self) -> PidNamespace:
        """Tier 2: the slot's pid namespace, created at first use and again when its first process died."""
        if self.lost_its_namespace():
            self.close()
        if self._pid_namespace is None:
            self._pid_namespace = PidNamespace()
        return self._pid_namespace

    def lost_its_namespace(self) -> bool:
        """Whether the namespace's first process has died, which kills every process of the namespace."""
        return self._pid_namespace is not None and not self._pid_namespace.is_alive

    def adopted_cpu_s(self) -> float:
        """CPU time of dead orphans that the namespace's first process has reaped since its start."""
        return self._pid_namespace.waited_cpu_s() if self._pid_namespace is not None else 0.0

    def kill_namespace(self) -> None:
        """Kill all processes of the slot's pid namespace, where it has one; they are strays until they have ended."""
        if self._pid_namespace is not None:
            self._pid_namespace.kill()

    def close(self) -> None:
        if self._pid_namespace is not None:
            self._pid_namespace.close()
            self._pid_namespace = None

    def wipe(self, at_once: bool = False) -> None:
        """Leave an empty work dir as the only file of the slot, after any change by the program.

        A directory that was changed in any way is replaced or cleared, so that its times, modes and attributes carry no
        message to the next program. Raises ``OSError`` while no work dir can be made: the slot is not given to a
        program. Files are removed by a process of its own, because the caller serves other slots, or here, ``at_once``.
        """
        if self.has_own_disk and self._clean_state is not None:  # the last process took its mount along
            return
        if self._clean_state is not None and self._clean_state == self._state():
            return
        if self.remover is not None:
            if procfs.is_live_child(self.remover):
                raise BlockingIOError(errno.EAGAIN, "files of the last program are being removed", self.directory)
            self.remover = None
            left = [os.path.join(self.directory, name) for name in os.listdir(self.directory) if name != "work"]
            if left and not self._has_retried:  # the first process may have been killed
                self._has_retried = True
                self._remove(left, at_once)
        else:
            self._has_retried = False
            self._remove(self._moved_away(), at_once)
        self._make_work_dir()
        os.chmod(self.directory, 0o711)
        self._clean_state = self._state()

    def _moved_away(self) -> list[str]:
        """Rename all entries of the slot's directory: a tree that cannot be removed costs disk, never the next
        program's clean start."""
        os.chmod(self.directory, 0o700)
        _clear_attributes(self.directory)
        moved = []
        for name in os.listdir(self.directory):
            self._wipes += 1
            old = os.path.join(self.directory, f".old-{os.getpid()}-{self._wipes}")
            try:
                os.rename(os.path.join(self.directory, name), old)
            except OSError:  # a mount, or a name that exists: then remove the tree at its place
                old = os.path.join(self.directory, name)
            moved.append(old)
        return moved

    def _remove(self, trees: list[str], at_once: bool) -> None:
        if not trees:
            return
        remover = _start_to_remove(trees)
        if at_once:
            os.waitpid(remover, 0)
            return
        self.remover = remover
        raise BlockingIOError(errno.EAGAIN, "files of the last program are being removed", self.directory)

    def _state(self) -> tuple[tuple[int, ...], ...] | None:
        """State of the slot's directory and an empty work dir; None when the work dir is not empty, or not alone."""
        try:
            if os.listdir(self.directory) != ["work"] or os.listdir(self.work_dir):
                return None
            states = (os.lstat(self.directory), os.lstat(self.work_dir))
        except OSError:  # renamed, removed or closed
            return None
        return tuple((s.st_mode, s.st_uid, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in states)

    def strays(self, among: list[int]) -> list[int]:
        """Processes that belong to this slot; at tier 2 those that its namespace's first process has adopted."""
        if self._pid_namespace is not None:
            return self._pid_namespace.left()
        if self.own_user:
            return [pid for pid in among if procfs.user(pid) == self.uid]
        return [pid for pid in among if procfs.mark(pid) == self.mark]

    def kill(self, strays: list[int]) -> None:
        """Kill the strays and all below them; at tiers 2 and 1 everything of the slot's user, in one call."""
        if self.own_user:
            kill_user(self.uid)
            return
        family = procfs.descendants(strays)
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none forks while others die
            for pid in family:
                if procfs.mark(pid) == self.mark:
                    _kill_if_there(pid, sign)

    def sweep(self) -> None:
        """Kill processes that an earlier supervisor left in this slot: checks every process."""
        if self.own_user:
            kill_user(self.uid)
        else:
            for pid in self.strays(procfs.all_pids()):
                _kill_if_there(pid, signal.SIGKILL)


def _kill_if_there(pid: int, sign: signal.Signals) -> None:
    try:
        os.kill(pid, sign)
    except (ProcessLookupError, PermissionError):
        pass


def _clear_attributes(path: str) -> None:
    """Extended attributes, which a program may have left there for the next."""
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith("user."):
                os.removexattr(path, name, follow_symlinks=False)
    except OSError:  # a file system without them
        pass


_NOBODYS_UID = 65_001  # after the last slot user; no process is ever started as this one


def kill_user(uid: int) -> None:
    """SIGKILL to every process of a slot user, from a helper that may signal that user and no other.

    The helper's real and saved user belongs to no slot, so no process of the slot can stop or kill the helper; the
    caller waits for its end. Without effect on a machine that is out of processes: the caller checks and tries again.
    """
    try:
        helper = os.fork()
    except OSError:
        return
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(_NOBODYS_UID, uid, _NOBODYS_UID)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:  # no process was left
            pass
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


# Directories are opened only where the removal fails, which root's does not for their sake.
_REMOVAL = """\
rm -rf -- "$@" && exit
for tree; do [ -L "$tree" ] || chmod -R u+rwx -- "$tree"; done
rm -rf -- "$@"
"""


def _start_to_remove(trees: list[str]) -> int:
    """A process that removes trees that untrusted code has made: closed directories, any depth, links not followed."""
    quiet = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]
    arguments = ["sh", "-c", _REMOVAL, "sh", *trees]
    return os.posix_spawn("/bin/sh", arguments, {"PATH": "/usr/bin:/bin"}, file_actions=quiet)


def remove_tree(path: str) -> None:
    """Remove a tree, or as much of it as can be removed."""
    try:
        os.waitpid(_start_to_remove([path]), 0)
    except OSError:  # the machine is out of processes: the next gateway removes what is left
        pass


# --- Disk use where no sized file system bounds it: a bounded walk over the slot's directory. Untrusted code may move files
# during the walk: it follows no link, opens only directories, and ends as soon as the quota is passed, so its cost is bounded.


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
