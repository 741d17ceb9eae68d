"""For ``judge_hostile``: the effect of one program on the others' time, and the tiers available to this user."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest

# U and 0 are for other users than root, who has 2 and 1 (and at 0 would run strangers' code as root)
TIERS = ("2", "1") if os.getuid() == 0 else ("U", "0")
# Bad inputs whose expectation is of tiers 2 and 1 only, and why; that they leave nothing behind is tested at all the same
OTHERWISE = {
    "links-to-host-files": "U and 0 tell a program that a change of mode has worked, and do nothing",
    "renames-its-work-dir": "at U and 0 a slot's directory is the program's to change, and is made anew",
    "fork-bomb": "at 0 the kernel counts the gateway's own processes, too, so the supervisor ends it",
}
_RUNS = 15
_MAPPINGS = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for number in range(60_000):
    place = libc.mmap(None, 4096, 1 + 2 * (number % 2), 0x22, -1, 0)
    if place in (None, ctypes.c_void_p(-1).value):
        break
    if number % 4 == 1:  # shared later, so the resident sets together are more than the limit, and the shares less
        ctypes.memset(place, 1, 1)
for _ in range(6):
    if os.fork() == 0:
        break
time.sleep(2.5)
"""


async def slowed(pool: SandboxPool) -> dict[str, Any]:
    """Milliseconds of a neighbour's small program, alone and beside seven processes with 60,000 mappings."""
    alone = await _median_ms(pool)
    limits = ExecutionLimits(wall_s=4.0)
    busy = asyncio.create_task(pool.run(ExecutionRequest(code=_MAPPINGS, limits=limits)))
    await asyncio.sleep(1.2)
    beside = await _median_ms(pool)
    ended = await busy
    return {"alone_ms": alone, "beside_60000_mappings_ms": beside, "mappings_ended": ended.status.value}


async def _median_ms(pool: SandboxPool) -> float:
    times = []
    for _ in range(_RUNS):
        began = time.monotonic()
        await pool.run(ExecutionRequest(code="print(1)", limits=ExecutionLimits(wall_s=5.0)))
        times.append(1000 * (time.monotonic() - began))
    return round(statistics.median(times), 2)
