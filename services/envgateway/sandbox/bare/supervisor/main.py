"""The supervisor's entry: finds the strongest tier that works here, reports the tier, serves.

``argv[1]`` is a JSON object: channel, tiers (strongest first), base_dir, uids (of programs, then
of live processes; tiers 2 and 1), marks (as many), num_slots, num_live, packages, profiles, fork_server_runs,
links (of a shell), memory_cgroup. The first frame to the gateway is ``hello`` with the tier, or ``refused`` with the failure of each tier.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from .. import wire
from ..confine import landlock, memcg, seccomp
from ..harness import native
from ..statuses import RunStatus
from .run import Limits
from .slots import Slot
from .supervisor import Supervisor, become_supervisor

_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts")
# A real program under the real confinement: imports from disk work, the network is refused, others' files too.
_PROBE = b"""
import ctypes, json, os, tempfile, uuid
refused = []
for attempt in ("socket.socket()", "open('/proc/1/environ')", "os.kill(1, 0)", "open('/dev/shm/x', 'w')"):
    try:
        import socket
        eval(attempt)
    except OSError:
        refused.append(attempt.partition('(')[0])
with open("file", "w") as file:
    file.write("x")
namespaces = {}
for name in ("mnt", "pid", "net", "ipc", "uts"):
    try:
        namespaces[name] = os.readlink("/proc/self/ns/" + name)
    except OSError:
        pass
disk = os.statvfs(".")
print(json.dumps({"uid": os.getuid(), "refused": refused, "namespaces": namespaces,
                  "disk": disk.f_blocks * disk.f_frsize}))
"""
_PROBE_DISK_BYTES = 1 << 20
_PROBE_LIMITS = Limits(10.0, 10.0, 512 << 20, 16, 65536, 0, 1 << 20, 64, _PROBE_DISK_BYTES, 64)


def _try_tier(
    gateway: socket.socket, tier: str, settings: dict[str, Any], memory: memcg.MemoryGroups | None
) -> tuple[Supervisor, list[str]] | str:
    """A supervisor that has run the probe, and the operations that were refused in the probe; or why this tier does not
    work."""
    own_users = tier in ("2", "1")
    num_all = settings["num_slots"] + settings["num_live"]
    uids = settings["uids"] if own_users else [os.getuid()] * num_all
    if own_users and not uids:
        return f"tier {tier} needs root"
    if tier == "U" and os.getuid() == 0:
        return "tier U is for users other than root; root has tier 1"
    base_dir = settings["base_dir"]
    try:
        slots = [Slot(index, uid, settings["marks"][index], tier, base_dir) for index, uid in enumerate(uids)]
        for slot in slots:
            slot.sweep()
            slot.wipe(at_once=True)
    except OSError as error:  # such as root of a user namespace that has one user
        return f"tier {tier}: no directory can be made for user {uids[0]}: {error}"
    for name in ("root", "packages"):
        os.makedirs(os.path.join(base_dir, name), mode=0o755, exist_ok=True)
    fork_settings = {"packages": settings["packages"], "link_dir": os.path.join(base_dir, "packages"),
              "runs": settings["fork_server_runs"], "links": settings["links"]}  # fmt: skip
    try:
        supervisor = Supervisor(gateway, tier, slots, settings["num_slots"], fork_settings, memory)
        head, blobs = supervisor.run_alone(_PROBE, _PROBE_LIMITS)
    except OSError as error:
        return f"tier {tier}: {error}"
    wrong = head["detail"]
    if head["status"] == RunStatus.OK:
        seen = json.loads(blobs[0])
        wrong = _not_confined(tier, seen, uids)
        if not wrong:
            return supervisor, seen["refused"]
    supervisor.close()
    said = blobs[1].decode(errors="replace").strip().splitlines()
    return f"tier {tier}: {head['status']} {wrong} {said[-1] if said else ''}".strip()


def _not_confined(tier: str, seen: dict[str, Any], uids: list[int]) -> str:
    """A fault of the tier that the probe has found; empty when the tier keeps its guarantees."""
    if tier == "0":
        return ""
    if "socket.socket" not in seen["refused"]:
        return "the probe could open a socket"
    if tier in ("2", "1") and seen["uid"] not in uids:
        return f"the probe ran as user {seen['uid']}"
    if tier == "2":
        shared = [
            name for name in _NAMESPACES if seen["namespaces"].get(name) in (None, os.readlink(f"/proc/self/ns/{name}"))
        ]
        if shared:
            return f"the probe shared our namespaces {shared}"
        if seen["disk"] > 2 * _PROBE_DISK_BYTES:
            return f"the probe's work dir was not sized: {seen['disk']} bytes"
    return ""


def main() -> None:
    settings = json.loads(sys.argv[1])
    gateway = socket.socket(fileno=settings["channel"])
    become_supervisor()
    reasons: list[str] = []
    num_all = settings["num_slots"] + settings["num_live"]
    granted = memcg.grant(num_all) if settings["memory_cgroup"] else "it is switched off"
    memory = granted if isinstance(granted, memcg.MemoryGroups) else None
    for tier in settings["tiers"]:
        outcome = _try_tier(gateway, tier, settings, memory)
        if not isinstance(outcome, str):
            supervisor, refused = outcome
            supervisor.start_profiles(settings["profiles"])
            facts = {
                "refused": refused,
                "seccomp": seccomp.is_supported(),
                "landlock_abi": landlock.abi_version(),
                "cpp": os.access(native.COMPILER, os.X_OK),
                "memory_cgroup": memory.version if memory is not None else 0,
                "why_no_cgroup": granted if isinstance(granted, str) else "",
            }
            gateway.sendall(wire.encode({"kind": "hello", "tier": tier, "facts": facts, "reasons": reasons}))
            supervisor.serve()
            if memory is not None:
                memory.close()
            return
        reasons.append(outcome)
    if memory is not None:
        memory.close()
    gateway.sendall(wire.encode({"kind": "refused", "reasons": reasons}))
