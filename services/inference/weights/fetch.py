"""One peer that serves weights, publisher or relay: its manifest, its file on the same host, and its transports.

A file on the receiver's host is mapped. Else the bytes come over ZeroMQ or gRPC, in the receiver's order; after a failure
gRPC goes on at the same offset.
"""

from __future__ import annotations

import asyncio
import bisect
import mmap
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import structlog
import zmq
import zmq.asyncio

from services.common.aio import deadline
from services.common.errors import (
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    NotFoundError,
    RollmillError,
    UnknownPolicyError,
    VersionUnavailableError,
)
from services.common.net.hosts import bracketed, host_identity, host_of, is_loopback
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.records import FetchPlan, WeightVersion
from services.common.rpc.client import channel, translated_errors
from services.common.security.identity import DEADLINES
from services.common.security.keys import Peer
from services.common.telemetry.logs import LogEvent
from services.common.transfer.bulk import (
    CHUNK_BYTES,
    KEY_BYTES,
    OFFSET,
    OVERHEAD_BYTES,
    REQUEST,
    WINDOW,
    MemoryReader,
    PayloadReader,
    speak_to,
)
from services.common.weights.snapshot import (
    ALIGNMENT,
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    PayloadNotReadyError,
    PayloadRequest,
    TensorEntry,
    align,
    full_payload_id,
    lay_out,
)
from services.common.wire import payload_from_proto, write
from services.inference.weights.mirror import Mirror

# --- Brings the bytes of a payload over a connection from one source into a buffer: gRPC chunks, or the bulk plane.


log = structlog.get_logger()
STREAM_ATTEMPTS = 4  # at the same offset, before the transfer counts as failed
# Without the monitor ZeroMQ would silently try to reconnect to a dead sender until the deadline.
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ByteRange:
    """Bytes ``start`` to ``end`` of a payload and their buffer; ``offset`` is the next missing byte.

    >>> wanted = ByteRange(2, 4, memoryview(bytearray(2)))
    >>> wanted.put(2, b"x")
    >>> wanted.offset, wanted.is_complete
    (3, False)
    """

    def __init__(
        self, start: int, end: int, into: memoryview, on_received: Callable[[int], None] = lambda offset: None
    ) -> None:
        """``into`` has room for exactly this range; ``on_received`` is called with the offset after every piece."""
        if not 0 <= start <= end or len(into) != end - start:
            raise ValueError(f"{len(into)} bytes of room for bytes {start} to {end}")
        self.start, self.end, self.offset = start, end, start
        self._into = into
        self._on_received = on_received

    @property
    def is_complete(self) -> bool:
        return self.offset == self.end

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Copy received bytes into the range. ``CorruptDataError`` if they do not begin at the offset or exceed the range."""
        if offset != self.offset or len(data) > self.end - offset:
            raise CorruptDataError(
                f"{len(data)} bytes at {offset} came where bytes {self.offset} to {self.end} were due"
            )
        begin = offset - self.start
        self._into[begin : begin + len(data)] = data
        self.offset += len(data)
        self._on_received(self.offset)
        if self.is_complete:
            self._on_received = lambda offset: (
                None
            )  # no reference back: the payload's memory is freed without a garbage collection


def receive_buffer(size_bytes: int) -> memoryview:
    """A buffer for a payload, aligned like its tensors. Not zeroed, in large pages if the kernel has them."""
    room = np.empty(size_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room.data[begin : begin + size_bytes]


class BulkTransport:
    """One source's bulk socket: a ZeroMQ DEALER on the event loop, for the payload that the ticket names."""

    def __init__(self, endpoint: str, ticket: bytes, source: str, *, server_key: bytes = b"") -> None:
        """``server_key``: the server's public key for CURVE; empty, the socket is plain."""
        self._server_key = server_key
        self._endpoint = endpoint
        self._ticket = ticket
        self._source = source

    async def fetch(self, wanted: ByteRange) -> None:
        """Fill the range from its offset; raises as ``WeightSource.fetch``."""
        if wanted.is_complete:
            return
        try:
            socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            socket.linger = 0
            socket.rcvhwm = WINDOW
            socket.maxmsgsize = CHUNK_BYTES  # a sender of more is disconnected by ZeroMQ
            socket.ipv6 = True
            if self._server_key:
                speak_to(socket, self._server_key)
                socket.maxmsgsize = CHUNK_BYTES + OVERHEAD_BYTES
            monitor = socket.get_monitor_socket(_LOST)
        except zmq.ZMQError as error:  # no descriptors are left
            raise InfrastructureError(f"no socket for bulk data from {self._source}: {error}") from None
        try:
            socket.connect(self._endpoint)
            await self._receive(socket, monitor, wanted)
        except zmq.ZMQError as error:
            raise InfrastructureError(f"bulk data from {self._source} at {self._endpoint}: {error}") from None
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def _receive(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, wanted: ByteRange) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        await socket.send(REQUEST.pack(self._ticket, wanted.offset, wanted.end))
        while not wanted.is_complete:
            async with deadline(DEADLINES["FetchWeights"], f"the next bulk data from {self._source}"):
                ready = dict(await poller.poll())
            if socket not in ready:
                raise InfrastructureError(f"the bulk connection to {self._source} at {self._endpoint} is lost")
            head, *data = await socket.recv_multipart(copy=False)
            if len(data) != 1 or len(head) not in (0, OFFSET.size):
                raise CorruptDataError(
                    f"{self._source}: a bulk answer of {1 + len(data)} frames, {len(head)} bytes first"
                )
            if not len(head):
                raise NotFoundError(f"{self._source}: {data[0].bytes.decode(errors='replace')}")
            (offset,) = OFFSET.unpack(head.buffer)
            wanted.put(offset, data[0].buffer)


