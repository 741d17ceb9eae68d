"""Ports for servers that a test starts, stops and starts again.

The kernel gives ports of its ephemeral range to every outgoing connection and to every bind of port 0, so a free port of
that range may be taken before its server binds it, or between a kill and the restart. These ports are below that range
and below those that the services look for; each worker of a test run has its own.
"""

from __future__ import annotations

import os
import random

from services.common.system.machine import is_free

_BEGIN, _END = 10_000, 22_000
_PER_WORKER = 400

_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 without a listener, and another one at each call."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    place = random.Random(run).randrange(_END - _BEGIN) + worker * _PER_WORKER
    for step in range(_END - _BEGIN):
        port = _BEGIN + (place + step) % (_END - _BEGIN)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise OSError(f"no port from {_BEGIN} to {_END} is free")
