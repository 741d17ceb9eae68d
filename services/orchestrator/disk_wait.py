"""Waits for free disk space before the start: SQLite makes its own files before the first read.

An orchestrator that was killed on a full disk waits here until there is space, so that the run continues by itself.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import structlog

from services.common.system.disk import RESERVE_BYTES

log = structlog.get_logger()

LOOK_S = 0.5


async def wait_for_room(run_dir: Path) -> None:
    """Return when the run directory's disk has space to start.

    Has no deadline: an exit would only stop the run for good, even after space becomes free. The launcher reports the
    reason while the orchestrator does not answer.
    """
    told = False
    while (free := shutil.disk_usage(run_dir).free) < RESERVE_BYTES:
        if not told:
            log.error(
                "orchestrator.no_free_disk",
                free_bytes=free,
                place=str(run_dir),
                effect="the start waits for free space",
            )
        told = True
        await asyncio.sleep(LOOK_S)
    if told:
        log.info("orchestrator.room_again", place=str(run_dir))
