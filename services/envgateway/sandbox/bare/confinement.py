"""Confines a new child before untrusted code runs, per tier.

    2   tier 1 and mount, pid, network, ipc and uts namespaces, a sized tmpfs as work dir (root with CAP_SYS_ADMIN)
    1   slot user, hard rlimits, seccomp, Landlock where the kernel has it        (root; uid keeps slots apart)
    U   user, network, ipc and uts namespaces, rlimits, seccomp, Landlock         (not root; Landlock keeps files apart)
    0   rlimits; seccomp and Landlock where they work, without any guarantee

The supervisor's own limits (wall time, CPU and memory over the tree, output) come on top and trust none of this.

    PidNamespace   in the supervisor, at tier 2: one small process per slot, pid 1 of the slot's pid namespace; adopts and reaps
                   processes that programs leave, and its death kills all processes in the slot. Dies with the supervisor.
    Jail           in the fork server, at tier 2: network, ipc, uts and mount namespaces of its own, and a root that holds
                   the readable trees only. Each child copies the mount namespace and puts a sized tmpfs and the /proc of its
                   pid namespace into its copy, so no file that a program writes has to be cleaned up: the files go with
                   the last process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import procfs, seccomp, wire
from .wire import Start

# --- Namespaces of tier 2; they need CAP_SYS_ADMIN.


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
        own, parent = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC), os.getpid()
        try:
            _check(_libc.unshare(_NEW_PID), "unshare pid")
            self.pid = os.fork()
            if self.pid == 0:
                _be_first_process(parent)
            _check(_libc.setns(own, _NEW_PID), "setns pid")
        finally:
            os.close(own)
        self.namespace_fd = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and procfs.is_live_child(self.pid)

    def waited_cpu_s(self) -> float:
        """CPU time of dead orphans that the first process has reaped."""
        return procfs.waited_cpu_s(self.pid)

    def left(self) -> list[int]:
        """Processes that the first process has adopted and not yet reaped; the first process itself while it ends, which
        it does after all others of the namespace."""
        if self.is_alive:
            return procfs.children(self.pid)
        return [self.pid] if procfs.is_child(self.pid) else []

    def kill(self) -> None:
        """Kill the first process, and with it every process of the namespace; ``left`` is empty when they have ended."""
        self._is_killed = True
        if procfs.is_child(self.pid):  # else it was reaped, and the pid may be another process's
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.namespace_fd)
        self.kill()
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:  # reaped before
            pass


def _be_first_process(parent: int) -> None:
    """Never returns: reaps all adopted processes."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if procfs.parent() != parent:  # it died before the line above
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


# --- Landlock: which files a program may read and where it may write.


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_GET_VERSION = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_ALL_V1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_MAKE_DEVICES = (1 << 6) | (1 << 9) | (1 << 11)  # character, socket, block: never needed in a work dir
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_version() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    return max(version, 0)


def create_ruleset(
    abi: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], executable: Iterable[str] = ()
) -> int:
    """A rule set's descriptor; paths that do not exist are left out. The rules hold inodes, not names."""
    handled = _ALL_V1
    handled |= _REFER if abi >= 2 else 0
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL_DEV if abi >= 5 else 0
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", 0)  # TCP is left to seccomp, which refuses sockets of any kind
    if abi >= 6:
        attributes += struct.pack("=Q", _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL)
    ruleset: int = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in readable:
        _allow(ruleset, path, _READ_FILE | _READ_DIR)
    for path in executable:
        _allow(ruleset, path, _EXECUTE | _READ_FILE)
    for path in writable:
        _allow(ruleset, path, handled & ~_EXECUTE & ~_MAKE_DEVICES & ~_IOCTL_DEV)
    for path in devices:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, fd)
        if _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule", path)
    finally:
        os.close(fd)


# --- The steps that confine a child, per tier.


_SIGKILL = 9
_PR_SET_NO_NEW_PRIVS = 38
_NEW_USER = 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
RLIMIT_MSGQUEUE = 12  # a constant that the resource module lacks

# Shared libraries and data that an import may need; the interpreter's own tree is added by the fork server.
_SYSTEM_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
                    "/etc/ld.so.cache", "/etc/localtime")  # fmt: skip
# A compiled program's start needs the dynamic loader, named by its real directory.
_LOADERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# without /dev/zero: a shared mapping of zeros is memory that is in no resident set
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")


# A call, its arguments, and whether a returned value other than 0 is a failure.
Step = tuple[Callable[..., Any], tuple[Any, ...], bool]
_PER_RUN = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE,
            resource.RLIMIT_NPROC, resource.RLIMIT_STACK)  # fmt: skip


def take(steps: Sequence[Step]) -> None:
    """Make the calls; in a child. Each line of Python in a child copies pages that the fork server shares, which costs more
    than the call."""
    for call, given, is_status in steps:
        if call(*given) and is_status:
            error = ctypes.get_errno()
            raise OSError(error, f"{call.__name__}{given}: {os.strerror(error)}")


