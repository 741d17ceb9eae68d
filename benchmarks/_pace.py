"""A scripted replica that ends one rollout at a time, at seeded exponential gaps. No measurement of its own."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks._peers import ScriptedReplica
from services.common.pb import pool_pb2

FINISHED_AT = "finished_at"  # metric of a sequence: when its rollout ended, in seconds since the epoch


class PacedReplica(ScriptedReplica):
    """Accepts all orders, and ends running rollouts at ``rate`` per second, in any order."""

    def __init__(self, address: str, rate: float, seed: int, **settings: Any) -> None:
        super().__init__(address, **settings)
        self._rate = rate
        self._rng = random.Random(seed)
        self._playing: list[tuple[pool_pb2.RunTaskGroup, int, float]] = []

    def start(self) -> None:
        super().start()
        self._tasks.start(self._end_rollouts(), "replica.pace")

    def _take(self, order: pool_pb2.RunTaskGroup) -> None:
        self.orders.append(order)
        self._running[order.task_group_id] = len(order.indices)
        self._playing += [(order, index, time.time()) for index in order.indices]

    async def _end_rollouts(self) -> None:
        due = time.perf_counter()
        while True:
            due += self._rng.expovariate(self._rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self._playing:
                place = self._rng.randrange(len(self._playing))
                self._playing[place], self._playing[-1] = self._playing[-1], self._playing[place]
                self._end(*self._playing.pop())

    def _end(self, order: pool_pb2.RunTaskGroup, index: int, started_at: float) -> None:
        name = order.task_group_id
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        trajectory = self.rollouts.trajectory(order, index, self.held, started_at)
        for sequence in trajectory.sequences:
            sequence.metrics[FINISHED_AT] = time.time()
        self.put(pool_pb2.NumberedRecord(trajectory=trajectory))
