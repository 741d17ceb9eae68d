"""The supervisor's entry: find the strongest tier that really works here, say so, serve.

``argv[1]`` is a JSON object: channel, tiers (strongest first), base_dir, uids (one per slot, tier 1), marks, num_slots.
The first frame to the gateway is ``hello`` with the tier, or ``refused`` with why each tier failed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from . import landlock, seccomp, wire
from .run import Limits
from .slots import Slot
from .supervisor import Supervisor, become_supervisor

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
print(json.dumps({"uid": os.getuid(), "refused": refused}))
"""
_PROBE_LIMITS = Limits(10.0, 10.0, 512 << 20, 16, 65536, 1 << 20, 64)


def _try_tier(gateway: socket.socket, tier: str, settings: dict[str, Any]) -> tuple[Supervisor, list[str]] | str:
    """A supervisor that has run the probe and what was refused in it; or why this tier does not work."""
    uids = settings["uids"] if tier == "1" else [os.getuid()] * settings["num_slots"]
    if tier == "1" and not uids:
        return "tier 1 needs root"
    slots = [
        Slot(index, uid, settings["marks"][index], tier == "1", settings["base_dir"]) for index, uid in enumerate(uids)
    ]
    for slot in slots:
        slot.sweep()
        slot.wipe()
    supervisor = Supervisor(gateway, tier, slots)
    head, (stdout, stderr) = supervisor.run_alone(_PROBE, _PROBE_LIMITS)
    if head["status"] == "OK":
        seen = json.loads(stdout)
        if tier == "0" or ("socket.socket" in seen["refused"] and (tier == "U" or seen["uid"] in uids)):
            return supervisor, seen["refused"]
        head["detail"] = f"the probe was not confined: {seen}"
    supervisor.close()
    error = stderr.decode(errors="replace").strip().splitlines()
    return f"tier {tier}: {head['status']} {head['detail']} {error[-1] if error else ''}".strip()


def main() -> None:
    settings = json.loads(sys.argv[1])
    gateway = socket.socket(fileno=settings["channel"])
    become_supervisor()
    reasons: list[str] = []
    for tier in settings["tiers"]:
        outcome = _try_tier(gateway, tier, settings)
        if not isinstance(outcome, str):
            supervisor, refused = outcome
            facts = {"refused": refused, "seccomp": seccomp.is_supported(), "landlock_abi": landlock.abi_version()}
            gateway.sendall(wire.encode({"kind": "hello", "tier": tier, "facts": facts, "reasons": reasons}))
            supervisor.serve()
            return
        reasons.append(outcome)
    gateway.sendall(wire.encode({"kind": "refused", "reasons": reasons}))
