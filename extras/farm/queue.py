"""The queue whose slots are at workers: the gateway's side, and what gateways and workers share of Redis.

    run ──> jobs ──> send ──> stream ──> a worker ──> list of results ──> receive ──> run
             ^                  |
             '──── look after <─'   every second: keep the keys of the jobs, count the workers

Keys:

    PREFIX:jobs:interactive, PREFIX:jobs:batch   streams of job ids, read by the consumer group ``workers``; an entry is
                                                 deleted when its job is answered or withdrawn
    PREFIX:job:ID                                the job; exists while its gateway lives and waits for it
    PREFIX:results:GATEWAY                       list: a job's id, and its result behind it; expires
    PREFIX:workers, PREFIX:worker:NAME           set of names, and each worker's facts, which exist while the worker lives

A gateway keeps every job until its answer, and alone decides that a job was answered: a job may run twice and is
answered once. Only a window of jobs is in Redis, enough to keep every worker busy; the others wait in the gateway,
where clients take turns and full lanes return a time to retry. A gateway refreshes the keys of its jobs; where a key or
an entry is gone twice in a row, Redis has lost the job, and the job is sent again. A worker drops a job whose key is gone.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson
import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from extras.farm.codec import decode, encode
from services.common.aio import TaskOwner, backoff
from services.common.config.envgateway import QueueConfig
from services.common.errors import ConfigError, InvalidRequestError
from services.common.telemetry.metrics import Lane, QueueGauge
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue import Job, JobQueue, JobResult, infrastructure_failure
from services.envgateway.sandbox.scheduler import Scheduler
from services.envgateway.variables import check_redis, without_user

log = structlog.get_logger()

GROUP = "workers"
ID, GATEWAY = b"id", b"gateway"  # fields of an entry of a stream of jobs
BLOCK_S = 1  # of blocking reads
_TIMEOUT_S = 10.0  # of any answer, so more than BLOCK_S
_MAX_CONNECTIONS = 32
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

_LEAST_WINDOW = 64
_WINDOW_PER_SLOT = 8  # running, ahead of a slot, and on the way there and back
JOB_EXPIRES_S = 30  # a gateway that was not heard of for this long is dead, and so are its jobs
_LOOK_PAUSE_S = 1.0
_LOOKS_TO_BE_LOST = 2  # in a row: between two looks the results that were on their way have been read
_SEND_AT_ONCE = 64
_RECEIVE_AT_ONCE = 256
_KEEP_AT_ONCE = 500
_ID_LENGTH = 32  # of a job

Client = redis.asyncio.Redis
UNREACHABLE = (RedisError, OSError)  # errors of a command when Redis is absent or another server

# Refresh keys of jobs; keys: the stream, then each job's; arguments: seconds, then each job's entry in the stream.
# Returns for each job 1 where both are there, else 0.
_KEEP = """
local there = {}
for i = 2, #KEYS do
  there[i - 1] = redis.call('EXPIRE', KEYS[i], ARGV[1]) * #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])
end
return there
"""


def connect(uri: str, allow_plain: bool) -> Client:
    """A client that has not connected yet, and fails fast: callers that know the lost request decide on a retry.

    Raises:
        ConfigError: not a URI of Redis, or one that would send jobs over a network without TLS.
    """
    check_redis(uri, allow_plain)
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(  # one that waits: many jobs may speak at once
            uri,
            timeout=_TIMEOUT_S,
            protocol=2,  # one shape of replies, for all versions of the server
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            socket_keepalive=True,
            max_connections=_MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        raise ConfigError(f"{without_user(uri)} is no URI of Redis: {error}") from None


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys under one prefix.

    >>> Keys("rollmill").jobs(Lane.BATCH)
    'rollmill:jobs:batch'
    """

    prefix: str

    def jobs(self, lane: Lane) -> str:
        return f"{self.prefix}:jobs:{lane.value}"

    def job(self, job_id: str) -> str:
        return f"{self.prefix}:job:{job_id}"

    def results(self, gateway: str) -> str:
        return f"{self.prefix}:results:{gateway}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}:worker:{worker}"

    @property
    def workers(self) -> str:
        return f"{self.prefix}:workers"


def finish(pipe: Any, stream: str, *entries: bytes) -> None:
    """Remove entries of a stream of jobs, and their leases."""
    pipe.xack(stream, GROUP, *entries)
    pipe.xdel(stream, *entries)


