"""Tier 2: namespaces. A slot's pid namespace, a fork server's root, a child's own work dir.

    PidNamespace   in the supervisor: one small process per slot, pid 1 of the slot's pid namespace; adopts and reaps
                   processes that programs leave, and its death kills all processes in the slot. Dies with the supervisor.
    Jail           in the fork server: network, ipc, uts and mount namespaces of its own, and a root that holds the
                   readable trees only. Each child copies the mount namespace and puts a sized tmpfs and the /proc of its
                   pid namespace into its copy, so no file that a program writes has to be cleaned up: the files go with
                   the last process.

Needs CAP_SYS_ADMIN. Users, verdicts and limits other than the disk's are other modules' part.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from typing import Any

from .. import procfs

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_PID, _NEW_NET = 0x20000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18)  # fmt: skip
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Landlock resolves a mount point to the directory below, so the rule is for the directory around the work dir.
WORK_PARENT = "/box"
WORK_DIR = f"{WORK_PARENT}/work"

_DEVICE_LINKS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd")

_libc = ctypes.CDLL(None, use_errno=True)
_mount_call = _libc.mount
_mount_call.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_WORK_DIR_BYTES = WORK_DIR.encode()
_WORK_FLAGS, _PROC_FLAGS = _MS_NOSUID | _MS_NODEV, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(_mount_call(*encoded, flags, data.encode()), f"mount {target}")


class PidNamespace:
    """A slot's pid namespace, held open by its first process."""

    def __init__(self) -> None:
        own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.unshare(_NEW_PID), "unshare pid")
            supervisor = os.getpid()
            self.pid = os.fork()
            if self.pid == 0:
                _be_first_process(supervisor)
            _check(_libc.setns(own, _NEW_PID), "setns pid")
        finally:
            os.close(own)
        self.namespace_fd = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._watch = procfs.Watch(self.pid)
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self._watch.is_alive()

    def waited_cpu_s(self) -> float:
        """CPU time of dead orphans that the first process has reaped."""
        return self._watch.waited_cpu_s()

    def left(self) -> list[int]:
        """Processes that the first process has adopted and not yet reaped; the first process itself while it ends, which
        it does after all others of the namespace."""
        if self.is_alive:
            return self._watch.children()
        return [self.pid] if procfs.is_child(self.pid) else []

    def kill(self) -> None:
        """Kill the first process, and with it every process of the namespace; ``left`` is empty when they have ended."""
        self._is_killed = True
        if procfs.is_child(self.pid):  # else it was reaped, and the pid may be another process's
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.namespace_fd)
        self._watch.close()
        self.kill()
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:  # reaped before
            pass


def _be_first_process(supervisor: int) -> None:
    """Never returns: reaps all adopted processes."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if procfs.parent("self") != supervisor:  # it died before the line above
            os._exit(1)
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
    """Entered once by a fork server; ``own_mounts`` is for its children."""

    def __init__(self) -> None:
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def enter(self, root: str, readable: Iterable[str], devices: Iterable[str], links: Iterable[str]) -> None:
        """Leave the machine's mounts, network, ipc and host name; ``root`` is an empty directory to build on; ``links``
        are names in the root that lead to the same name in the work dir."""
        _check(_libc.unshare(_NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS), "unshare")
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount("root", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
        for path in sorted(set(readable)):
            _show(root, path)
        for device in (*devices, *_DEVICE_LINKS):
            _show(root, device)
        for name in links:
            if not os.path.lexists(f"{root}/{name}"):
                os.symlink(f"{WORK_DIR}/{name}", f"{root}/{name}")
        for directory in ("/proc", WORK_DIR):
            os.makedirs(root + directory, mode=0o755, exist_ok=True)
        _mount("root", root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        os.chdir(root)
        _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
        _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
        os.chdir("/")
        _check(_libc.sethostname(b"sandbox", 7), "sethostname")

    def set_namespace(self, namespace_fd: int | None) -> None:
        """The pid namespace of children that are forked from now on; None for this process's own."""
        fd = namespace_fd if namespace_fd is not None else self._own_pid_namespace
        _check(_libc.setns(fd, _NEW_PID), "setns pid")

    def own_mounts(self, uid: int, disk_bytes: int, num_files: int) -> list[tuple[Any, tuple[Any, ...], bool]]:
        """Calls of a child before its confinement: a work dir of its own, and the /proc of its pid namespace.
        With their arguments, and whether they return 0."""
        options = b"size=%d,nr_inodes=%d,mode=700,uid=%d,gid=%d" % (disk_bytes, num_files + 1, uid, uid)
        return [
            (_libc.unshare, (_NEW_NS,), True),
            (_mount_call, (b"work", _WORK_DIR_BYTES, b"tmpfs", _WORK_FLAGS, options), True),
            (_mount_call, (b"proc", b"/proc", b"proc", _PROC_FLAGS, b"hidepid=2"), True),
            (os.chdir, (_WORK_DIR_BYTES,), False),
        ]


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