def _die_unless_child_of(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


class Confinement:
    """Prepared once per fork server and slot. The steps of a child are listed before the fork; the child takes them, and
    cannot undo them."""

    def __init__(
        self,
        tier: str,
        slot_dirs: list[str],
        readable: list[str],
        tools: list[str],
        links: list[str] | None = None,
    ) -> None:
        """``readable``: trees that any program may read; ``tools``: those that only a compiler may read and execute;
        ``links``: of a shell, which executes the tools and its own files:
        names below the root that lead into the work dir."""
        self._tier = tier
        self._slot_dirs = slot_dirs
        for name in ("prctl", "unshare", "syscall"):  # found here, and not by each child
            getattr(_libc, name)
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # likewise the set-up of the first call
        # root in a container may not raise limits either
        hard = {what: resource.getrlimit(what)[1] for what in _PER_RUN}
        self._hard = {what: 1 << 62 if value == resource.RLIM_INFINITY else value for what, value in hard.items()}
        self._filtered = seccomp.is_supported()
        self._may_execute = bool(tools)
        if not self._filtered and tier != "0":
            raise OSError(f"tier {tier} needs seccomp, whose numbers are not known for {os.uname().machine}")
        abi = landlock_version()
        if links is not None and tier != "2":
            raise OSError(f"a shell needs a root of its own, which tier 2 has and tier {tier} has not")
        if tier == "U" and not abi:
            raise OSError("tier U needs Landlock, which this kernel does not offer")
        readable = [*_SYSTEM_READABLE, *readable]
        self._jail: Jail | None = None
        # as its children see this process: a parent outside of their pid namespace shows as pid 0 while alive
        self._parent = os.getpid() if tier != "2" else 0
        if tier == "2":
            self._jail = Jail()
            self._jail.enter(os.path.join(os.path.dirname(slot_dirs[0]), "root"), [*readable, *tools], _DEVICES,
                             links or [])  # fmt: skip
        # one rule set per slot: the slot's directory is never removed, only its work dir
        places = [WORK_PARENT] if self._jail is not None else slot_dirs
        executable: list[str] = [*_LOADERS] if tools else []
        if links is not None:
            readable, executable = [*readable, *tools], [*executable, *tools, *places]
        self._rulesets, self._compiler_rulesets = [], []
        if abi:
            self._rulesets = [create_ruleset(abi, readable, [p], _DEVICES, executable) for p in places]
        if abi and tools:
            self._compiler_rulesets = [
                create_ruleset(abi, [*readable, *tools], [place], ["/dev/null"], [*executable, *tools])
                for place in places
            ]

    def prepare_parent(self) -> None:
        """In the fork server, as the last step: the server and its children lose rights that none of them needs."""
        for what in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
            resource.setrlimit(what, (0, 0))
        os.umask(0o077)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        if not self._filtered:
            return
        try:
            seccomp.refuse_common(self._tier, self._may_execute)
        except OSError:
            if self._tier != "0":
                raise
            self._filtered = False

    def set_namespace(self, namespace_fd: int | None) -> None:
        """At tier 2 the pid namespace of children that are forked from now on, of a slot or this process's own."""
        if self._jail is not None:
            self._jail.set_namespace(namespace_fd)

    def steps(self, run: Start) -> list[Step]:
        """Calls that confine a child of the fork server. Its current directory is the work dir afterwards."""
        found: list[Step] = []
        if self._jail is not None:
            found += self._jail.own_mounts(run.uid, run.disk_bytes, run.num_files)
        else:
            found.append((os.chdir, (self._slot_dirs[run.slot] + "/work",), False))
        if self._tier == "U":
            found.append((self._enter_namespaces, (), False))
        found += self._limits(run)
        if self._tier in ("1", "2"):
            found += [(os.setgroups, ([],), False), (os.setresgid, (run.uid,) * 3, False)]
            found.append((os.setresuid, (run.uid,) * 3, False))
        # the child dies with its parent; after a change of uid, which ends the bond. The parent may have died in between
        alive: Step = (os.getppid, (), True) if self._parent == 0 else (_die_unless_child_of, (self._parent,), False)
        found += [(_libc.prctl, (_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), True), alive]
        rulesets = self._compiler_rulesets if run.mode == wire.COMPILE else self._rulesets
        if rulesets:
            ruleset = rulesets[run.slot if self._jail is None else 0]
            found.append((_libc.syscall, (_RESTRICT_SELF, ruleset, 0), True))  # needs no_new_privs or CAP_SYS_ADMIN
        if self._filtered and self._tier in ("U", "0"):
            # RLIMIT_NPROC does not bind root, and a container may force root on tier 0
            found.append((seccomp.refuse_for_child, (self._tier == "0" and os.getuid() == 0,), False))
        return found

    def _limits(self, run: Start) -> list[Step]:
        # These back up the supervisor's limits and are never the only ones.
        found = [
            self._limit(resource.RLIMIT_CPU, int(run.cpu_s) + 2),
            # Address space is not memory: a generous backstop for growth between two checks of the supervisor.
            self._limit(resource.RLIMIT_AS, 4 * run.memory_bytes + (1 << 30)),
            self._limit(resource.RLIMIT_FSIZE, run.file_bytes),
            self._limit(resource.RLIMIT_NOFILE, run.open_files),
            self._limit(resource.RLIMIT_NPROC, run.processes),
        ]
        if self._tier in ("U", "0"):
            found.append((resource.setrlimit, (RLIMIT_MSGQUEUE, (0, run.mark)), False))
        if run.mode in (wire.JUDGED, wire.CALL, wire.TESTS):  # deep recursion through functions in C
            found.append(self._limit(resource.RLIMIT_STACK, run.memory_bytes))
        return found

    def _limit(self, what: int, value: int) -> Step:
        value = min(value, self._hard[what])
        # programs raise their stack, whose memory is limited anyway
        hard = resource.getrlimit(what)[1] if what == resource.RLIMIT_STACK else value
        return resource.setrlimit, (what, (value, hard)), False

    def _enter_namespaces(self) -> None:
        uid, gid = os.getuid(), os.getgid()
        if _libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC | _NEW_UTS):
            raise OSError(ctypes.get_errno(), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        # A new user namespace starts with every capability over itself.
        header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
        if _libc.syscall(_CAPSET[os.uname().machine], header, b"\0" * 24):
            raise OSError(ctypes.get_errno(), "capset")
