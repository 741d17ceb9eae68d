"""Slots: one user, one work directory, one program at a time; found empty before the next begins.

Knows how to find and kill whatever a slot has left behind. Knows nothing about limits or verdicts.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal

from . import procfs
from .jail import Room
from .memcg import SlotMemory


class Slot:
    """``uid`` is the slot's own user at tiers 2 and 1 and the gateway's elsewhere."""

    def __init__(self, index: int, uid: int, mark: int, tier: str, base_dir: str) -> None:
        self.index = index
        self.uid = uid
        self.mark = mark
        self.own_user = tier in ("2", "1")
        self.has_own_disk = tier == "2"
        self.memory: SlotMemory | None = None  # where the machine grants cgroups
        self._room: Room | None = None
        self._wipes = 0
        self._remover: int | None = None  # the process that removes what was moved away
        self._clean_state: tuple[tuple[int, ...], ...] | None = None  # of both directories; None is unknown
        self.directory = os.path.join(base_dir, f"slot-{index}")
        self.work_dir = os.path.join(self.directory, "work")
        os.makedirs(self.directory, mode=0o711, exist_ok=True)
        self.wipe(at_once=True)

    def _make_work_dir(self) -> None:
        os.mkdir(self.work_dir, 0o700)
        if self.own_user:
            os.chown(self.work_dir, self.uid, self.uid)

    def room(self) -> Room:
        """Tier 2: the slot's pid namespace, made when it is first asked for and again when its first process died."""
        if self.lost_its_room():
            self.close()
        if self._room is None:
            self._room = Room()
        return self._room

    def lost_its_room(self) -> bool:
        """Whether the room has died, which kills whatever was in it."""
        return self._room is not None and not procfs.is_live_child(self._room.pid)

    def adopted_cpu_s(self) -> float:
        """CPU time of dead orphans, which the room has waited for since it was made."""
        return procfs.waited_cpu_s(self._room.pid) if self._room is not None else 0.0

    def close(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None

    def wipe(self, at_once: bool = False) -> None:
        """Leave an empty work dir behind, and nothing beside it, whatever the program made of either.

        A directory that was changed in any way is made anew or cleared, so that its times, modes and attributes tell the
        next program nothing. Raises ``OSError`` when there is no work dir to be had yet: the slot is not given to a program.
        A large tree is removed by a process of its own, because the caller serves other slots; ``at_once`` waits for it.
        """
        if self.has_own_disk and self._clean_state is not None:  # it went with the last process that could see it
            return
        if self._clean_state is not None and self._clean_state == self._state():
            return
        if self._remover is not None:
            if procfs.is_live_child(self._remover):
                raise BlockingIOError(errno.EAGAIN, "what a program left is being removed", self.directory)
            self._remover = None
        else:
            self._remove(self._moved_away(), at_once)
        self._make_work_dir()
        os.chmod(self.directory, 0o711)
        self._clean_state = self._state()

    def _moved_away(self) -> list[str]:
        """All that lies in the slot's directory, under other names: a tree that resists costs disk, never the next program's
        clean start."""
        os.chmod(self.directory, 0o700)
        _clear_attributes(self.directory)
        moved = []
        for name in os.listdir(self.directory):
            self._wipes += 1
            old = os.path.join(self.directory, f".old-{os.getpid()}-{self._wipes}")
            try:
                os.rename(os.path.join(self.directory, name), old)
            except OSError:  # a mount, or a name that was there: then it is removed where it is
                old = os.path.join(self.directory, name)
            moved.append(old)
        return moved

    def _remove(self, trees: list[str], at_once: bool) -> None:
        if at_once or all(_is_small(tree) for tree in trees):
            for tree in trees:
                remove_tree(tree)
            return
        remover = os.fork()
        if remover == 0:
            try:
                os.closerange(0, 1 << 16)  # others wait for the ends of these
                for tree in trees:
                    remove_tree(tree)
            finally:
                os._exit(0)
        self._remover = remover
        raise BlockingIOError(errno.EAGAIN, "what a program left is being removed", self.directory)

    def _state(self) -> tuple[tuple[int, ...], ...] | None:
        """Of the slot's directory and an empty work dir; None when it is not empty, or alone."""
        try:
            if os.listdir(self.directory) != ["work"] or os.listdir(self.work_dir):
                return None
            states = (os.lstat(self.directory), os.lstat(self.work_dir))
        except OSError:  # renamed, removed or closed
            return None
        return tuple((s.st_mode, s.st_uid, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in states)

    def strays(self, among: list[int]) -> list[int]:
        """Those of the processes that belong to this slot; at tier 2 whatever its room has adopted."""
        if self._room is not None:
            return procfs.children(self._room.pid)
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
        """Kill what an earlier supervisor left in this slot: a look at every process."""
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


_FEW_FILES = 64
_NOBODYS_UID = 65_001  # after the last slot user; no process is ever started as this one


def kill_user(uid: int) -> None:
    """SIGKILL to every process of a slot user, from a helper that may signal that user and no other.

    The helper's real and saved user is nobody's, so no process of the slot can stop or kill the helper, whose end is waited
    for. Nothing happens on a machine that is out of processes: whoever waits for them to be gone asks again.
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
        except ProcessLookupError:  # nothing was left
            pass
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _is_small(top: str) -> bool:
    """Whether it is removed in a moment."""
    left, pending = _FEW_FILES, [top]
    try:
        while pending:
            path = pending.pop()
            if os.path.islink(path) or not os.path.isdir(path):
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    except OSError:  # closed, or too deep for a name
        return False
    return True


def remove_tree(path: str) -> None:
    """Remove a tree that a stranger has made: closed directories, any depth, links not followed."""

    def open_up_and_retry(function: object, failed: str, _: object) -> None:
        if failed == path:  # what lies above it is not ours to open: it may be /tmp
            return
        try:
            os.chmod(os.path.dirname(failed), 0o700)
            if not os.path.islink(failed):
                os.chmod(failed, 0o700)
            function(failed)  # type: ignore[operator]
        except OSError:
            pass

    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            _flatten(path)
            shutil.rmtree(path, onerror=open_up_and_retry)
        else:
            os.unlink(path)
    except (OSError, RecursionError):  # left for the removal of the directory above
        pass


def _flatten(top: str) -> None:
    """Pull nested directories up, level by level: a tree deeper than a path name or a stack can hold."""
    counter, unused = 0, os.urandom(8).hex()  # a name that was there would leave the rest as deep as it is
    pending = os.listdir(top)
    while pending:
        name = pending.pop()
        path = os.path.join(top, name)
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        try:
            os.chmod(path, 0o700)
            inner = os.listdir(path)
        except OSError:  # rmtree will try it again
            continue
        for child in inner:
            inside = os.path.join(path, child)
            if os.path.isdir(inside) and not os.path.islink(inside):
                counter += 1
                moved = f".flat-{unused}-{counter}"
                try:
                    os.chmod(inside, 0o700)
                    os.rename(inside, os.path.join(top, moved))
                    pending.append(moved)
                except OSError:
                    continue
