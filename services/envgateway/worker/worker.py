"""A worker: takes jobs of both lanes from Redis, runs them in its own slots, answers their gateways.

    take (one loop a lane) ──┐
    take over (of the dead) ─┼─> held, lease renewed ──> own lanes and slots ──> answer ──> send
    last attempt, alone ─────┘        ^
    listen (withdrawn) ── kill ───────'

Rules: a job is answered, given back or still held, never forgotten; a job whose workers keep dying is answered with
INFRA_ERROR after ``max_attempts``, and its last attempt has a worker to itself, so that other jobs do not use up their
attempts beside that job. Every loop survives any failure of Redis; jobs that run meanwhile are answered when Redis is
back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections import Counter
from contextlib import suppress
from functools import partial

import structlog

from services.common.aio import TaskOwner
from services.common.errors import InvalidRequestError, RollmillError
from services.common.telemetry.gateway_queue import Lane
from services.common.telemetry.log_events import LogEvent
from services.envgateway.queue.base import Job, JobResult, Runner, infrastructure_failure, is_about_the_program
from services.envgateway.queue.codec import decode_job, encode_result
from services.envgateway.queue.streams.connection import UNREACHABLE, Client, raise_if_cancelled
from services.envgateway.queue.streams.loops import RedisLoops
from services.envgateway.queue.streams.names import Names
from services.envgateway.queue.turns import Turns
from services.envgateway.sandbox.bare.slot_queue import batch_share
from services.envgateway.sandbox.records import ExecutionRequest
from services.envgateway.worker.held import Delivery, HeldJobs, LastAttempts
from services.envgateway.worker.leases import Leases

log = structlog.get_logger()

_FAILURES_IN_A_ROW = 3
_FIRST_BACKOFF_S = 1.0


class WorkerBackoff:
    """A time without jobs after repeated failures of the sandbox, in which other workers run them. Longer after each
    further failure, up to ``longest_s``; over with the first job that runs."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._failures = 0
        self._until = 0.0

    def note(self, ran: bool) -> None:
        """Record a job that ran here, or one that the machinery failed."""
        self._failures = 0 if ran else self._failures + 1
        over = self._failures - _FAILURES_IN_A_ROW
        if over >= 0:
            self._until = time.monotonic() + min(self._longest_s, _FIRST_BACKOFF_S * 2.0 ** min(over, 30))
        elif ran:
            self._until = 0.0

    @property
    def left_s(self) -> float:
        """Seconds to go; 0 when there is no reason to rest."""
        return max(0.0, self._until - time.monotonic())


_AHEAD_S = 0.02  # jobs that the slots finish in this time are taken ahead, to hide the way to Redis
_MOST_AHEAD_PER_SLOT = 4
_REST_AT_ONCE_S = 0.5
_LOOKS_A_LEASE = 3
_FORGET_CONSUMERS_EVERY = 1000  # looks
_SEND_AT_END_S = 5.0


