"""What a freshly forked child gives up before it runs a stranger's program, per tier.

    2   tier 1 and mount, pid, network, ipc and uts namespaces, a sized tmpfs as work dir (root with CAP_SYS_ADMIN)
    1   slot user, hard rlimits, seccomp, Landlock where the kernel has it        (root; uid keeps slots apart)
    U   user, network, ipc and uts namespaces, rlimits, seccomp, Landlock         (not root; Landlock keeps files apart)
    0   rlimits; seccomp and Landlock where they work, promised to nobody

The supervisor's own limits (wall time, CPU and memory over the tree, output) come on top and trust none of this.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from . import landlock, seccomp
from .jail import WORK_PARENT, Jail
from .messages import Start

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_NEW_USER, _NEW_NET, _NEW_IPC, _NEW_UTS = 0x10000000, 0x40000000, 0x08000000, 0x04000000
_CAPABILITY_VERSION_3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
RLIMIT_MSGQUEUE = 12  # the resource module does not name it

# Shared libraries and data that an import may need; the interpreter's own tree is added by the zygote.
_SYSTEM_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
                    "/etc/ld.so.cache", "/etc/localtime")  # fmt: skip
# What a compiled program starts with: the dynamic loader, named by its real directory.
_LOADERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


_PER_RUN = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE,
            resource.RLIMIT_NPROC)  # fmt: skip


class Confinement:
    """Prepared once per zygote and slot; ``apply`` runs in the child and cannot be undone."""

    def __init__(self, tier: str, slot_dirs: list[str], readable: list[str], tools: list[str], accounted: bool) -> None:
        """``readable``: trees that any program may read; ``tools``: those that only a compiler may read and execute;
        ``accounted``: a cgroup counts all memory."""
        self._tier = tier
        self._slot_dirs = slot_dirs
        self._libc = ctypes.CDLL(None, use_errno=True)
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
        if tier == "U" and not abi:
            raise OSError("tier U needs Landlock, which this kernel does not offer")
        readable = [*_SYSTEM_READABLE, *readable]
        self._jail: Jail | None = None
        if tier == "2":
            self._jail = Jail()
            self._jail.enter(os.path.join(os.path.dirname(slot_dirs[0]), "root"), [*readable, *tools], devices)
        # one rule set a slot: the slot's directory is never removed, only the work dir in it
        places = [WORK_PARENT] if self._jail is not None else slot_dirs
        executable = _LOADERS if tools else ()
        self._rulesets, self._compiler_rulesets = [], []
        if abi:
            self._rulesets = [landlock.create_ruleset(abi, readable, [p], devices, executable) for p in places]
        if abi and tools:
            self._compiler_rulesets = [
                landlock.create_ruleset(abi, [*readable, *tools], [place], ["/dev/null"], [*executable, *tools])
                for place in places
            ]

    def prepare_parent(self) -> None:
        """In the fork server, last: from now on neither it nor its children can do what none of them needs."""
        for what in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
            resource.setrlimit(what, (0, 0))
        if not self._filtered:
            return
        try:
            seccomp.refuse_common(self._tier, self._may_execute, self._accounted)
        except OSError:
            if self._tier != "0":
                raise
            self._filtered = False

    def fork(self, namespace_fd: int | None) -> int:
        """``os.fork``; at tier 2 into the pid namespace of the slot."""
        if self._jail is None or namespace_fd is None:
            return os.fork()
        return self._jail.fork_into(namespace_fd)

    def apply(self, run: Start, parent: int, compiling: bool) -> None:
        """In the child. The work dir is the current directory afterwards."""
        if self._jail is not None:
            self._jail.enter_own_mounts(run.uid, run.disk_bytes, run.num_files)
        else:
            os.chdir(self._slot_dirs[run.slot] + "/work")
        if self._tier == "U":
            self._enter_namespaces()
        self._set_limits(run)
        if self._tier in ("1", "2"):
            os.setgroups([])
            os.setresgid(run.uid, run.uid, run.uid)
            os.setresuid(run.uid, run.uid, run.uid)
        # after the change of uid, which clears it; the zygote may have died in between
        self._libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        # a parent outside of the pid namespace has no number in it: 0 while it lives, 1 when the room has adopted us
        if os.getppid() != (parent if self._jail is None else 0):
            os._exit(1)
        if self._libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        rulesets = self._compiler_rulesets if compiling else self._rulesets
        if rulesets:
            landlock.restrict_self(rulesets[run.slot if self._jail is None else 0])
        if self._filtered and self._tier in ("U", "0"):
            # RLIMIT_NPROC does not bind root, who has no business at tier 0 but may be all that a container offers
            seccomp.refuse_for_child(processes=self._tier == "0" and os.getuid() == 0)

    def _set_limits(self, run: Start) -> None:
        def both(what: int, value: int) -> None:
            value = min(value, self._hard[what])
            resource.setrlimit(what, (value, value))

        # These back up the supervisor's limits and are never the only ones.
        both(resource.RLIMIT_CPU, int(run.cpu_s) + 2)
        # Address space is not memory: a generous backstop for what grows faster than the supervisor looks.
        both(resource.RLIMIT_AS, 4 * run.memory_bytes + (1 << 30))
        both(resource.RLIMIT_FSIZE, run.file_bytes)
        both(resource.RLIMIT_NOFILE, run.open_files)
        if self._tier in ("U", "0"):
            resource.setrlimit(RLIMIT_MSGQUEUE, (0, run.mark))
        both(resource.RLIMIT_NPROC, run.processes)

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
