"""Slots: one user, one work directory, one program at a time; found empty before the next begins.

Knows how to find and kill whatever a slot has left behind. Knows nothing about limits or verdicts.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat

from . import procfs
from .jail import Room


class Slot:
    """``uid`` is the slot's own user at tiers 2 and 1 and the gateway's elsewhere."""

    def __init__(self, index: int, uid: int, mark: int, tier: str, base_dir: str) -> None:
        self.index = index
        self.uid = uid
        self.mark = mark
        self.own_user = tier in ("2", "1")
        self.has_own_disk = tier == "2"
        self._room: Room | None = None
        self._wipes = 0
        self.directory = os.path.join(base_dir, f"slot-{index}")
        self.work_dir = os.path.join(self.directory, "work")
        os.makedirs(self.directory, mode=0o711, exist_ok=True)
        os.chmod(self.directory, 0o711)
        if not os.path.lexists(self.work_dir):
            self._make_work_dir()

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

    def wipe(self) -> None:
        """Leave an empty work dir behind, whatever the program made of it."""
        if self.has_own_disk:  # it went with the last process that could see it
            return
        try:
            state = os.lstat(self.work_dir)
            untouched = (
                stat.S_ISDIR(state.st_mode) and stat.S_IMODE(state.st_mode) == 0o700 and state.st_uid == self.uid
            )
            if untouched and not os.listdir(self.work_dir):
                return
        except OSError:  # renamed, removed or unreadable (not root): made anew below
            pass
        # moved away before it is removed, so that a tree that resists costs disk, never the next program's clean start
        self._wipes += 1
        if os.path.lexists(self.work_dir):
            os.rename(self.work_dir, os.path.join(self.directory, f".old-{self._wipes}"))
        self._make_work_dir()
        for name in os.listdir(self.directory):
            if name != "work":
                remove_tree(os.path.join(self.directory, name))

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


def kill_user(uid: int) -> None:
    """SIGKILL to every process of a slot user, from a helper that has become that user and no other."""
    helper = os.fork()
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:  # nothing was left
            pass
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


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
    except OSError:  # left for whoever removes the directory above
        pass


def _flatten(top: str) -> None:
    """Pull nested directories up, level by level: a tree deeper than a path name or a stack can hold."""
    counter = 0
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
                moved = f".flat-{counter}"
                try:
                    os.chmod(inside, 0o700)
                    os.rename(inside, os.path.join(top, moved))
                    pending.append(moved)
                except OSError:
                    continue
