"""Loops over Redis that survive its outages: they retry, and log one line at the start and one at the end of an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.common.aio import backoff
from services.envgateway.queue.streams.connection import UNREACHABLE, raise_if_cancelled

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

Work = Callable[[], Awaitable[None]]


async def _no_operation() -> None:
    return


class RedisLoops:
    """State that all loops of one process share: whether Redis is ``connected``."""

    def __init__(
        self,
        on_failure: Callable[[BaseException, bool], None],
        on_return: Callable[[], None],
        mend: Work = _no_operation,
    ) -> None:
        """``on_failure`` gets the error of a loop, and whether Redis was connected before; ``mend`` runs after the
        pause."""
        self._on_failure = on_failure
        self._on_return = on_return
        self._mend = mend
        self.connected = True

    async def for_ever(self, work: Work) -> None:
        """Repeat the call. Ends with an error that is not a failure of Redis, which only a bug can raise."""
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await work()
                raise_if_cancelled()
                pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                if not self.connected:
                    self.connected = True
                    self._on_return()
            except UNREACHABLE as error:
                was_connected, self.connected = self.connected, False
                self._on_failure(error, was_connected)
                await asyncio.sleep(next(pauses))
                await self._mend()
