"""The jobs that a worker holds: leased from a stream, on their way through its own slots.

Of Redis only names of entries are known here.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from services.common.telemetry.gateway_queue import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An entry of a jobs stream in this worker's hands. ``attempt`` counts from 1, over all workers."""

    lane: Lane
    entry: bytes
    job_id: str
    gateway: str
    payload: bytes = field(repr=False)
    attempt: int = 1

    @property
    def place(self) -> Place:
        """Lane and entry id: each lane's stream counts its own entries, so an id alone may name one in each."""
        return self.lane, self.entry


Place: TypeAlias = tuple[Lane, bytes]


class HeldJobs:
    """Deliveries in hand, each with the task that runs the job."""

    def __init__(self) -> None:
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._deliveries: dict[Place, Delivery] = {}
        self._of_job: defaultdict[str, set[Place]] = defaultdict(set)
        self._count: Counter[Lane] = Counter()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._deliveries)

    def __contains__(self, delivery: Delivery) -> bool:
        return delivery.place in self._deliveries

    def count(self, lane: Lane) -> int:
        return self._count[lane]

    def of(self, lane: Lane) -> list[bytes]:
        """Entries in hand, for renewing their leases."""
        return [entry for of_lane, entry in self._deliveries if of_lane is lane]

    def hold(self, delivery: Delivery, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work; the delivery is in hand until the work ends."""
        place = delivery.place
        assert place not in self._deliveries, f"{place} is in hand already"
        self._deliveries[place] = delivery
        self._of_job[delivery.job_id].add(place)
        self._count[delivery.lane] += 1
        task = self._tasks[place] = asyncio.create_task(work, name=f"job {delivery.job_id}")
        task.add_done_callback(lambda _: self._ended(delivery))
        return task

    def kill(self, lane: Lane, entry: bytes) -> bool:
        """The job is no longer ours, or has no waiting caller. False when the job is not in hand."""
        task = self._tasks.get((lane, entry))
        return task is not None and task.cancel()

    def kill_job(self, job_id: str) -> bool:
        killed = [self.kill(*place) for place in self._of_job.get(job_id, ())]
        return any(killed)

    def all(self) -> list[tuple[Delivery, asyncio.Task[None]]]:
        return [(self._deliveries[place], task) for place, task in self._tasks.items()]

    def changed(self) -> None:
        """Wake those that wait for a change."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Wait until a job ends, or ``changed`` is called."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_until_empty(self) -> None:
        while self._deliveries:
            await self.wait_for_change()

    def _ended(self, delivery: Delivery) -> None:
        place = delivery.place
        del self._tasks[place], self._deliveries[place]
        self._count[delivery.lane] -= 1
        places = self._of_job[delivery.job_id]
        places.discard(place)
        if not places:
            del self._of_job[delivery.job_id]
        self._changed.set()


_LOOK_S = 0.02


class _LastAttempt:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.task: asyncio.Task[None]


class LastAttempts:
    """Jobs at their last attempt: each waits until no other job runs at this worker, then runs alone. So jobs whose
    failure is transient do not use up their attempts beside a job that kills its workers.

    ``add`` holds a job at once, so that its lease is renewed during the wait; ``make`` is the loop that starts
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
