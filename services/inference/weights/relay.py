"""Serves weights to other replicas: the incoming payload, the last deltas, and the held version.

    incoming payload  -- ranges become readable as they arrive, before verification
    last deltas       -- as received
    mirror            -- the full snapshot, in the publisher's layout

An ``Incoming`` is a payload that arrives in shards, of which readers get the received bytes. Every receiver verifies the
payload, so unverified bytes can cost time but do no harm. Payload ids are the same everywhere, and so are their bytes. Used
from the event loop, ``payload`` from a thread as well.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from services.common.aio import deadline
from services.common.errors import NotFoundError, OffsetOutOfRangeError, VersionUnavailableError
from services.common.transfer.source import MemoryReader, PayloadReader
from services.common.weights.manifest import (
    Encoding,
    Manifest,
    Payload,
    PayloadRequest,
    TensorEntry,
    full_payload_id,
    lay_out,
    with_digest,
)
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
    entries = tuple(with_digest(entry, digests[entry.name]) for entry in lay_out(manifest.tensors))
    return replace(manifest, tensors=entries)
