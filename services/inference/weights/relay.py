"""Passes weights on to other replicas: the incoming payload, the last deltas, and the held version.

    incoming payload  -- ranges become readable as they arrive, before verification
    last deltas       -- as received
    mirror            -- the full snapshot, in the publisher's layout

An ``Incoming`` is a payload that arrives in shards, of which readers get the received bytes. Every receiver verifies the
payload, so unverified bytes can cost time but do no harm. Payload ids are the same everywhere, and so are their bytes. Used
from the event loop, ``payload`` from a thread as well.

``PeerFetch`` is the receiving side: it fetches one payload together with other replicas.

    shard i:  relay i  --dies, stalls, lags, lacks the payload-->  the source, at the same offset

No peer is trusted: the payload is verified as a whole afterwards. A relay may learn of a version a moment later than this
replica, so a relay without the payload is asked again for a while.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import structlog

from services.common.aio import deadline
from services.common.errors import (
    NotFoundError,
    OffsetOutOfRangeError,
    RollmillError,
    UnknownPolicyError,
    VersionUnavailableError,
)
from services.common.records.types import FetchPlan
from services.common.transfer.source import MemoryReader, PayloadReader
from services.common.weights.snapshot import (
    Encoding,
    Manifest,
    Payload,
    PayloadRequest,
    TensorEntry,
    full_payload_id,
    lay_out,
)
from services.inference.weights.fetch import WeightSource
from services.inference.weights.mirror import HeldWeights, Mirror
from services.inference.weights.transports import ByteRange

PROGRESS_TIMEOUT_S = 20.0  # below the receiver's limit of 30 s for a silent stream
KEPT_DELTAS = 4
KEPT_DELTA_SHARE = 0.25  # of the mirror's bytes, in all


class Incoming:
    """A payload that arrives in shards: its buffer, and the progress of each shard. One event loop."""

    def __init__(self, payload: Payload, data: memoryview, on_bytes: Callable[[], None] = lambda: None) -> None:
        """``on_bytes`` is called after every received piece."""
        self.payload = payload
        self.data = data
        self._shards: list[ByteRange] = []
        self._failed = False
        self._on_bytes = on_bytes
        self._progress = asyncio.Event()

    def shard(self, start: int, end: int) -> ByteRange:
        """A part of the payload that is about to be fetched."""
        wanted = ByteRange(start, end, self.data[start:end], self._received)
        self._shards.append(wanted)
        return wanted

    def fail(self) -> None:
        """End the payload: no more bytes will come."""
        self._failed = True
        self._received(0)

    def num_readable(self, offset: int) -> int:
        """The number of received bytes from an offset on."""
        for shard in self._shards:
            if shard.start <= offset < shard.end:
                return max(0, shard.offset - offset)
        return 0

    def reader(self, hold: AbstractContextManager[None]) -> IncomingReader:
        """``hold`` keeps the buffer unchanged: a snapshot's becomes the mirror, which later deltas write into."""
        return IncomingReader(self, hold)

    async def wait_readable(self, offset: int) -> int:
        """Wait until there is a byte at the offset; returns the number of readable bytes.

        Raises:
            NotFoundError: the byte will not come.
            DeadlineError: no byte of the payload came for a while.
        """
        while not (num_readable := self.num_readable(offset)):
            if self._failed:
                raise NotFoundError(f"payload {self.payload.payload_id!r} did not arrive here")
            progress = self._progress
            async with deadline(PROGRESS_TIMEOUT_S, f"byte {offset} of {self.payload.payload_id} at a relay"):
                await progress.wait()
        return num_readable

    def _received(self, offset: int) -> None:
        self._on_bytes()
        # All waiting tasks look again; later ones wait for a new event.
        self._progress.set()
        self._progress = asyncio.Event()


class IncomingReader:
    """A ``PayloadReader`` over the received bytes."""

    def __init__(self, incoming: Incoming, hold: AbstractContextManager[None]) -> None:
        self._incoming = incoming
        self._hold: AbstractContextManager[None] | None = hold
        hold.__enter__()
        self.size_bytes = incoming.payload.size_bytes

    async def read(self, offset: int, size: int) -> memoryview:
        if not 0 <= offset < self.size_bytes:
            raise OffsetOutOfRangeError(f"offset {offset} of a payload of {self.size_bytes} bytes")
        there = await self._incoming.wait_readable(offset)
        return self._incoming.data[offset : offset + min(size, there)]

    def close(self) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.__exit__(None, None, None)


