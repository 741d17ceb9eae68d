"""Starts the supervisor: a bare interpreter, by exec, with one socket and an empty environment.

The first start happens before the gateway has threads. A restart after a crash happens later and is still safe:
``subprocess`` uses vfork and exec, which runs no fork handler of grpc and no Python between the two.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.common.config.envgateway import SandboxConfig
from services.common.errors import InfrastructureError, SandboxRefusedError
from services.common.system.processes import end
from services.envgateway.sandbox.bare import procfs, wire
from services.envgateway.sandbox.bare.slots import kill_user, remove_tree
from services.envgateway.sandbox.records import WRITABLE

# --- Users and marks for slots, shared fairly with other gateways on this machine; and the end of dead gateways'
# programs.


log = structlog.get_logger()
_FIRST_UID, _NUM_UIDS = 61000, 4000
_RLIMIT_MSGQUEUE = 12
_SMALLEST_USEFUL_HARD_LIMIT = 1 << 16


class SlotUsers:
    """``uids`` is empty when not root. ``marks`` is empty where processes cannot be marked."""

    def __init__(self, num_slots: int) -> None:
        self._held: list[socket.socket] = []
        if os.getuid() == 0:
            _sweep_orphans()
        self.uids: list[int] = self._reserve(num_slots) if os.getuid() == 0 else []
        hard = resource.getrlimit(_RLIMIT_MSGQUEUE)[1]
        highest = 1 << 40 if hard == resource.RLIM_INFINITY else hard
        # a low limit may be an ordinary process's, and a sweep by mark must never reach a foreign process
        usable = highest >= _SMALLEST_USEFUL_HARD_LIMIT
        self.marks: list[int] = random.sample(range(1024, min(highest, 1 << 40)), num_slots) if usable else []

    def _reserve(self, num_slots: int) -> list[int]:
        start = os.getpid() * num_slots
        uids = []
        for step in range(_NUM_UIDS):
            uid = _FIRST_UID + (start + step) % _NUM_UIDS
            holder = _hold(uid)
            if holder is None:
                continue
            self._held.append(holder)
            uids.append(uid)
            if len(uids) == num_slots:
                break
        return uids

    def release(self) -> None:
        for holder in self._held:
            holder.close()
        self._held.clear()


def _hold(uid: int) -> socket.socket | None:
    """Hold the user for as long as the socket is open; None when another gateway has the user."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0rollmill-slot-user-{uid}")
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return holder


def _sweep_orphans() -> None:
    """Kill processes of slot users that no gateway holds: programs of gateways that were killed."""
    users: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            uid = procfs.live_user(int(entry.name))
            if _FIRST_UID <= uid < _FIRST_UID + _NUM_UIDS:
                users[uid] = users.get(uid, 0) + 1
    for uid, count in users.items():
        holder = _hold(uid)
        if holder is not None:
            kill_user(uid)
            holder.close()
            log.warning("sandbox.orphans_swept", uid=uid, processes=count)


_PACKAGE_PARENT = str(Path(__file__).parent)
_HELLO_TIMEOUT_S = 60.0
_PREFIX = "rollmill-sandbox-"
_BARE_FLAGS = ("-I", "-S", "-X", "utf8")
# All that a program can find in its own. One thread for numeric libraries: a fork server must not have more.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(slots=True)
class LaunchedSupervisor:
    """A supervisor that has found its tier."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    tier: str
    facts: dict[str, Any]

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the channel, which ends all runs and the supervisor."""
        self.channel.close()
        end(self.process, timeout_s)