class RedisLoops:
    """Loops of one process that survive outages of Redis: they retry, and log one line at the start and one at the end of
    an outage."""

    def __init__(
        self, name: str, num_jobs: Callable[[], int], mend: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``name`` begins the lines; ``num_jobs`` are told in them. ``mend`` runs after each failure."""
        self._name = name
        self._num_jobs = num_jobs
        self._mend = mend
        self.connected = True

    async def for_ever(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the call. Ends with an error that is not a failure of Redis, which only a bug can raise."""
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await work()
                # the client writes under ``asyncio.wait_for``, which in Python 3.11 loses a cancellation that comes in the moment
                # when the write ends
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError
                pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                if not self.connected:
                    self.connected = True
                    log.info(f"{self._name}.redis_back", jobs=self._num_jobs())
            except UNREACHABLE as error:
                if self.connected:
                    self.connected = False
                    log.warning(f"{self._name}.redis_lost", error=str(error), jobs=self._num_jobs())
                await asyncio.sleep(next(pauses))
                if self._mend is not None:
                    await self._mend()


@dataclass(eq=False, slots=True)
class _Unanswered:
    """One job on its way. ``entry`` is its place in the stream; None before the sending."""

    id: str
    lane: Lane
    payload: bytes = field(repr=False)
    answer: asyncio.Future[bytes] = field(repr=False)
    entry: bytes | None = None
    missing: int = 0  # looks in a row that did not find the job


class RedisQueue(JobQueue):
    """``start`` before the first job, ``close`` at the end. During an outage of Redis jobs wait as long as their callers."""

    def __init__(self, config: QueueConfig, redis_uri: str, *, expires_s: int = JOB_EXPIRES_S) -> None:
        """Raises ``ConfigError`` for a URI that cannot be used."""
        scheduler = Scheduler(num_slots=_LEAST_WINDOW, batch_slots=_LEAST_WINDOW // 2)
        super().__init__(self._run_at_worker, scheduler)
        self._client = connect(redis_uri, config.allow_plain_redis)
        self._keys = Keys(config.redis_prefix)
        self.gateway = uuid.uuid4().hex
        self._expires_s = expires_s
        self._jobs: dict[str, _Unanswered] = {}
        self._unsent: dict[str, _Unanswered] = {}  # some of them, the oldest first
        self._withdrawn: list[_Unanswered] = []
        self._something_to_send = asyncio.Event()
        self._loops = RedisLoops("queue", lambda: len(self._jobs))
        self._num_workers = 0
        self._slots_of_workers = 0
        self._warned_at = 0.0
        self._tasks = TaskOwner()

    def start(self) -> None:
        for work, name in (
            (self._send, "send jobs"),
            (self._receive, "receive results"),
            (self._look, "look after jobs"),
        ):
            self._tasks.start(self._loops.for_ever(work), f"queue: {name}")

    async def failed(self) -> None:
        """Wait for the end of a loop, which only a bug can cause; raises the loop's error."""
        await self._tasks.failed()

    async def close(self) -> None:
        """Withdraw the remaining jobs and leave."""
        await self._tasks.close()
        self._withdrawn += self._jobs.values()
        try:
            async with asyncio.timeout(2.0):
                await self._withdraw()
                await self._client.delete(self._keys.results(self.gateway))
        except (*UNREACHABLE, TimeoutError):
            pass  # without this call the keys expire, and workers drop the jobs
        await self._client.aclose()

    @property
    def gauges(self) -> dict[str, float]:
        return {
            **super().gauges,
            QueueGauge.UNANSWERED.value: float(len(self._jobs)),
            QueueGauge.WORKERS.value: float(self._num_workers),
            "queue_worker_slots": float(self._slots_of_workers),
            QueueGauge.REDIS_CONNECTED.value: float(self._loops.connected),
        }

    @property
    def num_slots(self) -> int:
        return self._slots_of_workers

    async def _run_at_worker(self, job: Job, lane: Lane, wait_s: float | None) -> JobResult:
        await self._scheduler.take(lane, wait_s)
        began = time.monotonic()
        waiting = _Unanswered(uuid.uuid4().hex, lane, encode(job), asyncio.get_running_loop().create_future())
        self._jobs[waiting.id] = waiting
        try:
            self._send_soon(waiting)
            payload = await waiting.answer
        except asyncio.CancelledError:
            self._withdrawn.append(waiting)
            self._something_to_send.set()
            raise
        finally:
            del self._jobs[waiting.id]
            self._unsent.pop(waiting.id, None)
            self._scheduler.give(lane, time.monotonic() - began)
        try:
            result: JobResult = decode(payload)
        except InvalidRequestError as error:
            return infrastructure_failure(job, f"a worker's answer was not understood: {error.message}")
        if isinstance(job, JudgeRequest) is not isinstance(result, JudgeResult):  # the worker could not read the job
            return infrastructure_failure(job, result.detail)
        return result

    def _send_soon(self, *jobs: _Unanswered) -> None:
        for job in jobs:
            if job.id in self._jobs:
                job.entry, job.missing = None, 0
                self._unsent[job.id] = job
        self._something_to_send.set()

    async def _send(self) -> None:
        await self._something_to_send.wait()
        self._something_to_send.clear()
        await self._withdraw()
        jobs = list(islice(self._unsent.values(), _SEND_AT_ONCE))
        if not jobs:
            return
        for job in jobs:
            del self._unsent[job.id]
        if self._unsent:
            self._something_to_send.set()
        try:
            # all or none: a Redis beyond its bound of memory refuses the whole transaction
            async with self._client.pipeline(transaction=True) as pipe:
                for job in jobs:
                    pipe.set(self._keys.job(job.id), job.payload, ex=self._expires_s)
                    pipe.xadd(self._keys.jobs(job.lane), {ID: job.id, GATEWAY: self.gateway})
                replies = await pipe.execute()
        except (*UNREACHABLE, asyncio.CancelledError):
            self._send_soon(*jobs)
            raise
        for job, entry in zip(jobs, replies[1::2], strict=True):
            job.entry = entry
        self.counts["sent"] += len(jobs)

    async def _withdraw(self) -> None:
        """Remove jobs without a waiting caller; their workers miss the keys, and kill them."""
        jobs, self._withdrawn = self._withdrawn, []
        if not jobs:
            return
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for job in jobs:
                    pipe.delete(self._keys.job(job.id))
                    if job.entry is not None:
                        finish(pipe, self._keys.jobs(job.lane), job.entry)
                await pipe.execute()
        except (*UNREACHABLE, asyncio.CancelledError):
            self._withdrawn += jobs
            self._something_to_send.set()
            raise
        self.counts["withdrawn"] += len(jobs)

    async def _receive(self) -> None:
        """An answer that is lost on the way is asked for again: its job is not in Redis any more."""
        results = self._keys.results(self.gateway)
        first: Any = await self._client.blpop([results], timeout=BLOCK_S)
        if first is None:
            return
        self._answer(first[1])
        more: Any = await self._client.lpop(results, _RECEIVE_AT_ONCE)  # type: ignore[misc]
        for answer in more or ():
            self._answer(answer)

    def _answer(self, answer: bytes) -> None:
        job = self._jobs.get(answer[:_ID_LENGTH].decode(errors="replace"))
        if job is None or job.answer.done():
            self.counts["answers_ignored"] += 1  # a second answer, or a withdrawn job
        else:
            self.counts["answered"] += 1
            job.answer.set_result(answer[_ID_LENGTH:])

    async def _look(self) -> None:
        """Keep the jobs, and find those that Redis has lost."""
        for lane in Lane:
            sent = [(job, job.entry) for job in self._jobs.values() if job.lane is lane and job.entry is not None]
            for start in range(0, len(sent), _KEEP_AT_ONCE):
                some = sent[start : start + _KEEP_AT_ONCE]
                keys = [self._keys.jobs(lane), *(self._keys.job(job.id) for job, _ in some)]
                there: Any = self._client.eval(_KEEP, len(keys), *keys, self._expires_s, *(entry for _, entry in some))
                for (job, entry), found in zip(some, await there, strict=True):
                    if job.entry == entry:
                        job.missing = 0 if found else job.missing + 1
                    if job.missing >= _LOOKS_TO_BE_LOST and job.id in self._jobs:
                        self.counts["sent_again"] += 1
                        self._send_soon(job)
        await self._count_workers()
        await asyncio.sleep(_LOOK_PAUSE_S)

    async def _count_workers(self) -> None:
        members: Any = await self._client.smembers(self._keys.workers)  # type: ignore[misc]
        names = [name.decode() for name in sorted(members)]
        said: list[Any] = await self._client.mget([self._keys.worker(name) for name in names]) if names else []
        gone = [name for name, words in zip(names, said, strict=True) if words is None]
        if gone:
            await self._client.srem(self._keys.workers, *gone)  # type: ignore[misc]
            log.warning("queue.workers_gone", workers=gone)
        slots = sum(_slots(words) for words in said if words is not None)
        num_workers = len(names) - len(gone)
        now = asyncio.get_running_loop().time()
        if (num_workers, slots) != (self._num_workers, self._slots_of_workers):
            log.info("queue.workers", workers=num_workers, slots=slots)
        elif not num_workers and self._jobs and now - self._warned_at > 15.0:
            self._warned_at = now
            log.warning("queue.no_workers", waiting=len(self._jobs))
        self._num_workers, self._slots_of_workers = num_workers, slots
        window = max(_LEAST_WINDOW, _WINDOW_PER_SLOT * slots)
        self._scheduler.resize(window, window - window // 2)


def _slots(words: bytes) -> int:
    """The slots that a worker reports; 0 for a report of another version."""
    try:
        return max(0, int(orjson.loads(words)["slots"]))
    except (ValueError, TypeError, KeyError):
        return 0
