"""One math worker as its owner sees it: started by exec, asked over a socket, killed when it must be."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.envgateway.rewards.math_progress import Progress, make_shared
from services.envgateway.sandbox.bare import procfs, wire

_ROOT = str(Path(__file__).resolve().parents[3])


class WorkerDied(Exception):
    """The worker ended without an answer. ``signal`` is 0 when it exited by itself."""

    def __init__(self, signal: int, stage: int) -> None:
        super().__init__(f"died of signal {signal}" if signal else "ended")
        self.signal = signal
        self.stage = stage


class WorkerOverdue(Exception):
    """It has used the CPU time of a grading. ``stage`` says on what."""

    def __init__(self, stage: int) -> None:
        super().__init__("overdue")
        self.stage = stage


class WorkerStarved(Exception):
    """It has had no processor to work with: the machine's fault."""

    def __init__(self) -> None:
        super().__init__("it got no processor")


_STARVED_FACTOR = 6.0  # wall time over CPU time, before a slow grading is the machine's fault
_SHORTEST_WAIT_S = 0.05


class MathProcess:
    """Serves one question at a time; while it is lent out nobody else has it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        shared = make_shared()
        # vfork and exec: no fork handler of grpc runs, and no secret of our environment goes along
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.envgateway.rewards.math_worker"),
                *(str(theirs.fileno()), str(shared), str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, sys.path)])},
            cwd="/",
            pass_fds=[theirs.fileno(), shared],
            start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which then ends this
        )
        theirs.close()
        self._progress = Progress(shared)
        os.close(shared)
        ours.setblocking(False)
        self._channel = ours
        self._frames = wire.FrameReader()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Wait until it has imported what it needs. Raises ``WorkerDied``."""
        await self._answer()

    async def ask(self, frame: bytes, cpu_s: float) -> dict[str, Any]:
        """The answer to one question.

        Raises:
            WorkerDied, WorkerOverdue, WorkerStarved: no answer; the process is of no more use.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        wait_s = cpu_s
        try:
            await loop.sock_sendall(self._channel, frame)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    return await self._answer()
            except TimeoutError:
                used_s = procfs.usage([self.pid]).cpu_s - self._progress.cpu_before_s
                if used_s >= cpu_s:
                    raise WorkerOverdue(self._progress.stage) from None
                if loop.time() - began >= _STARVED_FACTOR * cpu_s:
                    raise WorkerStarved from None
                wait_s = max(cpu_s - used_s, _SHORTEST_WAIT_S)

    def kill(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()  # it was killed: this takes as long as the kernel needs
        self._progress.close()

    async def _answer(self) -> dict[str, Any]:
        while True:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._channel, 65536)
            except ConnectionResetError:
                data = b""
            if not data:
                raise self._death()
            for head, _ in self._frames.feed(data):
                return head

    def _death(self) -> WorkerDied:
        """Its channel is closed, so it has ended or is about to."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        return WorkerDied(-code if code < 0 else 0, self._progress.stage)
