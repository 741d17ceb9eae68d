"""Redis operations of a worker on jobs: take, renew, take over, answer, give back. Running jobs is the caller's part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import structlog
from redis.exceptions import ResponseError

from services.common.telemetry.gateway_queue import Lane
from services.envgateway.calls import SharedCalls
from services.envgateway.queue.streams.connection import BLOCK_MS, UNREACHABLE, Client
from services.envgateway.queue.streams.names import GATEWAY, GROUP, JOB_ID, PAYLOAD, Names, finish
from services.envgateway.queue.streams.scripts import ANSWER
from services.envgateway.worker.held import Delivery

log = structlog.get_logger()

RESULTS_EXPIRE_S = 3600
_GATEWAY_SEEN_S = 2.0
_ANSWER_AT_ONCE = 64
_CONSUMER_FORGOTTEN_MS = 3_600_000


class Leases:
    """One worker's dealings. Every method raises redis' errors during an outage (``UNREACHABLE``)."""

    def __init__(self, client: Client, names: Names, worker: str, lease_s: float) -> None:
        self._client = client
        self._names = names
        self._worker = worker
        self._lease_ms = int(lease_s * 1000)
        self._gateways_seen: dict[str, float] = {}
        self._looks_for_gateways: SharedCalls[bool] = SharedCalls(max_stored=0)  # a hundred jobs come at once: one asks
        self._cursors = dict.fromkeys(Lane, "0-0")  # where the next search for the jobs of the dead goes on
        self._answers: list[tuple[Delivery, bytes]] = []
        self._answer_is_there = asyncio.Event()
        self.all_sent = asyncio.Event()
        self.all_sent.set()

    async def make_groups(self) -> None:
        """The consumer group on both streams; earlier entries count as well."""
        for lane in Lane:
            try:
                await self._client.xgroup_create(self._names.jobs(lane), GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def take(self, lane: Lane, at_most: int) -> list[Delivery]:
        """Take jobs that no worker has had; waits up to a second for the first."""
        stream = self._names.jobs(lane)
        reply: Any = await self._client.xreadgroup(GROUP, self._worker, {stream: ">"}, count=at_most, block=BLOCK_MS)
        return await self._read(lane, [(entry, fields, 1) for _, entries in reply for entry, fields in entries])

    async def renew(self, lane: Lane, entries: list[bytes]) -> set[bytes]:
        """Renew leases. Returns those that are still ours; the others were withdrawn, or given to another worker."""
        if not entries:
            return set()
        stream = self._names.jobs(lane)
        # min_idle_time 0 would also take back entries that another worker has taken over: ours are listed as ours.
        ours: Any = await self._client.xpending_range(stream, GROUP, "-", "+", len(entries) + 1000, self._worker)
        listed: set[Any] = {item["message_id"] for item in ours} & set(entries)
        if not listed:
            return set()
        claimed: Any = await self._client.xclaim(stream, GROUP, self._worker, 0, sorted(listed), justid=True)
        return set(claimed)

    async def take_over(self, lane: Lane, at_most: int) -> list[Delivery]:
        """Jobs whose workers have not been heard of, each with the number of its next attempt.

        One call looks at ten times ``at_most`` leases; the next continues there.
        """
        stream = self._names.jobs(lane)
        reply: Any = await self._client.xautoclaim(
            stream, GROUP, self._worker, self._lease_ms, self._cursors[lane], count=at_most
        )
        self._cursors[lane] = reply[0]
        there = [(entry, fields) for entry, fields in reply[1] if fields is not None]  # else withdrawn
        if not there:
            return []
        async with self._client.pipeline(transaction=False) as pipe:
            for entry, _ in there:
                pipe.xpending_range(stream, GROUP, entry, entry, 1)
            pending = await pipe.execute()
        return await self._read(lane, [
            (entry, fields, leases[0]["times_delivered"])
            for (entry, fields), leases in zip(there, pending, strict=True)
            if leases  # else answered by the one that was thought dead
        ])  # fmt: skip

    async def is_anybody_waiting(self, delivery: Delivery) -> bool:
        """Whether its gateway lives."""
        now = time.monotonic()
        if now - self._gateways_seen.get(delivery.gateway, -_GATEWAY_SEEN_S) < _GATEWAY_SEEN_S:
            return True
        return await self._looks_for_gateways.run(delivery.gateway, lambda: self._look_for(delivery.gateway))

    def answer(self, delivery: Delivery, payload: bytes) -> None:
        """Queue an answer for ``send_answers``, which retries until Redis accepts the answer."""
        self._answers.append((delivery, payload))
        self._answer_is_there.set()
        self.all_sent.clear()

    async def send_answers(self) -> None:
        """Wait for answers and send those that are there."""
        await self._answer_is_there.wait()
        answers, self._answers = self._answers[:_ANSWER_AT_ONCE], self._answers[_ANSWER_AT_ONCE:]
        if not self._answers:
            self._answer_is_there.clear()
        try:
            await self._send(answers)
        except (*UNREACHABLE, asyncio.CancelledError):
            self._answers = answers + self._answers
            self._answer_is_there.set()
            raise
        if not self._answers:
            self.all_sent.set()

    async def _send(self, answers: list[tuple[Delivery, bytes]]) -> None:
        keys: list[str] = []
        arguments: list[Any] = [GROUP, RESULTS_EXPIRE_S]
        for delivery, payload in answers:
            keys += (self._names.results(delivery.gateway), self._names.jobs(delivery.lane))
            arguments += (delivery.entry, delivery.job_id, payload)
        await self._client.eval(ANSWER, len(keys), *keys, *arguments)

    async def drop(self, delivery: Delivery) -> None:
        """Drop a job that has no waiting caller."""
        async with self._client.pipeline(transaction=True) as pipe:
            finish(pipe, self._names.jobs(delivery.lane), delivery.entry)
            await pipe.execute()

    async def give_back(self, deliveries: Iterable[Delivery], attempt_counts: bool) -> None:
        """Let others have them at once."""
        async with self._client.pipeline(transaction=False) as pipe:
            for delivery in deliveries:
                pipe.xclaim(
                    self._names.jobs(delivery.lane), GROUP, self._worker, 0, [delivery.entry],
                    idle=self._lease_ms, retrycount=delivery.attempt - (not attempt_counts), justid=True,
                )  # fmt: skip
            await pipe.execute()

    async def report(self, words: Mapping[str, Any]) -> None:
        """Tell Redis that this worker lives, and its facts."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(self._names.workers, self._worker)
            pipe.set(self._names.worker(self._worker), orjson.dumps(words), px=3 * self._lease_ms)
            await pipe.execute()

    async def leave(self) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.delete(self._names.worker(self._worker))
            pipe.srem(self._names.workers, self._worker)
            await pipe.execute()

    async def forget_consumers(self) -> None:
        """Remove consumers without jobs that were not seen for an hour: names of workers that are gone."""
        for lane in Lane:
            for consumer in await self._client.xinfo_consumers(self._names.jobs(lane), GROUP):
                if not consumer["pending"] and consumer["idle"] > _CONSUMER_FORGOTTEN_MS:
                    await self._client.xgroup_delconsumer(self._names.jobs(lane), GROUP, consumer["name"])

    async def _look_for(self, gateway: str) -> bool:
        there = bool(await self._client.exists(self._names.gateway(gateway)))
        if there:
            self._gateways_seen[gateway] = time.monotonic()
        else:
            self._gateways_seen.pop(gateway, None)
        return there

    async def _read(self, lane: Lane, entries: Iterable[tuple[bytes, Mapping[bytes, bytes], int]]) -> list[Delivery]:
        """Parse entries. Entries that no gateway of ours wrote are removed: they would come back to every worker."""
        deliveries, strange = [], []
        for entry, fields, attempt in entries:
            try:
                delivery = Delivery(
                    lane=lane,
                    entry=entry,
                    job_id=fields[JOB_ID].decode(),
                    gateway=fields[GATEWAY].decode(),
                    payload=fields[PAYLOAD],
                    attempt=attempt,
                )
            except (KeyError, UnicodeDecodeError):
                strange.append(entry)
            else:
                deliveries.append(delivery)
        if strange:
            log.warning("worker.strange_entries", lane=lane.value, entries=strange)
            async with self._client.pipeline(transaction=True) as pipe:
                finish(pipe, self._names.jobs(lane), *strange)
                await pipe.execute()
        return deliveries
