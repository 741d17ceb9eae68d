"""Users and marks for slots, shared fairly with other gateways on this machine; and the end of dead gateways' programs.

A slot user is a number without an account. An abstract socket holds the user; the kernel frees the socket at any death
of the gateway. The gateway rather than the supervisor holds the socket, so that a restarted supervisor finds, and
sweeps, the same users.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
from pathlib import Path

import structlog

from services.envgateway.sandbox.bare import procfs
from services.envgateway.sandbox.bare.supervisor.slots import kill_user

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
