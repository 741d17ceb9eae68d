"""Confines a new child before untrusted code runs, per tier.

    2   tier 1 and mount, pid, network, ipc and uts namespaces, a sized tmpfs as work dir (root with CAP_SYS_ADMIN)
    1   slot user, hard rlimits, seccomp, Landlock where the kernel has it        (root; uid keeps slots apart)
    U   user, network, ipc and uts namespaces, rlimits, seccomp, Landlock         (not root; Landlock keeps files apart)
    0   rlimits; seccomp and Landlock where they work, without any guarantee

The supervisor's own limits (wall time, CPU and memory over the tree, output) come on top and trust none of this.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .. import messages
from ..messages import Start
from . import landlock, seccomp
from .jail import WORK_PARENT, Jail

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_PR_SET_NO_NEW_PRIVS = 38
_NEW_USER, _NEW_NET, _NEW_IPC, _NEW_UTS = 0x10000000, 0x40000000, 0x08000000, 0x04000000
_CAPABILITY_VERSION_3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
RLIMIT_MSGQUEUE = 12  # a constant that the resource module lacks

# Shared libraries and data that an import may need; the interpreter's own tree is added by the fork server.
_SYSTEM_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
                    "/etc/ld.so.cache", "/etc/localtime")  # fmt: skip
# A compiled program's start needs the dynamic loader, named by its real directory.
_LOADERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


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
        accounted: bool,
        links: list[str] | None = None,
    ) -> None:
        """``readable``: trees that any program may read; ``tools``: those that only a compiler may read and execute;
        ``accounted``: a cgroup counts all memory; ``links``: of a shell, which executes the tools and its own files:
        names below the root that lead into the work dir."""
        self._tier = tier
        self._slot_dirs = slot_dirs
        self._libc = ctypes.CDLL(None, use_errno=True)
        for name in ("prctl", "unshare", "syscall"):  # found here, and not by each child
            getattr(self._libc, name)
        self._libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # likewise the set-up of the first call
        # root in a container may not raise limits either
        hard = {what: resource.getrlimit(what)[1] for what in _PER_RUN}
        self._hard = {what: 1 << 62 if value == resource.RLIM_INFINITY else value for what, value in hard.items()}
        self._filtered = seccomp.is_supported()
        self._may_execute = bool(tools)
        self._accounted = accounted
        # a shared mapping of zeros is memory that is in no resident set
        devices = _DEVICES if accounted else tuple(device for device in _DEVICES if device != "/dev/zero")
        if not self._filtered and tier != "0":
            raise OSError(f"tier {tier} needs seccomp, whose numbers are not known for {os.uname().machine}")
        abi = landlock.abi_version()
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
            self._jail.enter(os.path.join(os.path.dirname(slot_dirs[0]), "root"), [*readable, *tools], devices,
                             links or [])  # fmt: skip
        # one rule set per slot: the slot's directory is never removed, only its work dir
        places = [WORK_PARENT] if self._jail is not None else slot_dirs
        executable: list[str] = [*_LOADERS] if tools else []
        if links is not None:
            readable, executable = [*readable, *tools], [*executable, *tools, *places]
        self._rulesets, self._compiler_rulesets = [], []
        if abi:
            self._rulesets = [landlock.create_ruleset(abi, readable, [p], devices, executable) for p in places]
        if abi and tools:
            self._compiler_rulesets = [
                landlock.create_ruleset(abi, [*readable, *tools], [place], ["/dev/null"], [*executable, *tools])
                for place in places
            ]

    def prepare_parent(self) -> None:
        """In the fork server, as the last step: the server and its children lose rights that none of them needs."""
        for what in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
            resource.setrlimit(what, (0, 0))
        os.umask(0o077)
        if self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        if not self._filtered:
            return
        try:
            seccomp.refuse_common(self._tier, self._may_execute, self._accounted)
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
        found += [(self._libc.prctl, (_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), True), alive]
        rulesets = self._compiler_rulesets if run.mode == messages.COMPILE else self._rulesets
        if rulesets:
            found.append(landlock.restriction(rulesets[run.slot if self._jail is None else 0]))
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
        if run.mode in (messages.JUDGED, messages.CALL, messages.TESTS):  # deep recursion through functions in C
            found.append(self._limit(resource.RLIMIT_STACK, run.memory_bytes))
        return found

    def _limit(self, what: int, value: int) -> Step:
        value = min(value, self._hard[what])
        # programs raise their stack, whose memory is limited anyway
        hard = resource.getrlimit(what)[1] if what == resource.RLIMIT_STACK else value
        return resource.setrlimit, (what, (value, hard)), False

    def _enter_namespaces(self) -> None:
        uid, gid = os.getuid(), os.getgid()
        if self._libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC | _NEW_UTS):
            raise OSError(ctypes.get_errno(), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        # A new user namespace starts with every capability over itself.
        header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
        if self._libc.syscall(_CAPSET[os.uname().machine], header, b"\0" * 24):
            raise OSError(ctypes.get_errno(), "capset")
