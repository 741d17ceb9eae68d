"""One peer that serves weights, publisher or relay: its manifest, its file on the same host, and its transports.

A file on the receiver's host is mapped. Else the bytes come over ZeroMQ or gRPC, in the receiver's order; after a failure
gRPC goes on at the same offset.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence

import structlog

from services.common.errors import (
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    NotFoundError,
)
from services.common.net.hosts import bracketed, host_identity, host_of, is_loopback
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.records.types import WeightVersion
from services.common.rpc.client.channel import DEADLINES, call_metadata, channel, translated_errors
from services.common.security.roles import Peer
from services.common.telemetry.log_events import LogEvent
from services.common.transfer.bulk import KEY_BYTES
from services.common.weights.snapshot import BaseVersion, Encoding, Payload, PayloadRequest, align
from services.common.wire import not_ready_from_proto, payload_from_proto, payload_request_to_proto
from services.inference.weights.transports import (
    BulkTransport,
    ByteRange,
    GrpcTransport,
)

log = structlog.get_logger()

TRANSPORTS = ("mapped", "bulk", "grpc")


class WeightSource:
    """Use as ``async with WeightSource(address, run_id) as source``."""

    def __init__(
        self,
        address: str,
        run_id: str,
        *,
        transports: Sequence[str] = TRANSPORTS,
    ) -> None:
        self.address = address
        self.transport = "grpc"  # that brought the last bytes
        self._run_id = run_id
        self._transports = tuple(transports)
        self._channel = channel(address, Peer.WEIGHTS)
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
        response = await self._manifest(version, base)
        not_ready = not_ready_from_proto(response, f"version {version.number} of {version.policy} at {self.address}")
        if not_ready is not None:
            raise not_ready
        payload = payload_from_proto(response)
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

        Raises gRPC's error, or ``CorruptDataError`` at once.
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
        await GrpcTransport(self._stub, self.address).fetch(payload, wanted)
        self.transport = "grpc"

    async def _manifest(self, version: WeightVersion, base: BaseVersion | None) -> weights_pb2.GetManifestResponse:
        request = PayloadRequest(run_id=self._run_id, policy=version.policy, version=version.number, base=base)
        with translated_errors(f"weights at {self.address}"):
            return await self._stub.GetManifest(
                payload_request_to_proto(request, self._transports, host_identity()),
                timeout=DEADLINES["GetManifest"],
                metadata=call_metadata(self._run_id),
                # No wait for an absent source: another source, or another attempt, comes sooner.
                wait_for_ready=False,
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
