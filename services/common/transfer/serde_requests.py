"""Conversions between what a receiver asks for and the wire, in pairs."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.pb import weights_pb2
from services.common.serde_transfers import TRANSPORT_NAMES, TRANSPORTS
from services.common.transfer.source import PayloadRequest
from services.common.weights.manifest import BaseVersion


def payload_request_to_proto(
    request: PayloadRequest, transports: Iterable[str] = (), host: str = ""
) -> weights_pb2.GetManifestRequest:
    """``transports`` as ``weights.transports`` of the recipe writes them."""
    base = request.base
    return weights_pb2.GetManifestRequest(
        run_id=request.run_id,
        policy=request.policy,
        version=request.version,
        base_version=base.number if base else None,
        base_digest=base.digest if base else "",
        transports=[TRANSPORTS[name] for name in transports],
        host=host,
        link_bytes_per_second=request.link_bytes_per_s,
    )


def payload_request_from_proto(proto: weights_pb2.GetManifestRequest) -> PayloadRequest:
    base = None
    if proto.HasField("base_version"):
        base = BaseVersion(number=proto.base_version, digest=proto.base_digest)
    return PayloadRequest(
        run_id=proto.run_id,
        policy=proto.policy,
        version=proto.version,
        base=base,
        link_bytes_per_s=proto.link_bytes_per_second,
    )


def transports_from_proto(proto: weights_pb2.GetManifestRequest) -> tuple[str, ...]:
    """Those that this end knows; a receiver may know more."""
    return tuple(TRANSPORT_NAMES[number] for number in proto.transports if number in TRANSPORT_NAMES)
