"""A server that can be killed, and a proxy whose sockets can. Shared by the parts of ``dead_sockets.py``."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks._processes import ROOT

START_S = 60.0


class Server:
    """The server of an example as a process that can be killed and started again at its port."""

    def __init__(self, port: int, example: str, *arguments: str) -> None:
        self.port = port
        self._command = [sys.executable, str(ROOT / "examples" / example), *arguments]
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.get(f"http://127.0.0.1:{self.port}/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def kill_and_start(self) -> None:
        await self.kill()
        await self.start()

    async def stand_still(self, seconds: float) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def proxy(listen: int, target: int, mode: Path) -> AsyncIterator[None]:
    _set(mode, "pass")
    script = str(ROOT / "benchmarks" / "_stall_proxy.py")
    process = await asyncio.create_subprocess_exec(sys.executable, script, str(listen), str(target), str(mode))
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def during(mode: Path, word: str, seconds: float) -> None:
    _set(mode, word)
    await asyncio.sleep(seconds)
    _set(mode, "pass")


def _set(mode: Path, word: str) -> None:
    mode.write_text(word)
