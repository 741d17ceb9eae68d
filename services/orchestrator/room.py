"""A start needs a little free disk: SQLite makes files of its own before it reads anything.

An orchestrator that was killed while the disk was full waits here until there is room, so that the run goes on by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from services.common import disk

log = structlog.get_logger()

LOOK_S = 0.5


async def wait_for_room(run_dir: Path, free_bytes: Callable[[Path], int] = disk.free_bytes) -> None:
    """Return when the run directory's disk has room to start.

    Without a deadline: there is nothing else to do, and ending would only mean that nobody goes on when there is room.
    The launcher, to whom nobody answers meanwhile, tells why.
    """
    told = False
    while (free := free_bytes(run_dir)) < disk.RESERVE_BYTES:
        if not told:
            log.error(
                "orchestrator.no_free_disk", free_bytes=free, place=str(run_dir), effect="it waits for room to start"
            )
        told = True
        await asyncio.sleep(LOOK_S)
    if told:
        log.info("orchestrator.room_again", place=str(run_dir))
