"""Loops over Redis that outlive its absences: they try again, and say once that it is away and once that it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.common.aio import backoff
from services.envgateway.queue.streams.connection import UNREACHABLE, heed_cancellation

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

Work = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    return


class RedisLoops:
    """What all loops of one process know together: whether Redis is ``connected``."""

    def __init__(
        self, on_failure: Callable[[BaseException, bool], None], on_return: Callable[[], None], mend: Work = _nothing
    ) -> None:
        """``on_failure`` is told what a loop met, and whether Redis was there until then; ``mend`` comes after the pause."""
        self._on_failure = on_failure
        self._on_return = on_return
        self._mend = mend
        self.connected = True

    async def for_ever(self, work: Work) -> None:
        """Do it again and again. Ends with what is no failure of Redis, which only a bug can raise."""
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await work()
                heed_cancellation()
                pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                if not self.connected:
                    self.connected = True
                    self._on_return()
            except UNREACHABLE as error:
                was_connected, self.connected = self.connected, False
                self._on_failure(error, was_connected)
                await asyncio.sleep(next(pauses))
                await self._mend()
