"""A worker: takes jobs of both lanes from Redis, runs them in its own sandbox, answers their gateways.

    take (one loop a lane) ──┐
    take over (of the dead) ─┴─> held, lease renewed ──> sandbox ──> answer
                                        ^
    look (withdrawn, lost) ── kill ─────'

Rules: a job is answered, given back or still held, never forgotten; a job whose workers keep dying is answered with
INFRA_ERROR after ``max_attempts``, and its last attempt has a worker to itself, so that other jobs do not use up their
attempts beside that job. Every loop survives any failure of Redis; jobs that run meanwhile are answered when Redis is
back. The sandbox decides which of the held jobs runs next.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog
from redis.exceptions import ResponseError

from extras.farm.codec import decode, encode
from extras.farm.queue import (
    BLOCK_S,
    FIRST_PAUSE_S,
    GATEWAY,
    GROUP,
    ID,
    LONGEST_PAUSE_S,
    UNREACHABLE,
    Client,
    Keys,
    RedisLoops,
    connect,
    finish,
)
from services.common.aio import TaskOwner, backoff
from services.common.config.envgateway import QueueConfig
from services.common.config.processes import MetricsConfig
from services.common.errors import InvalidRequestError, RollmillError
from services.common.prometheus import Metric, metrics_server
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import Lane, ProcessStatus
from services.envgateway.app import RUNNING_METRICS
from services.envgateway.judge.judge import Judge
from services.envgateway.queue import (
    Job,
    JobResult,
    Runner,
    infrastructure_failure,
    is_about_the_program,
    sandbox_runner,
)
from services.envgateway.rewards.pool import comparisons
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from services.envgateway.sandbox.scheduler import batch_share

log = structlog.get_logger()
METRICS = (
    *RUNNING_METRICS,
    Metric("rollmill_worker_jobs_total", "counter", "Jobs by outcome, at this worker.", "{event}"),
)

MAX_ATTEMPTS = 3  # of one job; the last is made alone, and its failure is one of the infrastructure
_DRAIN_GRACE_S = 5.0
RESULTS_EXPIRE_S = 3600
_AHEAD_S = 0.02  # jobs that the slots finish in this time are taken ahead, to hide the way to Redis
_MOST_AHEAD_PER_SLOT = 4
_FAILURES_IN_A_ROW = 3
_FIRST_BACKOFF_S = 1.0
_REST_AT_ONCE_S = 0.5
_LOOKS_A_LEASE = 3
_LONGEST_LOOK_PAUSE_S = 1.0  # a job without a waiting caller runs for so long at most
_LEAVE_S = 5.0

# A worker answers a job: the answer is in its gateway's list and the job is gone, or neither.
#   keys: the list, the job, the stream; arguments: seconds that a list lasts, the group, the entry, the job's id with the result
_ANSWER = """
redis.call('RPUSH', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
redis.call('XACK', KEYS[3], ARGV[2], ARGV[3])
redis.call('XDEL', KEYS[3], ARGV[3])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An entry of a stream of jobs in this worker's hands. ``attempt`` counts from 1, over all workers."""

    lane: Lane
    entry: bytes
    job_id: str
    gateway: str
    payload: bytes = field(repr=False)
    attempt: int = 1


class Worker:
    """Takes and runs jobs. ``run`` until cancelled or ``stop`` is called; ``drain_s`` bounds the end of running jobs."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        runner: Runner,
        *,
        num_slots: int,
        lease_s: float,
        max_attempts: int = MAX_ATTEMPTS,
        about: dict[str, str] | None = None,
        name: str = "",
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client = client
        self._keys = keys
        self._runner = runner
        self._slots = {Lane.INTERACTIVE: num_slots, Lane.BATCH: batch_share(num_slots)}
        self._lease_s = lease_s
        self._lease_ms = int(lease_s * 1000)
        self._max_attempts = max_attempts
        self._about = about or {}
        # by lane and entry: each lane's stream counts its own entries, so an entry alone may name one in each
        self.held: dict[tuple[Lane, bytes], tuple[Delivery, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._mean_s = 0.05  # of a job
        self._failures = 0  # of the sandbox, in a row
        self._rests_until = 0.0
        self._last_attempt = asyncio.Lock()
        self._reads = 0  # of the streams, under way
        self._cursors = dict.fromkeys(Lane, "0-0")  # where the next search for the jobs of the dead goes on
        self._loops = RedisLoops("worker", lambda: len(self.held), self._mend)
        self._stopping = False
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        """Take no more; ``run`` returns when running jobs have ended."""
        self._stopping = True
        self._changed.set()

    async def run(self, drain_s: float) -> None:
        """Raises the error of a broken loop, which only a bug can cause; the leases of running jobs then expire."""
        await self._mend()
        async with TaskOwner() as taking, TaskOwner() as keeping:
            for lane in Lane:
                taking.start(self._loops.for_ever(partial(self._take, lane)), f"worker: take {lane}")
            keeping.start(self._loops.for_ever(self._look), "worker: look")
            log.info(LogEvent.WORKER_READY, worker=self.name, slots=self._slots[Lane.INTERACTIVE], **self._about)
            stop = taking.start(self._stopped(), "worker: stop")
            broken = [tasks.start(tasks.failed(), "worker: first failure") for tasks in (taking, keeping)]
            ended, _ = await asyncio.wait((stop, *broken), return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                await task
            await taking.close()
            await self._drain(drain_s)

    @property
    def gauges(self) -> dict[str, float]:
        running = {f"queue_{lane}_running": float(self._num_held(lane)) for lane in Lane}
        return {**running, "queue_mean_s": self._mean_s, **{name: float(n) for name, n in self.counts.items()}}

    def _num_held(self, lane: Lane) -> int:
        return sum(of is lane for of, _ in self.held)

    async def _change(self) -> None:
        """Wait until a job or a read ends, or the worker is to stop."""
        self._changed.clear()
        await self._changed.wait()

    async def _stopped(self) -> None:
        while not self._stopping or self._reads:  # a cut-off read would lose the jobs that Redis just gave
            await self._change()

    async def _mend(self) -> None:
        """The consumer group on both streams; earlier entries count as well. Redis may be another one, without it."""
        with suppress(*UNREACHABLE):  # the next round of a loop tells
            for lane in Lane:
                try:
                    await self._client.xgroup_create(self._keys.jobs(lane), GROUP, id="0", mkstream=True)
                except ResponseError as error:
                    if not str(error).startswith("BUSYGROUP"):
                        raise

    # -- taking ---------------------------------------------------------------------------------------------------

    async def _take(self, lane: Lane) -> None:
        """Take jobs that no worker has had; waits up to a second for the first."""
        ahead = int(self._slots[lane] * min(_MOST_AHEAD_PER_SLOT, _AHEAD_S / max(self._mean_s, 1e-3)))
        room = self._slots[lane] + ahead - self._num_held(lane)
        if room <= ahead // 2 or self._stopping or any(map(self._is_last, self.held.values())):
            await self._change()
            return
        if self._rest_s:
            await asyncio.sleep(min(self._rest_s, _REST_AT_ONCE_S))
            return
        stream = self._keys.jobs(lane)
        self._reads += 1
        try:
            reply: Any = await self._client.xreadgroup(
                GROUP, self.name, {stream: ">"}, count=room, block=int(BLOCK_S * 1000)
            )
            await self._hold(lane, [(entry, fields, 1) for _, entries in reply for entry, fields in entries])
        finally:
            self._reads -= 1
            self._changed.set()

    async def _take_over(self, lane: Lane) -> None:
        """Take over jobs of workers that have not been heard of, also without a free slot, up to a bound: they have
        waited longest, and new jobs would fill all slots first."""
        slots, stream = self._slots[lane], self._keys.jobs(lane)
        bound = min(slots, (1 + _MOST_AHEAD_PER_SLOT) * slots - self._num_held(lane))
        if bound <= 0 or any(map(self._is_last, self.held.values())) or self._rest_s:
            return
        # Looks at ten times as many leases at once, so the cursor goes on behind those that are renewed.
        reply: Any = await self._client.xautoclaim(
            stream, GROUP, self.name, self._lease_ms, self._cursors[lane], count=bound
        )
        self._cursors[lane] = reply[0]
        there = [(entry, fields) for entry, fields in reply[1] if fields is not None]  # else withdrawn
        if not there:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for entry, _ in there:
                pipe.xpending_range(stream, GROUP, entry, entry, 1)
            pending = await pipe.execute()
        taken = [
            (entry, fields, leases[0]["times_delivered"])
            for (entry, fields), leases in zip(there, pending, strict=True)
            if leases
            and (lane, entry) not in self.held  # answered by the one thought dead; or ours, from before an outage
        ]
        self.counts["taken_over"] += len(taken)
        await self._hold(lane, taken)

    async def _hold(self, lane: Lane, entries: list[tuple[bytes, Mapping[bytes, bytes], int]]) -> None:
        """Start jobs. Those without a waiting caller are removed, and so are entries that no gateway of ours wrote: they
        would come back to every worker."""
        if not entries:
            return
        names = [fields.get(ID, b"").decode(errors="replace") for _, fields, _ in entries]
        payloads: list[Any] = await self._client.mget([self._keys.job(name) for name in names])
        gone = []
        for (entry, fields, attempt), name, payload in zip(entries, names, payloads, strict=True):
            if payload is None:
                gone.append(entry)
                continue
            delivery = Delivery(
                lane=lane, entry=entry, job_id=name, gateway=fields.get(GATEWAY, b"").decode(errors="replace"),
                payload=payload, attempt=attempt,
            )  # fmt: skip
            if attempt > 1:
                log.info("worker.taken_over", job=name, attempt=attempt)
            task = asyncio.create_task(self._deal_with(delivery), name=f"job {name}")
            self.held[lane, entry] = delivery, task
            task.add_done_callback(partial(self._ended, (lane, entry)))
        if gone:
            self.counts["dropped"] += len(gone)
            async with self._client.pipeline(transaction=True) as pipe:
                finish(pipe, self._keys.jobs(lane), *gone)
                await pipe.execute()

    def _ended(self, place: tuple[Lane, bytes], _: asyncio.Task[None]) -> None:
        del self.held[place]
        self._changed.set()

    def _is_last(self, held: tuple[Delivery, asyncio.Task[None]]) -> bool:
        return held[0].attempt == self._max_attempts > 1

    # -- running --------------------------------------------------------------------------------------------------

    async def _deal_with(self, delivery: Delivery) -> None:
        """Handle one job: answer it or give it back."""
        try:
            if delivery.attempt == self._max_attempts > 1:
                async with self._last_attempt:
                    # meanwhile this worker takes no other jobs
                    while self._reads or not all(map(self._is_last, self.held.values())):
                        await self._change()
                    result = await self._result(delivery)
            else:
                result = await self._result(delivery)
            if is_about_the_program(result) or delivery.attempt >= self._max_attempts:
                await self._answer(delivery, encode(result))
                self.counts["answered"] += 1
            else:
                self.counts["given_back"] += 1
                await self._give_back([delivery], attempt_counts=True)
        except UNREACHABLE as error:
            # An existing entry stays leased to us; when the lease expires, another worker takes the job over.
            log.warning("worker.job_let_go", job=delivery.job_id, error=str(error))

    async def _result(self, delivery: Delivery) -> JobResult:
        try:
            job: Job = decode(delivery.payload)
        except InvalidRequestError as error:
            return infrastructure_failure(ExecutionRequest(code=""), f"worker {self.name}: {error.message}")
        if delivery.attempt > self._max_attempts:
            log.error("worker.poison", job=delivery.job_id, attempts=delivery.attempt - 1)
            self.counts["poison"] += 1
            detail = f"{delivery.attempt - 1} workers died or gave up while they ran this job; it is not tried again"
            return infrastructure_failure(job, detail)
        began = time.monotonic()
        try:
            result = await self._runner(job, delivery.lane, None)
        except RollmillError as error:
            result = infrastructure_failure(job, f"worker {self.name}: {error.message}")
        except Exception as error:  # the boundary of a job: the trace stays here, the gateway gets an answer
            log.exception("worker.job_failed", job=delivery.job_id)
            result = infrastructure_failure(job, f"worker {self.name}: {type(error).__name__}")
        self._mean_s += 0.05 * (time.monotonic() - began - self._mean_s)
        self._note(is_about_the_program(result))
        return result

    def _note(self, ran: bool) -> None:
        """After repeated failures of the sandbox rest without new jobs, which other workers run meanwhile: longer after each
        further failure, at most the time of a lease; over with the first job that runs."""
        self._failures = 0 if ran else self._failures + 1
        over = self._failures - _FAILURES_IN_A_ROW
        if over >= 0:
            self._rests_until = time.monotonic() + min(self._lease_s, _FIRST_BACKOFF_S * 2.0 ** min(over, 30))
        elif ran:
            self._rests_until = 0.0

    @property
    def _rest_s(self) -> float:
        """Seconds of rest to go."""
        return max(0.0, self._rests_until - time.monotonic())

    async def _answer(self, delivery: Delivery, payload: bytes) -> None:
        """Wait until Redis has the answer, also over an outage."""
        keys = self._keys.results(delivery.gateway), self._keys.job(delivery.job_id), self._keys.jobs(delivery.lane)
        arguments: tuple[Any, ...] = (RESULTS_EXPIRE_S, GROUP, delivery.entry, delivery.job_id.encode() + payload)
        for pause_s in backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S):
            try:
                await self._client.eval(_ANSWER, len(keys), *keys, *arguments)  # type: ignore[misc]
                return
            except UNREACHABLE:
                await asyncio.sleep(pause_s)

    async def _give_back(self, deliveries: Iterable[Delivery], attempt_counts: bool) -> None:
        """Let others have them at once."""
        async with self._client.pipeline(transaction=False) as pipe:
            for delivery in deliveries:
                pipe.xclaim(
                    self._keys.jobs(delivery.lane), GROUP, self.name, 0, [delivery.entry],
                    idle=self._lease_ms, retrycount=delivery.attempt - (not attempt_counts), justid=True,
                )  # fmt: skip
            await pipe.execute()

    # -- looking after the held jobs ------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Report that this worker lives, renew leases, kill withdrawn jobs, take over the jobs of dead workers."""
        facts = {"slots": self._slots[Lane.INTERACTIVE], "busy": len(self.held), **self._about}
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(self._keys.workers, self.name)
            pipe.set(self._keys.worker(self.name), orjson.dumps(facts), px=3 * self._lease_ms)
            await pipe.execute()
        for lane in Lane:
            await self._renew(lane)
            if not self._stopping:
                await self._take_over(lane)
        await asyncio.sleep(min(_LONGEST_LOOK_PAUSE_S, self._lease_s / _LOOKS_A_LEASE))

    async def _renew(self, lane: Lane) -> None:
        """Renew leases; kill jobs that are withdrawn, that another worker has taken over, or that Redis has lost."""
        held = {entry: delivery for (of, entry), (delivery, _) in self.held.items() if of is lane}
        if not held:
            return
        stream = self._keys.jobs(lane)
        async with self._client.pipeline(transaction=False) as pipe:
            # XCLAIM would also take back entries that another worker has taken over: ours are listed as ours.
            pipe.xpending_range(stream, GROUP, "-", "+", len(held) + 1000, self.name)
            for delivery in held.values():
                pipe.exists(self._keys.job(delivery.job_id))
            listed, *exist = await pipe.execute()
        ours = {item["message_id"] for item in listed}
        kept = [entry for entry, exists in zip(held, exist, strict=True) if exists and entry in ours]
        if kept:
            await self._client.xclaim(stream, GROUP, self.name, 0, kept, justid=True)  # type: ignore[arg-type]
        for entry, exists in zip(held, exist, strict=True):
            if entry not in kept and (lane, entry) in self.held:
                self.counts["lost_leases" if exists else "withdrawn"] += 1
                self.held[lane, entry][1].cancel()
        if withdrawn := ours & {entry for entry, exists in zip(held, exist, strict=True) if not exists}:
            async with self._client.pipeline(transaction=True) as pipe:
                finish(pipe, stream, *withdrawn)
                await pipe.execute()

    async def _drain(self, drain_s: float) -> None:
        """Let running jobs end; give back the rest."""
        log.info("worker.draining", running=len(self.held), drain_s=drain_s)
        with suppress(TimeoutError):  # the rest is given back
            async with asyncio.timeout(drain_s):
                while self.held:
                    await self._change()
        left = list(self.held.values())
        for _, task in left:
            task.cancel()
        if left:
            await asyncio.wait([task for _, task in left])
        with suppress(*UNREACHABLE, TimeoutError):  # leases and names expire by themselves
            async with asyncio.timeout(_LEAVE_S):
                await self._give_back([delivery for delivery, _ in left], attempt_counts=False)
                async with self._client.pipeline(transaction=False) as pipe:
                    pipe.delete(self._keys.worker(self.name))
                    pipe.srem(self._keys.workers, self.name)
                    await pipe.execute()
        log.info("worker.stopped", given_back=len(left))


async def work(
    redis_uri: str,
    queue: QueueConfig,
    sandbox: SandboxPool,
    *,
    metrics: MetricsConfig | None = None,
    run_id: str = "",
    run_dir: Path | None = None,
) -> None:
    """Take jobs until SIGTERM or SIGINT, then let running jobs end. Metrics are served on loopback.

    Raises:
        ConfigError: a URI that cannot be used.
    """
    client = connect(redis_uri, queue.allow_plain_redis)
    apart = comparisons()
    worker = Worker(
        client,
        Keys(queue.redis_prefix),
        sandbox_runner(sandbox, Judge(sandbox, apart.failure)),
        num_slots=sandbox.config.num_slots,
        lease_s=queue.lease_s,
        about={"tier": sandbox.tier, "host": socket.gethostname(), "pid": str(os.getpid())},
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    started_at = time.time()

    def status() -> ProcessStatus:
        return ProcessStatus(
            service="worker",
            instance_id=worker.name,
            run_id=run_id,
            state="ready",
            started_at=started_at,
            gauges=worker.gauges,
        )

    served = metrics_server(
        metrics or MetricsConfig(), status, METRICS, name="worker", host="127.0.0.1", run_dir=run_dir
    )
    try:
        if served is not None:
            await served.start()
        await worker.run(drain_s=sandbox.config.wall_time_s + _DRAIN_GRACE_S)
    finally:
        if served is not None:
            await served.stop()
        await apart.close()
        await sandbox.close()
        await client.aclose()
