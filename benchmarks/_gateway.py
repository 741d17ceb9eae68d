"""A gateway process beside a benchmark. Shared by the scripts of this folder."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks._processes import ROOT
from services.common.telemetry.logs import LogEvent

_START_S = 60.0


@asynccontextmanager
async def gateway(settings: Mapping[str, Any]) -> AsyncIterator[tuple[str, int]]:
    """The gateway of recipes/quickstart with ``settings`` of ``envgateway`` changed: its address and its process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.envgateway", "--recipe", str(ROOT / "recipes" / "quickstart")),
        *(part for name, value in settings.items() for part in ("--set", f"envgateway.{name}={value}")),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    address = ""
    async with asyncio.timeout(_START_S):
        while not address:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise RuntimeError("the gateway did not start")
            if LogEvent.SERVER_READY in line:
                address = next(word.partition("=")[2] for word in line.split() if word.startswith("address="))
    reading = asyncio.create_task(process.stderr.read(), name="read the gateway's log")
    try:
        yield address, process.pid
    finally:
        process.terminate()
        await process.wait()
        await reading
