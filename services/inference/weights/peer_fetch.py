"""Fetches one payload together with other replicas: the own shard from the source, the others from their relays.

    shard i:  relay i  --dies, stalls, lags, lacks the payload-->  the source, at the same offset

No peer is trusted: the payload is verified as a whole afterwards. A relay may learn of a version a moment later than this
replica, so a relay without the payload is asked again for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import structlog

from services.common.errors import NotFoundError, RollmillError, UnknownPolicyError
from services.common.records.types import FetchPlan
from services.common.weights.manifest import Payload
from services.inference.weights.relay import Incoming
from services.inference.weights.source import WeightSource
from services.inference.weights.transports import ByteRange

log = structlog.get_logger()

MIN_SHARD_BYTES = 1 << 20
STALL_S = 5.0  # without a byte: the relay is replaced
_POLL_S = 0.1  # period of progress checks
_ASK_AGAIN_S = 0.2
_LAG_FACTOR = 2.0  # a shard whose estimated rest exceeds this many times the elapsed time moves to the source
_LAG_FROM_S = 2.0


def cut(size_bytes: int, num_relays: int) -> list[tuple[int, int]]:
    """(start, end) of every shard; the same on every replica. One shard if sharing would not pay.

    >>> cut(10 << 20, 3)
    [(0, 3495254), (3495254, 6990508), (6990508, 10485760)]
    """
    count = max(1, min(num_relays, size_bytes // MIN_SHARD_BYTES))
    width = max(1, -(-size_bytes // count))
    return [(start, min(start + width, size_bytes)) for start in range(0, size_bytes, width)] or [(0, 0)]


@dataclass(slots=True)
class PeerFetch:
    """One transfer. ``run`` fills the incoming payload."""

    payload: Payload
    incoming: Incoming
    plan: FetchPlan
    source: WeightSource  # the publisher, or another source with the whole payload
    run_id: str
    _bytes_from: Counter[str] = field(default_factory=Counter)
    _num_open: int = 0
    _num_shards: int = 0
    _began: float = 0.0

    async def run(self) -> tuple[str, ...]:
        """Fetch all shards; returns the sources, the largest share first. Raises the source's error for the last fallback."""
        shards = cut(self.payload.size_bytes, len(self.plan.relays))
        self._began = time.monotonic()
        self._num_open = self._num_shards = len(shards)
        ranges = [self.incoming.shard(start, end) for start, end in shards]
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, wanted in enumerate(ranges):
                    tasks.create_task(self._fetch_shard(number, wanted), name=f"weights shard {number}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # its failure cancelled the others
        return tuple(address for address, count in self._bytes_from.most_common() if count)

    async def _fetch_shard(self, number: int, wanted: ByteRange) -> None:
        if number != self.plan.own_shard:
            await self._from_relay(self.plan.relays[number], wanted)
        if not wanted.is_complete:
            begun_at = wanted.offset
            await self.source.fetch(self.payload, wanted)
            self._bytes_from[self.source.address] += wanted.offset - begun_at
        self._num_open -= 1

    async def _from_relay(self, address: str, wanted: ByteRange) -> None:
        """Fetch from a relay; returns also if the relay stops before the end."""
        begun_at = wanted.offset
        async with WeightSource(address, self.run_id, transports=("grpc",)) as relay:
            fetching = asyncio.create_task(self._fetch_when_known(relay, wanted), name=f"weights from relay {address}")
            try:
                reason = await self._watch(fetching, wanted)
            finally:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
        self._bytes_from[address] += wanted.offset - begun_at
        if reason:
            log.warning("weights.relay_replaced", relay=address, offset=wanted.offset, end=wanted.end, reason=reason)

    async def _fetch_when_known(self, relay: WeightSource, wanted: ByteRange) -> None:
        while True:
            try:
                await relay.fetch(self.payload, wanted)
                return
            except (NotFoundError, UnknownPolicyError):
                # The relay does not know the payload yet; the watching task limits the wait.
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _watch(self, fetching: asyncio.Task[None], wanted: ByteRange) -> str:
        """Wait for the shard; returns the reason for giving the relay up, or "" when the shard is complete."""
        offset, moved_at = wanted.offset, time.monotonic()
        while True:
            done, _ = await asyncio.wait({fetching}, timeout=_POLL_S)
            if done:
                error = fetching.exception()
                if error is None:
                    return ""
                if isinstance(error, RollmillError):
                    return error.message
                raise error
            now = time.monotonic()
            if wanted.offset > offset:
                offset, moved_at = wanted.offset, now
            elif now - moved_at > STALL_S:
                return f"no data for {STALL_S:g} s"
            if self._lags(wanted, now):
                return "much slower than the others"

    def _lags(self, wanted: ByteRange, now: float) -> bool:
        """Whether most shards are complete and this one would still take long."""
        elapsed = now - self._began
        if elapsed < _LAG_FROM_S or 2 * self._num_open > self._num_shards:
            return False
        received = wanted.offset - wanted.start
        return received == 0 or (wanted.end - wanted.offset) / received > _LAG_FACTOR
