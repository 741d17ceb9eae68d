"""Fetching one payload together with other replicas: own stripe from the source, the others from their relays.

    stripe i:  relay i  --dies, stands still, lags, knows nothing of it-->  the source, at the same offset

Nobody is trusted: the payload is verified as a whole afterwards. A relay may hear of a version a moment later than we do,
so one that does not know the payload yet is asked again for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import structlog

from services.common.errors import MillraceError, NotFoundError, UnknownPolicyError
from services.common.types import FetchPlan
from services.common.weights.manifest import Payload
from services.inference.weights.fetch_range import ByteRange
from services.inference.weights.fetch_source import WeightSource
from services.inference.weights.incoming import Incoming

log = structlog.get_logger()

MIN_STRIPE_BYTES = 1 << 20
STALL_S = 5.0  # without a byte: the relay is replaced
_LOOK_S = 0.1  # how often progress is looked at
_ASK_AGAIN_S = 0.2
_LAG_FACTOR = 2.0  # a stripe whose end is farther away than this many times what the transfer has taken is replaced
_LAG_FROM_S = 2.0


def cut(size_bytes: int, num_relays: int) -> list[tuple[int, int]]:
    """(start, end) of every stripe; the same for everybody who asks. One stripe when sharing would not pay.

    >>> cut(10 << 20, 3)
    [(0, 3495254), (3495254, 6990508), (6990508, 10485760)]
    """
    count = max(1, min(num_relays, size_bytes // MIN_STRIPE_BYTES))
    width = max(1, -(-size_bytes // count))
    return [(start, min(start + width, size_bytes)) for start in range(0, size_bytes, width)] or [(0, 0)]


@dataclass(slots=True)
class Swarm:
    """One transfer. ``run`` fills the incoming payload."""

    payload: Payload
    incoming: Incoming
    plan: FetchPlan
    source: WeightSource  # the publisher, or whoever has everything
    run_id: str
    _bytes_from: Counter[str] = field(default_factory=Counter)
    _num_open: int = 0
    _num_stripes: int = 0
    _began: float = 0.0

    async def run(self) -> tuple[str, ...]:
        """Who the bytes came from, most first. Raises what the source raised for a stripe that nobody else has."""
        stripes = cut(self.payload.size_bytes, len(self.plan.relays))
        self._began = time.monotonic()
        self._num_open = self._num_stripes = len(stripes)
        ranges = [self.incoming.stripe(start, end) for start, end in stripes]
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, wanted in enumerate(ranges):
                    tasks.create_task(self._stripe(number, wanted), name=f"weights stripe {number}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled with it
        return tuple(address for address, count in self._bytes_from.most_common() if count)

    async def _stripe(self, number: int, wanted: ByteRange) -> None:
        if number != self.plan.own_stripe:
            await self._from_relay(self.plan.relays[number], wanted)
        if not wanted.is_complete:
            begun_at = wanted.offset
            await self.source.fetch(self.payload, wanted)
            self._bytes_from[self.source.address] += wanted.offset - begun_at
        self._num_open -= 1

    async def _from_relay(self, address: str, wanted: ByteRange) -> None:
        """As much as the relay gives; returns also when it gives nothing more."""
        begun_at = wanted.offset
        async with WeightSource(address, self.run_id, transports=("grpc",)) as relay:
            fetching = asyncio.create_task(self._patiently(relay, wanted), name=f"weights from relay {address}")
            try:
                reason = await self._watch(fetching, wanted)
            finally:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
        self._bytes_from[address] += wanted.offset - begun_at
        if reason:
            log.warning("weights.relay_replaced", relay=address, offset=wanted.offset, end=wanted.end, reason=reason)

    async def _patiently(self, relay: WeightSource, wanted: ByteRange) -> None:
        while True:
            try:
                await relay.fetch(self.payload, wanted)
                return
            except (NotFoundError, UnknownPolicyError):
                # It has not heard of it yet; whoever watches decides how long that may last.
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _watch(self, fetching: asyncio.Task[None], wanted: ByteRange) -> str:
        """Why the relay is given up; empty when the stripe is complete."""
        offset, moved_at = wanted.offset, time.monotonic()
        while True:
            done, _ = await asyncio.wait({fetching}, timeout=_LOOK_S)
            if done:
                error = fetching.exception()
                if error is None:
                    return ""
                if isinstance(error, MillraceError):
                    return error.message
                raise error
            now = time.monotonic()
            if wanted.offset > offset:
                offset, moved_at = wanted.offset, now
            elif now - moved_at > STALL_S:
                return f"nothing came for {STALL_S:g} s"
            if self._lags(wanted, now):
                return "it is much slower than the others"

    def _lags(self, wanted: ByteRange, now: float) -> bool:
        """Most stripes are complete, and this one would still take long."""
        elapsed = now - self._began
        if elapsed < _LAG_FROM_S or 2 * self._num_open > self._num_stripes:
            return False
        received = wanted.offset - wanted.start
        return received == 0 or (wanted.end - wanted.offset) / received > _LAG_FACTOR
