"""One peer that serves weights, publisher or relay: its manifest, and the ways in which its bytes may come.

The ways are tried in the receiver's order; when one fails in mid-transfer the next goes on at the same offset, gRPC last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import structlog

from services.common.errors import (
    BaseUnavailableError,
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    NotFoundError,
)
from services.common.hosts import bracketed, host_of
from services.common.loopback import is_loopback
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.channel import DEADLINES, call_metadata, channel, translated_errors
from services.common.security.roles import Peer
from services.common.serde_weights import payload_from_proto
from services.common.transfer.bulk_curve import KEY_BYTES
from services.common.transfer.host import host_identity
from services.common.transfer.serde_requests import payload_request_to_proto
from services.common.transfer.source import PayloadRequest
from services.common.types import WeightVersion
from services.common.weights.manifest import BaseVersion, Encoding, Payload, align
from services.inference.weights.fetch_bulk import BulkTransport
from services.inference.weights.fetch_grpc import GrpcTransport
from services.inference.weights.fetch_links import LinkSpeeds
from services.inference.weights.fetch_mapped import MappedTransport
from services.inference.weights.fetch_range import ByteRange, Transport

log = structlog.get_logger()

TRANSPORTS = ("mapped", "bulk", "grpc")

_ANOTHER_WAY_MAY_DO = (InfrastructureError, DeadlineError, NotFoundError)


class WeightSource:
    """Use as ``async with WeightSource(address, run_id) as source``."""

    def __init__(
        self,
        address: str,
        run_id: str,
        *,
        transports: Sequence[str] = TRANSPORTS,
        links: LinkSpeeds | None = None,
    ) -> None:
        self.address = address
        self.transport = "grpc"  # that brought the last bytes
        self._run_id = run_id
        self._transports = tuple(transports)
        self._links = links if links is not None else LinkSpeeds()
        self._channel = channel(address, Peer.WEIGHTS)
        self._stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._offers: dict[str, Transport] = {}
        self._offered_payload = ""

    async def __aenter__(self) -> WeightSource:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def payload(self, version: WeightVersion, base: BaseVersion | None) -> Payload:
        """What to fetch to hold ``version``: a delta against ``base`` when the source has one, else the snapshot.

        Raises:
            InfrastructureError, DeadlineError: the source does not answer.
            VersionUnavailableError: the source does not hold it.
            CorruptDataError: it offers another version than the ledger's, or a delta from another base.
        """
        response = await self._manifest(version, base)
        payload = payload_from_proto(response)
        if payload.target.digest != version.digest or payload.target.version != version.number:
            raise CorruptDataError(
                f"{self.address} offers version {payload.target.version} with digest {payload.target.digest}, "
                f"the ledger says {version.number} with {version.digest}"
            )
        if payload.encoding is Encoding.DELTA and payload.base != base:
            raise CorruptDataError(f"{self.address} offers a delta from {payload.base}, this replica holds {base}")
        whole = sum(align(entry.size_bytes) for entry in payload.target.tensors)
        if not 0 <= payload.size_bytes <= whole:  # room is made for it before the first byte comes
            raise CorruptDataError(f"{self.address} offers {payload.size_bytes} bytes for a version of {whole}")
        self._offered_payload = payload.payload_id
        self._offers = {}
        if response.HasField("mapped"):
            self._offers["mapped"] = MappedTransport(response.mapped.path, response.mapped.offset)
        if response.HasField("bulk"):
            endpoint = _reachable(response.bulk.endpoint, self.address)
            if endpoint and _is_acceptable(endpoint, response.bulk.server_key, is_secure=self._channel.who is not None):
                self._offers["bulk"] = BulkTransport(
                    endpoint, response.bulk.ticket, self.address, server_key=response.bulk.server_key
                )
        return payload

    def mapped(self, payload: Payload) -> memoryview | None:
        """The whole payload mapped, when that is this receiver's first choice among what is offered."""
        first = next(self._ways(payload))
        if not isinstance(first, MappedTransport):
            return None
        try:
            data = first.whole(payload)
        except InfrastructureError as error:
            log.warning("weights.transport_failed", source=self.address, transport="mapped", error=error.message)
            del self._offers["mapped"]
            return None
        self.transport = first.name
        return data

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        """Fill the range. Raises what the last way raised, or ``CorruptDataError`` at once."""
        if wanted.end > payload.size_bytes:
            raise ValueError(f"bytes up to {wanted.end} of a payload of {payload.size_bytes}")
        for way in self._ways(payload):
            began, first = time.monotonic(), wanted.offset
            try:
                await way.fetch(payload, wanted)
            except _ANOTHER_WAY_MAY_DO as error:
                if way.name == "grpc":
                    raise
                log.warning(
                    "weights.transport_failed",
                    source=self.address,
                    transport=way.name,
                    offset=wanted.offset,
                    reason=error.reason,
                    error=error.message,
                )
                continue
            self.transport = way.name
            if way.name != "mapped":
                self._links.record(self.address, wanted.offset - first, time.monotonic() - began)
            return

    def _ways(self, payload: Payload) -> Iterator[Transport]:
        """In the receiver's order, as far as offered for this payload; gRPC is always there, and always the last."""
        if payload.payload_id == self._offered_payload:
            for name in self._transports:
                if name == "grpc":
                    break
                if name in self._offers:
                    yield self._offers[name]
        yield GrpcTransport(self._stub, self.address)

    async def _manifest(self, version: WeightVersion, base: BaseVersion | None) -> weights_pb2.GetManifestResponse:
        request = PayloadRequest(
            run_id=self._run_id,
            policy=version.policy,
            version=version.number,
            base=base,
            link_bytes_per_s=self._links.bytes_per_s(self.address),
        )
        try:
            with translated_errors(f"weights at {self.address}"):
                return await self._stub.GetManifest(
                    payload_request_to_proto(request, self._transports, host_identity()),
                    timeout=DEADLINES["GetManifest"],
                    metadata=call_metadata(self._run_id),
                    # Who is not there is not waited for: another source, or another attempt, comes sooner.
                    wait_for_ready=False,
                )
        except BaseUnavailableError:
            if base is None:
                raise
            return await self._manifest(version, None)


def _reachable(endpoint: str, source: str) -> str:
    """Where the source's bulk socket is for us, empty for what is no TCP address: one that listens everywhere does so at
    the address under which we know the source."""
    scheme, _, place = endpoint.partition("://")
    host, port = host_of(place), place.rpartition(":")[2]
    if scheme != "tcp" or not port.isdigit():  # no other kind of ZeroMQ address is ours
        return ""
    return f"tcp://{bracketed(host_of(source))}:{port}" if host in ("0.0.0.0", "::") else endpoint


def _is_acceptable(endpoint: str, server_key: bytes, *, is_secure: bool) -> bool:
    """Encrypted with a key that came over TLS; or plain on loopback, as the control channel is then."""
    if is_secure:
        return len(server_key) == KEY_BYTES
    return not server_key and is_loopback(host_of(endpoint.removeprefix("tcp://")))
