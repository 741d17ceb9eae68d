"""A child process in a group of its own, which ends with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def process_group(*command: str, **options: Any) -> AsyncIterator[Process]:
    """Start a command, as ``asyncio.create_subprocess_exec`` does, and kill its whole group at the end of the block.

    A cancellation that arrives while the process starts kills the group too: asyncio alone would kill the process and
    leave its children.

    Raises:
        OSError: the command cannot be started.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, start_new_session=True, **options))
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):  # then nothing was started
            await _kill(await starting)
        raise
    try:
        yield process
    finally:
        await _kill(process)


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()  # ends: it was killed
