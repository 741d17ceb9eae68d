"""What this replica can pass on to others: the payload that it is receiving, the last deltas, and the version it holds.

    incoming payload  -- ranges become readable as they arrive, before anybody has verified them
    last deltas       -- as they were received
    mirror            -- the full snapshot, in the publisher's layout

Whoever fetches here verifies for himself, so passing on unverified bytes can cost time but do no harm. Payload ids are
the same everywhere, and so are the bytes behind them. Used from the event loop, ``payload`` from a thread as well.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from contextlib import AbstractContextManager
from pathlib import Path

from services.common.errors import NotFoundError, OffsetOutOfRangeError, VersionUnavailableError
from services.common.transfer.source import MemoryReader, PayloadReader, PayloadRequest
from services.common.weights.manifest import (
    Encoding,
    Manifest,
    Payload,
    TensorEntry,
    full_payload_id,
    lay_out,
    with_digest,
)
from services.inference.weights.incoming import Incoming
from services.inference.weights.mirror import HeldWeights, Mirror

KEPT_DELTAS = 4
KEPT_DELTA_SHARE = 0.25  # of the mirror's bytes, in all


class Relay:
    """A ``PayloadSource`` over one policy's mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._incoming: dict[str, Incoming] = {}
        self._deltas: OrderedDict[str, tuple[Payload, memoryview]] = OrderedDict()

    # -- what the receiver side tells it -----------------------------------------------------------------------

    def receive(self, incoming: Incoming) -> None:
        """A payload is on its way."""
        self._incoming[incoming.payload.payload_id] = incoming

    def received(self, payload: Payload, data: memoryview) -> None:
        """It is verified and in the mirror: a snapshot is read there from now on, a delta is kept as it came."""
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
        """Nothing came of it; who waits for its bytes is told."""
        incoming = self._incoming.pop(payload_id, None)
        if incoming is not None:
            incoming.fail()

    # -- PayloadSource -----------------------------------------------------------------------------------------

    def payload(self, request: PayloadRequest) -> Payload:
        """The version in the mirror: the delta from the asker's base when it is kept, else in full.

        Raises:
            VersionUnavailableError: another run's, or not the version held.
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
        """``NotFoundError`` when it is neither on its way nor kept nor held."""
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

    def file(self) -> tuple[Path, int] | None:
        return None

    def close(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.__exit__(None, None, None)


def full_layout(manifest: Manifest) -> Manifest:
    """The same version as its snapshot lies: a manifest that came with a delta has the delta's offsets."""
    digests = {entry.name: entry.digest for entry in manifest.tensors}
    entries = tuple(with_digest(entry, digests[entry.name]) for entry in lay_out(manifest.tensors))
    return Manifest(
        run_id=manifest.run_id,
        policy=manifest.policy,
        version=manifest.version,
        digest=manifest.digest,
        tensors=entries,
    )