TRANSPORTS = ("mapped", "bulk", "grpc")


class WeightSource:
    """Use as ``async with WeightSource(address, run_id) as source``."""

    def __init__(
        self,
        address: str,
        run_id: str,
        *,
        transports: Sequence[str] = TRANSPORTS,
        silence_s: float | None = DEADLINES["FetchWeights"],
    ) -> None:
        """``silence_s``: longest wait for a piece of a payload over gRPC."""
        self.address = address
        self._silence_s = silence_s
        self.transport = "grpc"  # that brought the last bytes
        self._run_id = run_id
        self._transports = tuple(transports)
        self._channel = channel(address, Peer.WEIGHTS, run_id)
        self._stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._mapped: tuple[str, int] | None = None  # the offered file, and the payload's offset in it
        self._bulk: BulkTransport | None = None

    async def __aenter__(self) -> WeightSource:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def payload(self, version: WeightVersion, base: BaseVersion | None) -> Payload:
        """The payload for ``version``: a delta against ``base`` when the source has one, else the snapshot.

        Raises:
            PayloadNotReadyError: the source is still making the payload.
            InfrastructureError, DeadlineError: the source does not answer.
            VersionUnavailableError: the source does not hold the version.
            CorruptDataError: the source offers another version than the ledger's, or a delta from another base.
        """
        request = PayloadRequest(
            run_id=self._run_id,
            policy=version.policy,
            version=version.number,
            base=base,
            transports=self._transports,
            host=host_identity(),
        )
        with translated_errors(f"weights at {self.address}"):
            response = await self._stub.GetManifest(
                write(request, weights_pb2.GetManifestRequest()),
                timeout=DEADLINES["GetManifest"],
                # No wait for an absent source: another source, or another attempt, comes sooner.
                wait_for_ready=False,
            )
        if response.HasField("not_ready"):
            what, wait = f"version {version.number} of {version.policy} at {self.address}", response.not_ready
            raise PayloadNotReadyError(what, started=wait.started, size_bytes=wait.size_bytes)
        payload = payload_from_proto(response.payload)
        if payload.target.digest != version.digest or payload.target.version != version.number:
            raise CorruptDataError(
                f"{self.address} offers version {payload.target.version} with digest {payload.target.digest}, "
                f"the ledger says {version.number} with {version.digest}"
            )
        if payload.encoding is Encoding.DELTA and payload.base != base:
            raise CorruptDataError(f"{self.address} offers a delta from {payload.base}, this replica holds {base}")
        whole = sum(align(entry.size_bytes) for entry in payload.target.tensors)
        if not 0 <= payload.size_bytes <= whole:  # the buffer is allocated before the first byte comes
            raise CorruptDataError(f"{self.address} offers {payload.size_bytes} bytes for a version of {whole}")
        self._mapped = self._bulk = None
        if response.HasField("mapped"):
            self._mapped = response.mapped.path, response.mapped.offset
        if response.HasField("bulk"):
            endpoint = _reachable(response.bulk.endpoint, self.address)
            if endpoint and _is_acceptable(endpoint, response.bulk.server_key, is_secure=self._channel.who is not None):
                self._bulk = BulkTransport(
                    endpoint, response.bulk.ticket, self.address, server_key=response.bulk.server_key
                )
        return payload

    def mapped(self, payload: Payload) -> memoryview | None:
        """The whole payload mapped, if mapping is this receiver's first choice among the offered transports."""
        before = self._transports[: self._transports.index("mapped")] if "mapped" in self._transports else ("grpc",)
        if self._mapped is None or "grpc" in before or ("bulk" in before and self._bulk is not None):
            return None
        try:
            data = map_file(*self._mapped, payload.size_bytes)
        except InfrastructureError as error:
            log.warning(LogEvent.TRANSPORT_FAILED, source=self.address, transport="mapped", error=error.message)
            return None
        self.transport = "mapped"
        return data

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        """Fill the range over ZeroMQ, if this was offered and stands before gRPC, else or after a failure over gRPC.

        A broken stream is opened again at the offset. Received bytes stay in ``wanted`` after an error.

        Raises:
            InfrastructureError, DeadlineError, NotFoundError: the source does not send now.
            CorruptDataError: the received bytes cannot be the payload.
        """
        if wanted.end > payload.size_bytes:
            raise ValueError(f"bytes up to {wanted.end} of a payload of {payload.size_bytes}")
        order = (*self._transports, "grpc")
        if self._bulk is not None and "bulk" in order[: order.index("grpc")]:
            try:
                await self._bulk.fetch(wanted)
            except (InfrastructureError, DeadlineError, NotFoundError) as error:
                log.warning(
                    LogEvent.TRANSPORT_FAILED,
                    source=self.address,
                    transport="bulk",
                    offset=wanted.offset,
                    reason=error.reason,
                    error=error.message,
                )
            else:
                self.transport = "bulk"
                return
        self.transport = "grpc"
        attempt, began_at = 1, wanted.offset
        while not wanted.is_complete:
            try:
                await self.stream(payload, wanted)
            except (InfrastructureError, DeadlineError) as error:
                log.warning(
                    "weights.stream_broke",
                    source=self.address,
                    offset=wanted.offset,
                    attempt=attempt,
                    error=error.message,
                )
                attempt = attempt + 1 if wanted.offset == began_at else 1
                began_at = wanted.offset
                if attempt > STREAM_ATTEMPTS:
                    raise

    async def stream(self, payload: Payload, wanted: ByteRange) -> None:
        """One gRPC stream of the rest of the range; raises as ``fetch``, at the first failure."""
        request = weights_pb2.FetchWeightsRequest(payload_id=payload.payload_id, start_offset=wanted.offset)
        if wanted.end != payload.size_bytes:
            request.end_offset = wanted.end
        call = self._stub.FetchWeights(request)
        try:
            with translated_errors(f"weights at {self.address}", "FetchWeights"):
                while True:
                    async with deadline(self._silence_s, f"the next chunk of weights from {self.address}"):
                        response: Any = await call.read()  # a message, or the mark of the end
                    if response is grpc.aio.EOF:
                        break
                    wanted.put(response.offset, response.data)
        finally:
            call.cancel()
        if not wanted.is_complete:
            raise CorruptDataError(
                f"{self.address}: payload {payload.payload_id} ended at {wanted.offset} of {wanted.end} bytes"
            )


