"""One math worker as its owner sees it: started by exec, asked over a socket, killed when it must be."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from services.envgateway.child import Child, ChildDied
from services.envgateway.rewards.math_progress import Progress, make_shared
from services.envgateway.sandbox.bare import procfs

_MODULE = "services.envgateway.rewards.math_worker"


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
        shared = make_shared()
        self._child = Child(_MODULE, [str(shared), str(os.getpid())], pass_fds=[shared])
        self._progress = Progress(shared)
        os.close(shared)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def start(self) -> None:
        """Wait until it has imported what it needs. Raises ``WorkerDied``."""
        try:
            await self._child.next_answer()
        except ChildDied:
            raise self._death() from None

    async def ask(self, frame: bytes, cpu_s: float) -> dict[str, Any]:
        """The answer to one question.

        Raises:
            WorkerDied, WorkerOverdue, WorkerStarved: no answer; the process is of no more use.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        wait_s = cpu_s
        answer = asyncio.ensure_future(self._child.ask(frame))
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=wait_s)
                if done:
                    return answer.result()
                used_s = procfs.usage([self.pid]).cpu_s - self._progress.cpu_before_s
                if used_s >= cpu_s:
                    raise WorkerOverdue(self._progress.stage)
                if loop.time() - began >= _STARVED_FACTOR * cpu_s:
                    raise WorkerStarved
                wait_s = max(cpu_s - used_s, _SHORTEST_WAIT_S)
        except ChildDied:
            raise self._death() from None
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)  # nobody reads the channel when it is closed

    def kill(self) -> None:
        self._child.kill()
        self._progress.close()

    def _death(self) -> WorkerDied:
        return WorkerDied(self._child.death_signal(), self._progress.stage)