class Relay:
    """A ``PayloadSource`` over one policy's mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._incoming: dict[str, Incoming] = {}
        self._deltas: OrderedDict[str, tuple[Payload, memoryview]] = OrderedDict()

    # -- calls of the receiving side ---------------------------------------------------------------------------

    def receive(self, incoming: Incoming) -> None:
        """Note that a payload is being received."""
        self._incoming[incoming.payload.payload_id] = incoming

    def received(self, payload: Payload, data: memoryview) -> None:
        """Note that a payload is verified and in the mirror: snapshots are served from the mirror, a delta is kept unchanged."""
        self._incoming.pop(payload.payload_id, None)
        if payload.encoding is not Encoding.DELTA:
            return
        self._deltas[payload.payload_id] = (payload, data)
        allowed = KEPT_DELTA_SHARE * sum(entry.size_bytes for entry in payload.target.tensors)
        while len(self._deltas) > KEPT_DELTAS or (
            len(self._deltas) > 1 and sum(len(kept) for _, kept in self._deltas.values()) > allowed
        ):
            self._deltas.popitem(last=False)

    def lost(self, payload_id: str) -> None:
        """Note that a payload failed; readers that wait for its bytes fail."""
        incoming = self._incoming.pop(payload_id, None)
        if incoming is not None:
            incoming.fail()

    # -- PayloadSource -----------------------------------------------------------------------------------------

    def payload(self, request: PayloadRequest) -> Payload:
        """The version in the mirror: the delta from the requested base if kept, else in full.

        Raises:
            VersionUnavailableError: another run's, or not the held version.
        """
        held = self._mirror.manifest
        if held is None or held.run_id != request.run_id or held.version != request.version or self._mirror.dirty:
            version = "nothing" if held is None else f"version {held.version} of run {held.run_id}"
            raise VersionUnavailableError(
                f"version {request.version} of run {request.run_id} is not held here (held: {version})"
            )
        for payload, _ in reversed(tuple(self._deltas.values())):  # the event loop adds to them meanwhile
            if payload.base == request.base and payload.target.digest == held.digest:
                return payload
        full = full_layout(held)
        return Payload(
            payload_id=full_payload_id(full),
            encoding=Encoding.FULL,
            size_bytes=full.size_bytes,
            target=full,
        )

    def open(self, payload_id: str) -> PayloadReader:
        """A reader of a payload. ``NotFoundError`` if the payload is neither incoming nor kept nor held."""
        incoming = self._incoming.get(payload_id)
        if incoming is not None:
            return incoming.reader(self._mirror.hold())
        if payload_id in self._deltas:
            return MemoryReader(self._deltas[payload_id][1])
        held = self._mirror.manifest
        if held is None or payload_id != full_payload_id(held):
            raise NotFoundError(f"payload {payload_id!r} is not here: ask for the manifest again")
        try:
            return _MirrorReader(self._mirror.lease())
        except VersionUnavailableError as error:
            raise NotFoundError(f"payload {payload_id!r} is being replaced: {error.message}") from None


class _MirrorReader:
    """The full payload of a leased mirror, tensor by tensor; between them lies padding."""

    def __init__(self, lease: AbstractContextManager[HeldWeights]) -> None:
        self._lease: AbstractContextManager[HeldWeights] | None = lease
        held = lease.__enter__()
        manifest = full_layout(held.manifest)
        self._entries: list[TensorEntry] = sorted(manifest.tensors, key=lambda entry: entry.offset)
        self._offsets = [entry.offset for entry in self._entries]
        self._bits = held.bits
        self.size_bytes = manifest.size_bytes

    async def read(self, offset: int, size: int) -> memoryview:
        if not 0 <= offset < self.size_bytes:
            raise OffsetOutOfRangeError(f"offset {offset} of a payload of {self.size_bytes} bytes")
        place = bisect.bisect_right(self._offsets, offset) - 1
        entry = self._entries[place]
        within = offset - entry.offset
        if within < entry.length:
            return self._bits[entry.name].data.cast("B")[within : within + min(size, entry.length - within)]
        following = self._offsets[place + 1] if place + 1 < len(self._offsets) else self.size_bytes
        return memoryview(bytes(min(size, following - offset)))

    def close(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.__exit__(None, None, None)


def full_layout(manifest: Manifest) -> Manifest:
    """The manifest of the version as a snapshot: a manifest from a delta has the delta's offsets."""
    digests = {entry.name: entry.digest for entry in manifest.tensors}
    entries = tuple(replace(entry, digest=digests[entry.name]) for entry in lay_out(manifest.tensors))
    return replace(manifest, tensors=entries)


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
