"""Jobs at their last attempt: each waits until no other job runs at this worker, then runs alone.

So jobs whose failure is transient do not use up their attempts beside a job that kills its workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from services.envgateway.worker.held import Delivery, HeldJobs

_LOOK_S = 0.02


class _LastAttempt:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.task: asyncio.Task[None]


class LastAttempts:
    """``add`` holds a job at once, so that its lease is renewed during the wait; ``make`` is the loop that starts
    waiting jobs."""

    def __init__(self, held: HeldJobs, deal_with: Callable[[Delivery], Coroutine[Any, Any, None]]) -> None:
        self._held = held
        self._deal_with = deal_with
        self._waiting: deque[_LastAttempt] = deque()
        self._came = asyncio.Event()
        self.alone = False  # a waiting job needs the worker alone: take no other

    def add(self, delivery: Delivery) -> None:
        last = _LastAttempt()
        last.task = self._held.hold(delivery, self._when_it_may(last, delivery))
        self._waiting.append(last)
        self._came.set()
        self.alone = True

    async def make(self, is_reading: Callable[[], bool]) -> None:
        """One after the other. ``is_reading``: jobs may still come, from a read that began before."""
        await self._came.wait()
        while self._waiting:
            waiting = sum(not last.task.done() for last in self._waiting)
            if is_reading() or len(self._held) > waiting:
                await asyncio.sleep(_LOOK_S)
                continue
            last = self._waiting.popleft()
            last.go.set()
            await asyncio.wait([last.task])
        self._came.clear()
        self.alone = False
        self._held.changed()

    async def _when_it_may(self, last: _LastAttempt, delivery: Delivery) -> None:
        await last.go.wait()
        await self._deal_with(delivery)
