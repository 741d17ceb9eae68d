"""Tier 2: namespaces. A slot's room (its pid namespace), a fork server's root, a child's own work dir.

    Room   in the supervisor: one small process per slot, pid 1 of the slot's pid namespace; it adopts and reaps what
           programs leave behind, and when it dies, so does everything in the slot. It dies with the supervisor.
    Jail   in the fork server: network, ipc, uts and mount namespaces of its own, and a root that holds the readable
           trees only. Each child copies the mount namespace and puts a sized tmpfs and the room's /proc into its copy,
           so nothing that a program writes has to be cleaned up: it goes with the last process.

Knows nothing about users, limits other than the disk's, or verdicts. Needs CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_PID, _NEW_NET = 0x20000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18)  # fmt: skip
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Landlock looks past a mount point to what lies above it, so the rule is for the directory around the work dir.
WORK_PARENT = "/box"
WORK_DIR = f"{WORK_PARENT}/work"

_DEVICE_LINKS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd")

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


class Room:
    """A slot's pid namespace, held open by its first process."""

    def __init__(self) -> None:
        own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.unshare(_NEW_PID), "unshare pid")
            self.pid = os.fork()
            if self.pid == 0:
                _be_first_process()
            _check(_libc.setns(own, _NEW_PID), "setns pid")
        finally:
            os.close(own)
        self.namespace_fd = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.namespace_fd)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):  # it has ended and was reaped
            pass


def _be_first_process() -> None:
    """Never returns: reaps whatever is left to it."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.closerange(0, 1 << 16)
        os.chdir("/")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            signal.sigwait([signal.SIGCHLD])
            _reap_all()
    finally:
        os._exit(1)


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # none at all
        pass


class Jail:
    """Entered once by a fork server; ``enter_own_mounts`` is for its children."""

    def __init__(self) -> None:
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def enter(self, root: str, readable: Iterable[str], devices: Iterable[str]) -> None:
        """Leave the machine's mounts, network, ipc and host name; ``root`` is an empty directory to build on."""
        _check(_libc.unshare(_NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS), "unshare")
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount("root", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
        for path in sorted(set(readable)):
            _show(root, path)
        for device in (*devices, *_DEVICE_LINKS):
            _show(root, device)
        for directory in ("/proc", WORK_DIR):
            os.makedirs(root + directory, mode=0o755, exist_ok=True)
        _mount("root", root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        os.chdir(root)
        _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
        _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
        os.chdir("/")
        _check(_libc.sethostname(b"sandbox", 7), "sethostname")

    def fork_into(self, namespace_fd: int) -> int:
        """``os.fork`` whose child lives in the namespace; we stay where we are."""
        _check(_libc.setns(namespace_fd, _NEW_PID), "setns pid")
        pid = -1
        try:
            pid = os.fork()
            return pid
        finally:
            if pid != 0:
                _check(_libc.setns(self._own_pid_namespace, _NEW_PID), "setns pid")

    def enter_own_mounts(self, uid: int, disk_bytes: int, num_files: int) -> None:
        """In the child, while it may: a work dir of its own, and the /proc of its room."""
        _check(_libc.unshare(_NEW_NS), "unshare mounts")
        options = f"size={disk_bytes},nr_inodes={num_files + 1},mode=700,uid={uid},gid={uid}"
        _mount("work", WORK_DIR, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "hidepid=2")
        os.chdir(WORK_DIR)


def _show(root: str, path: str) -> None:
    """The path, at the same place below the root, read-only; symbolic links stay links."""
    target = root + path
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target, 0o755)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    # a device can be written there all the same; its times cannot be set
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | (0 if path.startswith("/dev/") else _MS_NODEV)
    _mount("none", target, None, flags)