def map_file(path: str, begin: int, size_bytes: int) -> memoryview:
    """The payload in a file that its source has on this host, as writable memory, allocated by writing (copy-on-write).

    Writes of the receiver do not reach the file; the file is sealed, so the receiver sees no later writes. The mapping
    outlives the file's name. A tensor that is to change is better copied out of the mapping first: while any part is
    mapped, the whole file keeps its memory.

    Raises:
        InfrastructureError: the file is gone, or is not the offered file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise InfrastructureError(f"the offered file {path} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or begin < 0 or found.st_size < begin + size_bytes:
            raise InfrastructureError(f"the offered file {path} has no {size_bytes} bytes from {begin}")
        shift = begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(descriptor, shift + size_bytes, access=mmap.ACCESS_COPY, offset=begin - shift)
    except OSError as error:
        raise InfrastructureError(f"the offered file {path} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return memoryview(mapped)[shift:]


def _reachable(endpoint: str, source: str) -> str:
    """The address of the source's bulk socket; empty if not a TCP address. A wildcard host becomes the host of the source's
    known address."""
    scheme, _, place = endpoint.partition("://")
    host, port = host_of(place), place.rpartition(":")[2]
    if scheme != "tcp" or not port.isdigit():  # other kinds of ZeroMQ addresses are not supported
        return ""
    return f"tcp://{bracketed(host_of(source))}:{port}" if host in ("0.0.0.0", "::") else endpoint


def _is_acceptable(endpoint: str, server_key: bytes, *, is_secure: bool) -> bool:
    """Whether the bulk socket is secure: encrypted with a key that came over TLS, or plain on loopback without keys."""
    if is_secure:
        return len(server_key) == KEY_BYTES
    return not server_key and is_loopback(host_of(endpoint.removeprefix("tcp://")))


# --- Passes weights on to other replicas: the incoming payload, the newest delta, and the held version.


PROGRESS_TIMEOUT_S = 20.0  # below the receiver's limit of 30 s for a silent stream


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


class IncomingReader(MemoryReader):
    """Reads the received bytes. Held meanwhile: a snapshot's buffer becomes the mirror, which later deltas write into."""

    def __init__(self, incoming: Incoming, mirror: Mirror) -> None:
        mirror.hold()
        super().__init__(incoming.data, mirror.release)
        self._incoming = incoming

    async def read(self, offset: int, size: int) -> memoryview:
        return await super().read(offset, min(size, await self._incoming.wait_readable(offset)))


