"""Decides the next user of a slot: interactive before batch, batch within its share of the slots, clients in turn, bounded.

    interactive (a rollout waits) --> |
                                      | --> at most ``num_slots`` at once
    batch (judging)               --> |     at most ``batch_slots`` of them for batch

While jobs are brief, some are let through ahead of a slot, so that no slot is idle between two of them; these wait at
the sandbox, which lets the interactive go first and keeps the share of batch as well. A full lane refuses the client
with the most waiting jobs there, not the last one to arrive.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.errors import CapacityError
from services.common.telemetry.gateway_queue import Lane, waiting_gauge
from services.envgateway.queue.round_robin_queue import RoundRobinQueue

_RETRY_FROM_S = 0.5
_RETRY_AT_MOST_S = 30.0
_BRIEF_S = 0.03  # of a turn, on average

_Turn = asyncio.Future[None]
Result = TypeVar("Result")


class Turns:
    """``await turns.run(lane, client, work)``: while the work is done, a slot is the caller's."""

    def __init__(self, *, num_slots: int, batch_slots: int, lane_size: int, sends_ahead: bool = False) -> None:
        """``sends_ahead``: behind the slots is a sandbox, where a job may wait for one."""
        self._lane_size = lane_size
        self._sends_ahead = sends_ahead
        self._waiting: dict[Lane, RoundRobinQueue[_Turn]] = {lane: RoundRobinQueue() for lane in Lane}
        self._running: Counter[Lane] = Counter()
        self._mean_s = 0.05  # of a job, for telling when to come back
        self.counts: Counter[str] = Counter()
        self.num_slots = num_slots
        self._batch_slots = batch_slots

    def resize(self, num_slots: int, batch_slots: int) -> None:
        """Change the number of slots, from the next turn on."""
        self.num_slots = num_slots
        self._batch_slots = batch_slots
        self._wake()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        return sum(self._running.values())

    @property
    def mean_s(self) -> float:
        """Mean duration of recent turns."""
        return self._mean_s

    @property
    def gauges(self) -> dict[str, float]:
        return {
            **{waiting_gauge(lane): float(len(waiting)) for lane, waiting in self._waiting.items()},
            **{f"queue_{lane}_running": float(self._running[lane]) for lane in Lane},
            "queue_mean_s": self._mean_s,
            **{f"queue_{name}": float(count) for name, count in self.counts.items()},
        }

    async def run(
        self, lane: Lane, client: str, work: Callable[[], Awaitable[Result]], wait_s: float | None = None
    ) -> Result:
        """Await a call while the caller holds a slot.

        Raises ``CapacityError`` when too many wait, or after a wait of ``wait_s``. Cancelling the waiter gives up its place.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._take(lane, client)
        except TimeoutError:
            raise self._full(lane) from None
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            return await work()
        finally:
            self._mean_s += 0.05 * (clock() - began - self._mean_s)
            self._running[lane] -= 1
            self._wake()

    async def _take(self, lane: Lane, client: str) -> None:
        if self._may_start(lane) and not self._waiting[lane]:
            self._running[lane] += 1
            return
        self._make_room(lane, client)
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._waiting[lane].add(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not self._waiting[lane].remove(client, turn) and not turn.cancelled() and turn.exception() is None:
                self._running[lane] -= 1  # the turn was given in the very moment of leaving: pass the turn on
                self._wake()
            raise

    def _make_room(self, lane: Lane, client: str) -> None:
        waiting = self._waiting[lane]
        if len(waiting) < self._lane_size:
            return
        self.counts["refused"] += 1
        longest = waiting.longest()
        if waiting.count(client) + 1 >= waiting.count(longest):
            raise self._full(lane)
        turn = waiting.take_newest(longest)
        if not turn.done():
            turn.set_exception(self._full(lane))

    def _full(self, lane: Lane) -> CapacityError:
        num_waiting = len(self._waiting[lane])
        drained_s = num_waiting * self._mean_s / self.num_slots
        return CapacityError(
            f"{num_waiting} executions are waiting in the {lane} lane for {self.num_slots} slots",
            retry_after_s=min(max(drained_s / 2, _RETRY_FROM_S), _RETRY_AT_MOST_S),
        )

    def _may_start(self, lane: Lane) -> bool:
        ahead = self.num_slots if self._sends_ahead and self._mean_s < _BRIEF_S else 0
        interactive, batch = self._running[Lane.INTERACTIVE], self._running[Lane.BATCH]
        if interactive + min(batch, self._batch_slots) >= self.num_slots + ahead:
            return False
        if lane is Lane.INTERACTIVE:
            return True
        return batch < self._batch_slots + ahead and not self._waiting[Lane.INTERACTIVE]

    def _wake(self) -> None:
        for lane in (Lane.INTERACTIVE, Lane.BATCH):
            while self._waiting[lane] and self._may_start(lane):
                turn = self._waiting[lane].take()
                if not turn.done():
                    self._running[lane] += 1
                    turn.set_result(None)