class Worker:
    """Takes and runs jobs. ``run`` until cancelled or ``stop`` is called; ``drain_s`` bounds the end of running jobs."""

    def __init__(
        self,
        client: Client,
        names: Names,
        runner: Runner,
        *,
        num_slots: int,
        lease_s: float,
        max_attempts: int,
        about: dict[str, str] | None = None,
        name: str = "",
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client = client
        self._names = names
        self._runner = runner
        self._num_slots = num_slots
        self._batch_slots = batch_share(num_slots)
        self._turns = Turns(num_slots=num_slots, batch_slots=self._batch_slots, lane_size=1 << 30, sends_ahead=True)
        self._leases = Leases(client, names, self.name, lease_s)
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._about = about or {}
        self.held = HeldJobs()
        self._backoff = WorkerBackoff(longest_s=lease_s)
        self._last_attempts = LastAttempts(self.held, self._deal_with)
        self._reads = 0  # of the streams, under way
        self._no_reads = asyncio.Event()
        self._no_reads.set()
        self._stopping = asyncio.Event()
        self._looks = 0
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        """Take no more; ``run`` returns when running jobs have ended."""
        self._stopping.set()

    async def run(self, drain_s: float) -> None:
        """Raises the error of a broken loop, which only a bug can cause; the leases of running jobs then expire."""
        try:
            await self._leases.make_groups()
        except UNREACHABLE as error:
            log.warning("worker.no_redis_yet", error=str(error))  # the loops below go on trying
        loops = RedisLoops(self._redis_failed, lambda: log.info("worker.redis_back"), self._make_groups)
        async with TaskOwner() as taking, TaskOwner() as keeping:
            for lane in Lane:
                taking.start(loops.for_ever(partial(self._take, lane)), f"worker: take {lane}")
            make = partial(self._last_attempts.make, lambda: self._reads > 0)
            taking.start(loops.for_ever(make), "worker: last attempts")
            keeping.start(loops.for_ever(self._maintain), "worker: leases")
            keeping.start(loops.for_ever(self._listen), "worker: withdrawn jobs")
            keeping.start(loops.for_ever(self._leases.send_answers), "worker: answers")
            log.info(LogEvent.WORKER_READY, worker=self.name, slots=self._num_slots, **self._about)
            stop = taking.start(self._stopping.wait(), "worker: stop")
            broken = [tasks.start(tasks.failed(), "worker: first failure") for tasks in (taking, keeping)]
            ended, _ = await asyncio.wait((stop, *broken), return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                await task
            await self._no_reads.wait()  # within a second; a cut-off call would lose the jobs that Redis just gave
            await taking.close()
            await self._drain(drain_s)

    @property
    def gauges(self) -> dict[str, float]:
        return {**self._turns.gauges, **{name: float(count) for name, count in self.counts.items()}}

    def _redis_failed(self, error: BaseException, was_connected: bool) -> None:
        if was_connected:
            log.warning("worker.redis_lost", error=str(error), running=len(self.held))

    async def _make_groups(self) -> None:
        """Redis may be another one, without our group."""
        with suppress(*UNREACHABLE):  # the next round tells
            await self._leases.make_groups()

    # -- taking ---------------------------------------------------------------------------------------------------

    async def _take(self, lane: Lane) -> None:
        room = self._room(lane)
        if room <= self._ahead(lane) // 2 or self._last_attempts.alone or self._stopping.is_set():
            await self.held.wait_for_change()
            return
        if self._backoff.left_s:
            await asyncio.sleep(min(self._backoff.left_s, _REST_AT_ONCE_S))
            return
        self._reads += 1
        self._no_reads.clear()
        try:
            deliveries = await self._leases.take(lane, room)
        finally:
            self._reads -= 1
            if not self._reads:
                self._no_reads.set()
        for delivery in deliveries:
            self._hold(delivery)

    def _slots(self, lane: Lane) -> int:
        return self._batch_slots if lane is Lane.BATCH else self._num_slots

    def _room(self, lane: Lane) -> int:
        """Jobs of this lane to take now: its slots, and as many ahead as are finished in a blink."""
        return self._slots(lane) + self._ahead(lane) - self.held.count(lane)

    def _ahead(self, lane: Lane) -> int:
        return int(self._slots(lane) * min(_MOST_AHEAD_PER_SLOT, _AHEAD_S / max(self._turns.mean_s, 1e-3)))

    def _hold(self, delivery: Delivery) -> asyncio.Task[None]:
        return self.held.hold(delivery, self._deal_with(delivery))

    async def _take_over(self) -> None:
        """Take jobs over even without a free slot, up to a bound: they have waited longest, and new jobs would fill all
        slots first."""
        for lane in Lane:
            slots = self._slots(lane)
            bound = min(slots, (1 + _MOST_AHEAD_PER_SLOT) * slots - self.held.count(lane))
            if bound <= 0 or self._last_attempts.alone or self._backoff.left_s:
                continue
            for delivery in await self._leases.take_over(lane, bound):
                if delivery in self.held:
                    continue  # our own, from before Redis was away
                self.counts["taken_over"] += 1
                log.info("worker.taken_over", job=delivery.job_id, attempt=delivery.attempt)
                if delivery.attempt == self._max_attempts > 1:
                    self._last_attempts.add(delivery)
                else:
                    self._hold(delivery)

    # -- running --------------------------------------------------------------------------------------------------

    async def _deal_with(self, delivery: Delivery) -> None:
        """Handle one job: answer, drop or give back."""
        try:
            if not await self._leases.is_anybody_waiting(delivery):
                self.counts["dropped"] += 1  # first: without the entry a check of the leases may end this task
                await self._leases.drop(delivery)
                return
            raise_if_cancelled()
            result = await self._result(delivery)
            if is_about_the_program(result) or delivery.attempt >= self._max_attempts:
                self._leases.answer(delivery, encode_result(result))
                self.counts["answered"] += 1
            else:
                self.counts["given_back"] += 1
                await self._leases.give_back([delivery], attempt_counts=True)
        except UNREACHABLE as error:
            # An existing entry stays leased to us; when the lease expires, another worker takes the job over.
            log.warning("worker.job_let_go", job=delivery.job_id, error=str(error))

    async def _result(self, delivery: Delivery) -> JobResult:
        try:
            job: Job = decode_job(delivery.payload)
        except InvalidRequestError as error:
            return infrastructure_failure(ExecutionRequest(code=""), f"worker {self.name}: {error.message}")
        if delivery.attempt > self._max_attempts:
            log.error("worker.poison", job=delivery.job_id, attempts=delivery.attempt - 1)
            self.counts["poison"] += 1
            detail = f"{delivery.attempt - 1} workers died or gave up while they ran this job; it is not tried again"
            return infrastructure_failure(job, detail)
        try:
            result = await self._turns.run(delivery.lane, "", lambda: self._runner.run(job, delivery.lane))
        except RollmillError as error:
            result = infrastructure_failure(job, f"worker {self.name}: {error.message}")
        except Exception as error:  # the boundary of a job: the trace stays here, the gateway gets an answer
            log.exception("worker.job_failed", job=delivery.job_id)
            result = infrastructure_failure(job, f"worker {self.name}: {type(error).__name__}")
        self._backoff.note(is_about_the_program(result))
        return result

    # -- leases ---------------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        """Report that this worker lives, renew held leases, take over the leases of dead workers."""
        await self._leases.report({"slots": self._num_slots, "busy": self._turns.num_running, **self._about})
        for lane in Lane:
            held = self.held.of(lane)
            ours = await self._leases.renew(lane, held)
            for entry in held:
                if entry not in ours:
                    self.counts["lost_leases"] += self.held.kill(lane, entry)
        if not self._stopping.is_set():
            await self._take_over()
        if self._looks % _FORGET_CONSUMERS_EVERY == 0:
            await self._leases.forget_consumers()
        self._looks += 1
        await asyncio.sleep(self._lease_s / _LOOKS_A_LEASE)

    async def _listen(self) -> None:
        """Kill jobs without a waiting caller. The lease makes up for a missed message: the job's entry is gone."""
        async with self._client.pubsub() as channel:
            await channel.subscribe(self._names.withdrawn)
            while True:
                message = await channel.get_message(ignore_subscribe_messages=True, timeout=1.0)
                if message is not None and self.held.kill_job(message["data"].decode()):
                    self.counts["withdrawn"] += 1
                raise_if_cancelled()

    async def _drain(self, drain_s: float) -> None:
        """Let running jobs end; give back the rest; send pending answers."""
        log.info("worker.draining", running=len(self.held), drain_s=drain_s)
        with suppress(TimeoutError):  # the rest is given back
            async with asyncio.timeout(drain_s):
                await self.held.wait_until_empty()
        left = self.held.all()
        for _, task in left:
            task.cancel()
        if left:
            await asyncio.wait([task for _, task in left])
        with suppress(*UNREACHABLE, TimeoutError):  # leases and names expire by themselves
            async with asyncio.timeout(_SEND_AT_END_S):
                await self._leases.give_back([delivery for delivery, _ in left], attempt_counts=False)
                await self._leases.all_sent.wait()
                await self._leases.leave()
        log.info("worker.stopped", given_back=len(left))