class Relay:
    """A ``PayloadSource`` over one policy's mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._incoming: dict[str, Incoming] = {}
        self._delta: tuple[Payload, memoryview] | None = None  # the newest, as it came

    # -- calls of the receiving side ---------------------------------------------------------------------------

    def receive(self, incoming: Incoming) -> None:
        """Note that a payload is being received."""
        self._incoming[incoming.payload.payload_id] = incoming

    def received(self, payload: Payload, data: memoryview) -> None:
        """Note that a payload is verified and in the mirror: snapshots are served from the mirror, the newest delta as it came."""
        self._incoming.pop(payload.payload_id, None)
        if payload.encoding is Encoding.DELTA:
            self._delta = payload, data

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
        if self._delta is not None:
            payload = self._delta[0]
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
            return IncomingReader(incoming, self._mirror)
        if self._delta is not None and self._delta[0].payload_id == payload_id:
            return MemoryReader(self._delta[1])
        held = self._mirror.manifest
        if held is None or payload_id != full_payload_id(held):
            raise NotFoundError(f"payload {payload_id!r} is not here: ask for the manifest again")
        try:
            return _MirrorReader(self._mirror)
        except VersionUnavailableError as error:
            raise NotFoundError(f"payload {payload_id!r} is being replaced: {error.message}") from None


class _MirrorReader(PayloadReader):
    """Reads the full payload of a mirror, tensor by tensor; between them lies padding."""

    def __init__(self, mirror: Mirror) -> None:
        held, self._bits = mirror.lease()
        manifest = full_layout(held)
        super().__init__(manifest.size_bytes, mirror.release)
        self._entries: list[TensorEntry] = sorted(manifest.tensors, key=lambda entry: entry.offset)
        self._offsets = [entry.offset for entry in self._entries]

    async def read(self, offset: int, size: int) -> memoryview:
        place = bisect.bisect_right(self._offsets, offset) - 1
        entry = self._entries[place]
        within = offset - entry.offset
        if within < entry.length:
            return self._bits[entry.name].data.cast("B")[within : within + min(size, entry.length - within)]
        following = self._offsets[place + 1] if place + 1 < len(self._offsets) else self.size_bytes
        return memoryview(bytes(min(size, following - offset)))


def full_layout(manifest: Manifest) -> Manifest:
    """The manifest of the version as a snapshot: a manifest from a delta has the delta's offsets."""
    digests = {entry.name: entry.digest for entry in manifest.tensors}
    entries = tuple(replace(entry, digest=digests[entry.name]) for entry in lay_out(manifest.tensors))
    return replace(manifest, tensors=entries)


