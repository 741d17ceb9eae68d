"""The jobs that a worker holds: leased from a stream, on their way through its own slots.

Knows nothing of Redis but names of entries.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from services.envgateway.judge.records import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An entry of a jobs stream in this worker's hands. ``attempt`` counts from 1, over all workers."""

    lane: Lane
    entry: bytes
    job_id: str
    gateway: str
    payload: bytes = field(repr=False)
    attempt: int = 1


class HeldJobs:
    """Deliveries in hand, each with the task that deals with it."""

    def __init__(self) -> None:
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._deliveries: dict[bytes, Delivery] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._deliveries)

    def __contains__(self, entry: bytes) -> bool:
        return entry in self._deliveries

    def count(self, lane: Lane) -> int:
        return Counter(delivery.lane for delivery in self._deliveries.values())[lane]

    def of(self, lane: Lane) -> list[bytes]:
        """Entries in hand, for renewing their leases."""
        return [entry for entry, delivery in self._deliveries.items() if delivery.lane is lane]

    def hold(self, delivery: Delivery, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work; the delivery is in hand until it ends."""
        entry = delivery.entry
        self._deliveries[entry] = delivery
        task = self._tasks[entry] = asyncio.create_task(work, name=f"job {delivery.job_id}")
        task.add_done_callback(lambda _: self._ended(entry))
        return task

    def kill(self, entry: bytes) -> None:
        """It is no longer ours, or nobody waits for it."""
        if entry in self._tasks:
            self._tasks[entry].cancel()

    def kill_job(self, job_id: str) -> bool:
        entries = [entry for entry, delivery in self._deliveries.items() if delivery.job_id == job_id]
        for entry in entries:
            self.kill(entry)
        return bool(entries)

    def all(self) -> list[tuple[Delivery, asyncio.Task[None]]]:
        return [(self._deliveries[entry], task) for entry, task in self._tasks.items()]

    def changed(self) -> None:
        """Wake those that wait for a change."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Until a job ends, or ``changed`` is called."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_until_empty(self) -> None:
        while self._deliveries:
            await self.wait_for_change()

    def _ended(self, entry: bytes) -> None:
        del self._tasks[entry], self._deliveries[entry]
        self._changed.set()