class SupervisorLauncher:
    """Holds resources that survive one supervisor: slot users and the directory of work dirs."""

    def __init__(self, config: SandboxConfig, tiers: tuple[str, ...] | None = None) -> None:
        self._config = config
        self._tiers = tiers if tiers is not None else _allowed_tiers(config)
        self._num_users = config.num_slots + config.num_live
        self._users = SlotUsers(self._num_users)
        self.user_ids = frozenset(self._users.uids)  # empty without the rights to have some
        # of gateways that were killed: the names carry their pids
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            match = re.fullmatch(rf"{_PREFIX}(\d+)-.*", path.name)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                with contextlib.suppress(FileNotFoundError):  # another gateway that starts now was quicker
                    if path.lstat().st_uid == os.getuid():
                        remove_tree(str(path))
        self.base_dir = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        os.chmod(self.base_dir, 0o711)  # slot users pass through, and cannot list each other's directories

    def launch(self) -> LaunchedSupervisor:
        """Start a supervisor and wait for its hello.

        Raises:
            SandboxRefusedError: no tier that the config allows works here; names the line to add.
            InfrastructureError: the supervisor died or did not answer.
        """
        tiers = self._tiers
        if not self._users.marks:
            tiers = tuple(tier for tier in tiers if tier in ("2", "1"))
        ours, theirs = socket.socketpair()
        settings = {
            "channel": theirs.fileno(),
            "tiers": tiers,
            "base_dir": str(self.base_dir),
            "uids": self._users.uids,
            "marks": self._users.marks or [0] * self._num_users,
            "num_slots": self._config.num_slots,
            "num_live": self._config.num_live,
            "packages": _packages(self._config.packages),
            "profiles": ["scientific"] if self._config.prewarm_scientific else [],
            "links": WRITABLE,
        }
        boot = f"import sys; sys.path.append({_PACKAGE_PARENT!r}); from bare.supervisor import main; main()"
        # the real interpreter, not a version manager's shim: 150 ms a start
        interpreter = os.path.realpath(sys.executable)
        try:
            process = subprocess.Popen(
                [interpreter, *_BARE_FLAGS, "-c", boot, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which then ends this
            )
        except OSError as error:  # no process or memory to be had at this moment
            ours.close()
            raise InfrastructureError(f"the sandbox supervisor could not be started: {error}") from error
        finally:
            theirs.close()
        try:
            hello = _read_hello(ours)
        except (OSError, EOFError) as error:
            end(process)
            ours.close()
            raise InfrastructureError(f"the sandbox supervisor did not start: {error}") from error
        if hello["kind"] == "refused":
            end(process, _HELLO_TIMEOUT_S)
            ours.close()
            raise SandboxRefusedError(_refusal(hello["reasons"], self._config.allow_tier_0))
        log.info("sandbox.ready", tier=hello["tier"], slots=self._config.num_slots, **hello["facts"])
        if hello["tier"] == "0":
            log.warning("sandbox.not_isolated", why="allow_tier_0 is set", stronger_tiers=hello["reasons"])
        return LaunchedSupervisor(process, ours, hello["tier"], hello["facts"])

    def close(self) -> None:
        remove_tree(str(self.base_dir))
        self._users.release()


def _allowed_tiers(config: SandboxConfig) -> tuple[str, ...]:
    """Strongest first."""
    if config.tier != "auto":
        return (config.tier,) if config.tier != "0" or config.allow_tier_0 else ()
    return ("2", "1", "U", "0") if config.allow_tier_0 else ("2", "1", "U")


def _packages(names: list[str]) -> dict[str, str]:
    """Paths of the installed packages among these, and of the shared libraries that wheels install beside them."""
    found: dict[str, str] = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        path = Path(spec.submodule_search_locations[0])
        found[name] = str(path)
        libraries = path.with_name(f"{name}.libs")
        if libraries.is_dir():
            found[libraries.name] = str(libraries)
    return found


def _read_hello(channel: socket.socket) -> dict[str, Any]:
    channel.settimeout(_HELLO_TIMEOUT_S)
    frames = wire.FrameReader()
    while data := channel.recv(65536):
        for head, _ in frames.feed(data):
            return head
    raise EOFError("it ended before its first message")


def _refusal(reasons: list[str], tier_0_allowed: bool) -> str:
    tried = "; ".join(reasons) or "none could be tried"
    message = f"code cannot be isolated on this machine ({tried})."
    if not tier_0_allowed:
        message += (
            " Run the gateway as root of all users, or as another user where user namespaces work (in Docker: with the seccomp "
            "profile deploy/docker/seccomp.json). To run code with resource limits only, without isolation (trusted code only!), add this line to the recipe: envgateway.sandbox.allow_tier_0: true"
        )
    return message