MIN_SHARD_BYTES = 1 << 20
STALL_S = 5.0  # without a byte: the relay is replaced
_ASK_AGAIN_S = 0.2


def cut(size_bytes: int, num_relays: int) -> list[tuple[int, int]]:
    """(start, end) of every shard; the same on every replica. One shard if sharing would not pay.

    >>> cut(10 << 20, 3)
    [(0, 3495254), (3495254, 6990508), (6990508, 10485760)]
    """
    count = max(1, min(num_relays, size_bytes // MIN_SHARD_BYTES))
    width = max(1, -(-size_bytes // count))
    return [(start, min(start + width, size_bytes)) for start in range(0, size_bytes, width)] or [(0, 0)]


async def fetch_shards(
    payload: Payload, incoming: Incoming, plan: FetchPlan, source: WeightSource, run_id: str
) -> tuple[str, ...]:
    """Fill the incoming payload, a shard from each relay; ``source`` has this replica's own shard, and what a relay lacks.

    Returns the sources of the bytes, the largest share first. Raises the source's error.
    """
    brought: Counter[str] = Counter()

    async def fetch(number: int, wanted: ByteRange) -> None:
        if number != plan.own_shard:
            await _fetch_from_relay(plan.relays[number], run_id, payload, wanted)
            brought[plan.relays[number]] += wanted.offset - wanted.start
        if not wanted.is_complete:
            begun_at = wanted.offset
            await source.fetch(payload, wanted)
            brought[source.address] += wanted.offset - begun_at

    ranges = [incoming.shard(start, end) for start, end in cut(payload.size_bytes, len(plan.relays))]
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, wanted in enumerate(ranges):
                tasks.create_task(fetch(number, wanted), name=f"weights shard {number}")
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # its failure cancelled the others
    return tuple(address for address, count in brought.most_common() if count)


async def _fetch_from_relay(address: str, run_id: str, payload: Payload, wanted: ByteRange) -> None:
    """Fetch from a relay until the range is complete, the relay fails, or no byte comes for ``STALL_S``."""
    asked_at = time.monotonic()
    try:
        async with WeightSource(address, run_id, transports=("grpc",), silence_s=STALL_S) as relay:
            while not wanted.is_complete:
                try:
                    await relay.stream(payload, wanted)
                except (NotFoundError, UnknownPolicyError):  # the relay does not know the payload yet
                    if wanted.offset > wanted.start or time.monotonic() - asked_at > STALL_S:
                        raise
                    await asyncio.sleep(_ASK_AGAIN_S)
    except RollmillError as error:
        log.warning("weights.relay_replaced", relay=address, offset=wanted.offset, end=wanted.end, reason=error.message)
