"""The gateway's side: sends jobs to the workers' streams, receives answers, and sends lost jobs again.

    run ──> unanswered ──> send ──> stream ──> a worker ──> results stream ──> receive ──> unanswered ──> run
               ^                    |
               '── look after <─────'   every second: is the Redis server the same, do the entries exist?

Three loops, each outlives any failure of Redis: send (waits for jobs), receive (blocks up to a second), look after.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
import structlog

from services.common.aio import TaskOwner
from services.common.errors import InvalidRequestError
from services.common.telemetry.gateway_queue import Lane, QueueGauge
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue.base import Job, JobResult, infrastructure_failure
from services.envgateway.queue.codec import decode_result, encode_job
from services.envgateway.queue.streams.connection import BLOCK_MS, UNREACHABLE, Client
from services.envgateway.queue.streams.loops import RedisLoops
from services.envgateway.queue.streams.names import JOB_ID, PAYLOAD, Names, finish
from services.envgateway.queue.streams.scripts import SEND, THERE
from services.envgateway.queue.streams.unanswered import Unanswered, UnansweredJobs

log = structlog.get_logger()

ALIVE_S = 30  # a gateway that was not heard of for this long is dead, and so are its jobs
_SEND_AT_ONCE = 64
_RECEIVE_AT_ONCE = 256
_LOOK_PAUSE_S = 1.0
_LOOKS_BETWEEN_INVENTORIES = 15  # while no error occurs
_INVENTORY_AT_ONCE = 500
_LANES = tuple(Lane)


class StreamsRunner:
    """A ``Runner`` whose slots are at the workers. ``start`` before, ``close`` after."""

    def __init__(
        self, client: Client, names: Names, on_slots: Callable[[int], None], gateway: str = "", alive_s: int = ALIVE_S
    ) -> None:
        """``on_slots`` gets the total slots of all live workers, each second."""
        self._client = client
        self._names = names
        self._on_slots = on_slots
        self._gateway = gateway or uuid.uuid4().hex[:12]
        self._alive_s = alive_s
        self._unanswered = UnansweredJobs()
        self._withdrawn: list[Unanswered] = []
        self._received: list[bytes] = []  # results that are read and not yet deleted
        self._looks = 0
        self._suspicious = False  # Redis failed since the last inventory
        self._present = False  # whether this gateway has told Redis that the gateway lives
        self._loops = RedisLoops(self._redis_failed, self._redis_returned)
        self._num_workers = 0
        self._num_slots = 0
        self._tasks = TaskOwner()
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        for work, name in (
            (self._send, "send jobs"),
            (self._receive, "receive results"),
            (self._maintain, "look after jobs"),
        ):
            self._tasks.start(self._loops.for_ever(work), f"queue: {name}")

    async def failed(self) -> None:
        """Wait for the end of a loop, which only a bug can cause; raises the loop's error."""
        await self._tasks.failed()

    async def close(self) -> None:
        """Withdraw the remaining jobs and leave."""
        await self._tasks.close()
        self._withdrawn += self._unanswered.sent()
        try:
            async with asyncio.timeout(2.0):
                await self._withdraw()
                await self._client.delete(self._names.gateway(self._gateway), self._names.results(self._gateway))
        except (*UNREACHABLE, TimeoutError):
            pass  # without this call the keys expire, and workers drop the jobs of a gateway that is gone
        await self._client.aclose()

    async def run(self, job: Job, lane: Lane) -> JobResult:
        """Raises no error of Redis: during an outage the job waits here, as long as the caller does."""
        unanswered = Unanswered(uuid.uuid4().hex, lane, encode_job(job), asyncio.get_running_loop().create_future())
        self._unanswered.add(unanswered)
        try:
            payload = await unanswered.answer
        except asyncio.CancelledError:
            self._unanswered.forget(unanswered.id)
            self._withdrawn.append(unanswered)
            self._unanswered.something_to_send.set()
            raise
        try:
            result = decode_result(payload)
        except InvalidRequestError as error:
            return infrastructure_failure(job, f"a worker's answer was not understood: {error.message}")
        if isinstance(job, JudgeRequest) is not isinstance(result, JudgeResult):  # the worker misread the job
            return infrastructure_failure(job, result.detail)
        return result

    @property
    def gauges(self) -> dict[str, float]:
        return {
            QueueGauge.UNANSWERED.value: float(len(self._unanswered)),
            QueueGauge.WORKERS.value: float(self._num_workers),
            "queue_worker_slots": float(self._num_slots),
            QueueGauge.REDIS_CONNECTED.value: float(self._loops.connected),
            **{f"queue_{name}": float(count) for name, count in self.counts.items()},
        }

    def _redis_failed(self, error: BaseException, was_connected: bool) -> None:
        self._suspicious = True
        if was_connected:
            log.warning("queue.redis_lost", error=str(error), unanswered=len(self._unanswered))

    def _redis_returned(self) -> None:
        log.info("queue.redis_back", unanswered=len(self._unanswered))

    # -- send -----------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        await self._unanswered.something_to_send.wait()
        if self._withdrawn:
            await self._withdraw()
        jobs = self._unanswered.take_unsent(_SEND_AT_ONCE)
        if self._withdrawn:
            self._unanswered.something_to_send.set()  # a caller left during the withdrawal
        if not jobs:
            return
        # Workers drop jobs of dead gateways: a sender is alive, also in a Redis that has just lost all data.
        keys = [self._names.gateway(self._gateway), *map(self._names.jobs, _LANES)]
        arguments: list[Any] = [self._gateway, self._alive_s]
        for job in jobs:
            arguments += (_LANES.index(job.lane) + 2, job.id, job.payload)
        present = self._present
        try:
            was_there, *entries = await self._client.eval(SEND, len(keys), *keys, *arguments)
        except (*UNREACHABLE, asyncio.CancelledError):
            self._unanswered.send_again(jobs)
            raise
        self._note_presence(bool(was_there), present)
        for job, entry in zip(jobs, entries, strict=True):
            job.entry = entry
        self.counts["sent"] += len(jobs)

    async def _withdraw(self) -> None:
        """Jobs without a waiting caller: remove them from the stream, and kill them at their workers."""
        jobs, self._withdrawn = self._withdrawn, []
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for job in jobs:
                    if job.entry is not None:
                        finish(pipe, self._names.jobs(job.lane), job.entry)
                    pipe.publish(self._names.withdrawn, job.id)
                await pipe.execute()
        except (*UNREACHABLE, asyncio.CancelledError):
            self._withdrawn += jobs
            raise
        self.counts["withdrawn"] += len(jobs)

    # -- receive --------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Read from the beginning: read entries are deleted, and after a loss entry ids may start from an earlier
        clock."""
        stream = self._names.results(self._gateway)
        async with self._client.pipeline(transaction=False) as pipe:
            if self._received:
                pipe.xdel(stream, *self._received)
            pipe.xread({stream: "0-0"}, count=_RECEIVE_AT_ONCE, block=BLOCK_MS)
            *_, reply = await pipe.execute()
        entries = reply[0][1] if reply else []
        self._received = [entry for entry, _ in entries]
        for _, fields in entries:
            if self._unanswered.answer(fields.get(JOB_ID, b"").decode(errors="replace"), fields.get(PAYLOAD, b"")):
                self.counts["answered"] += 1
            else:
                self.counts["answers_ignored"] += 1

    # -- look after -----------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        present = self._present
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._names.gateway(self._gateway), 1, ex=self._alive_s, get=True)
            pipe.smembers(self._names.workers)
            was_there, workers = await pipe.execute()
        self._note_presence(was_there is not None, present)
        await self._count_workers(sorted(workers))
        self._looks += 1
        if self._suspicious or self._looks % _LOOKS_BETWEEN_INVENTORIES == 0:
            self._suspicious = await self._take_inventory()
        await asyncio.sleep(_LOOK_PAUSE_S)

    def _note_presence(self, was_there: bool, present: bool) -> None:
        """Whether Redis still had the mark of this gateway's life, which never expires while the gateway lives.

        ``present``: whether the mark was known to be there when Redis was asked. The answers of two requests may come in
        another order than Redis gave them.
        """
        if not was_there and present:
            log.warning("queue.redis_was_emptied", unanswered=len(self._unanswered))
            self.counts["redis_losses"] += 1
            self._suspicious = True
        self._present = True

    async def _take_inventory(self) -> bool:
        """Look for every sent job's entry; True when some were missing for the first time: look again soon."""
        missing = False
        for lane in Lane:
            jobs = [job for job in self._unanswered.sent() if job.lane is lane]
            for start in range(0, len(jobs), _INVENTORY_AT_ONCE):
                some = [(job, job.entry) for job in jobs[start : start + _INVENTORY_AT_ONCE] if job.entry is not None]
                there = await self._client.eval(THERE, 1, self._names.jobs(lane), *(entry for _, entry in some))
                for (job, entry), found in zip(some, there, strict=True):
                    if job.entry != entry:
                        continue
                    missing = missing or not found
                    if self._unanswered.record_lookup(job, bool(found)):
                        self.counts["sent_again"] += 1
        return missing

    async def _count_workers(self, workers: list[bytes]) -> None:
        names = [name.decode() for name in workers]
        said = await self._client.mget([self._names.worker(name) for name in names]) if names else []
        gone = [name for name, words in zip(names, said, strict=True) if words is None]
        if gone:
            await self._client.srem(self._names.workers, *gone)
            log.warning("queue.workers_gone", workers=gone)
        alive = [_slots(words) for words in said if words is not None]
        slots = sum(alive)
        if (len(alive), slots) != (self._num_workers, self._num_slots):
            log.info("queue.workers", workers=len(alive), slots=slots)
        elif not alive and len(self._unanswered) and self._looks % _LOOKS_BETWEEN_INVENTORIES == 1:
            log.warning("queue.no_workers", waiting=len(self._unanswered))
        self._num_workers, self._num_slots = len(alive), slots
        self._on_slots(slots)


def _slots(words: bytes | str) -> int:
    """The slots that a worker reports; 0 for a report of another version."""
    try:
        return max(0, int(orjson.loads(words)["slots"]))
    except (ValueError, TypeError, KeyError):
        return 0
