"""The queue inside the gateway's own process: two lanes in front of the sandbox.

    interactive (tool calls: a rollout waits) --> |
                                                  | --> at most ``num_slots`` at once --> sandbox or judge
    batch (judging)                           --> |     one slot is never given to batch, where there are several

Interactive jobs go before batch jobs. When too many wait, callers are told to come back; nobody waits beyond the deadline
that came with the job. Knows nothing about grpc.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, overload

from services.common.errors import CapacityError, DeadlineError
from services.envgateway.judge.records import JudgeRequest, JudgeResult, Lane
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

_RETRY_FROM_S = 0.5
_RETRY_AT_MOST_S = 30.0


class Executor(Protocol):
    """Runs one program (``SandboxPool``)."""

    async def run(self, request: ExecutionRequest, queue_timeout_s: float = 60.0) -> ExecutionResult: ...


class Judging(Protocol):
    """Judges one program (``Judge``)."""

    async def judge(self, request: JudgeRequest, queue_timeout_s: float = 60.0) -> JudgeResult: ...


class EmbeddedQueue:
    """``run`` gives a job its turn. Cancelling the caller takes the job out, or kills what runs."""

    def __init__(self, sandbox: Executor, judge: Judging, *, num_slots: int, queue_size: int) -> None:
        self._sandbox = sandbox
        self._judge = judge
        self._num_slots = num_slots
        self._batch_slots = max(1, num_slots - 1)
        self._queue_size = queue_size
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in Lane}
        self._running: Counter[Lane] = Counter()
        self._mean_s = 0.05  # of a job, for telling when to come back
        self.counts: Counter[str] = Counter()

    @overload
    async def run(
        self, job: ExecutionRequest, *, lane: Lane, request_id: str, deadline_s: float
    ) -> ExecutionResult: ...
    @overload
    async def run(self, job: JudgeRequest, *, lane: Lane, request_id: str, deadline_s: float) -> JudgeResult: ...
    async def run(
        self, job: ExecutionRequest | JudgeRequest, *, lane: Lane, request_id: str, deadline_s: float
    ) -> ExecutionResult | JudgeResult:
        """``request_id`` is for people here: joining repeated requests is the membrane's business.

        Raises:
            CapacityError: too many wait already; says when to come back.
            DeadlineError: no turn came within ``deadline_s`` seconds.
        """
        async with self._turn(lane, request_id, deadline_s):
            if isinstance(job, JudgeRequest):
                return await self._judge.judge(job)
            return await self._sandbox.run(job)

    @property
    def gauges(self) -> dict[str, float]:
        return {
            **{f"queue_{lane}_waiting": float(len(waiting)) for lane, waiting in self._waiting.items()},
            **{f"queue_{lane}_running": float(self._running[lane]) for lane in Lane},
            **{f"queue_{name}": float(count) for name, count in self.counts.items()},
        }

    @asynccontextmanager
    async def _turn(self, lane: Lane, request_id: str, deadline_s: float) -> AsyncIterator[None]:
        await self._take(lane, request_id, deadline_s)
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._mean_s += 0.05 * (asyncio.get_running_loop().time() - began - self._mean_s)
            self._running[lane] -= 1
            self._wake()

    async def _take(self, lane: Lane, request_id: str, deadline_s: float) -> None:
        if self._may_start(lane):
            self._running[lane] += 1
            return
        num_waiting = sum(map(len, self._waiting.values()))
        if num_waiting >= self._queue_size:
            self.counts["refused"] += 1
            drained_s = num_waiting * self._mean_s / self._num_slots
            raise CapacityError(
                f"{num_waiting} executions are waiting for {self._num_slots} slots",
                retry_after_s=min(max(drained_s / 2, _RETRY_FROM_S), _RETRY_AT_MOST_S),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        try:
            async with asyncio.timeout(deadline_s):
                await turn
        except TimeoutError:
            self._give_up(lane, turn)
            self.counts["expired"] += 1
            raise DeadlineError(
                f"execution {request_id or 'without id'} got no slot within {deadline_s:g} s ({lane} lane)"
            ) from None
        except asyncio.CancelledError:
            self._give_up(lane, turn)
            raise

    def _give_up(self, lane: Lane, turn: asyncio.Future[None]) -> None:
        """The caller has gone; a turn that had just been given goes to the next."""
        if turn.done() and not turn.cancelled():
            self._running[lane] -= 1
            self._wake()
        elif turn in self._waiting[lane]:
            self._waiting[lane].remove(turn)

    def _may_start(self, lane: Lane) -> bool:
        if sum(self._running.values()) >= self._num_slots or self._waiting[lane]:
            return False
        if lane is Lane.INTERACTIVE:
            return True
        return self._running[Lane.BATCH] < self._batch_slots and not self._waiting[Lane.INTERACTIVE]

    def _wake(self) -> None:
        while sum(self._running.values()) < self._num_slots:
            if self._waiting[Lane.INTERACTIVE]:
                lane = Lane.INTERACTIVE
            elif self._waiting[Lane.BATCH] and self._running[Lane.BATCH] < self._batch_slots:
                lane = Lane.BATCH
            else:
                return
            turn = self._waiting[lane].popleft()
            if not turn.done():
                self._running[lane] += 1
                turn.set_result(None)
