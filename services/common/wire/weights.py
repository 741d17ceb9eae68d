"""Conversions between weight versions, payloads, requests for them, records of transfers and the wire, in pairs.

Publishers and receivers exchange payloads and requests; replicas report transfers, and the orchestrator keeps them."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.errors import CorruptDataError, InvalidRequestError
from services.common.pb import pool_pb2, tensor_pb2, weights_pb2
from services.common.records.types import FetchPlan, WeightTransfer, WeightVersion
from services.common.weights.snapshot import (
    MANIFEST_WAIT_S,
    AdapterIdentity,
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    PayloadNotReadyError,
    PayloadRequest,
    TensorEntry,
)
from services.common.wire.records import (
    duration_from_proto,
    duration_to_proto,
    timestamp_from_proto,
    timestamp_to_proto,
)

_DTYPE_TO_PROTO = {
    "float32": tensor_pb2.D_TYPE_FLOAT32,
    "bfloat16": tensor_pb2.D_TYPE_BFLOAT16,
    "float16": tensor_pb2.D_TYPE_FLOAT16,
    "int32": tensor_pb2.D_TYPE_INT32,
    "int64": tensor_pb2.D_TYPE_INT64,
    "uint8": tensor_pb2.D_TYPE_UINT8,
}
_DTYPE_FROM_PROTO = {number: name for name, number in _DTYPE_TO_PROTO.items()}
_ENCODING_TO_PROTO = {
    Encoding.FULL: weights_pb2.WEIGHT_ENCODING_FULL,
    Encoding.DELTA: weights_pb2.WEIGHT_ENCODING_DELTA,
}
_ENCODING_FROM_PROTO = {number: encoding for encoding, number in _ENCODING_TO_PROTO.items()}

# Names that this end does not know are left empty: a record is for people, and is not worth a refusal.
_ENCODINGS = {encoding.value: number for encoding, number in _ENCODING_TO_PROTO.items()}
TRANSPORTS = {
    "grpc": weights_pb2.WEIGHT_TRANSPORT_GRPC,
    "mapped": weights_pb2.WEIGHT_TRANSPORT_MAPPED,
    "bulk": weights_pb2.WEIGHT_TRANSPORT_BULK,
}
_ENCODING_NAMES = {number: name for name, number in _ENCODINGS.items()}
TRANSPORT_NAMES = {number: name for name, number in TRANSPORTS.items()}


def weight_version_to_proto(version: WeightVersion, run_id: str = "") -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(
        policy=version.policy, number=version.number, digest=version.digest, sources=version.sources, run_id=run_id
    )


def weight_version_from_proto(proto: weights_pb2.WeightVersion) -> WeightVersion:
    return WeightVersion(policy=proto.policy, number=proto.number, digest=proto.digest, sources=tuple(proto.sources))


def fetch_plan_to_proto(plan: FetchPlan) -> pool_pb2.FetchPlan:
    return pool_pb2.FetchPlan(relays=plan.relays, own_stripe=plan.own_shard)


def fetch_plan_from_proto(proto: pool_pb2.FetchPlan) -> FetchPlan:
    own = proto.own_stripe if proto.HasField("own_stripe") else None
    if own is not None and not 0 <= own < len(proto.relays):
        raise InvalidRequestError(f"a fetch plan of {len(proto.relays)} relays names shard {own}")
    return FetchPlan(relays=tuple(proto.relays), own_shard=own)


def payload_to_proto(payload: Payload) -> weights_pb2.GetManifestResponse:
    target = payload.target
    return weights_pb2.GetManifestResponse(
        version=weights_pb2.WeightVersion(
            policy=target.policy, number=target.version, digest=target.digest, run_id=target.run_id
        ),
        encoding=_ENCODING_TO_PROTO[payload.encoding],
        base_version=payload.base.number if payload.base else None,
        base_digest=payload.base.digest if payload.base else "",
        payload_id=payload.payload_id,
        payload_size_bytes=payload.size_bytes,
        tensors=[
            weights_pb2.TensorManifest(
                name=entry.name,
                dtype=_DTYPE_TO_PROTO[entry.dtype],
                shape=entry.shape,
                payload_offset=entry.offset,
                payload_length=entry.length,
                digest=entry.digest,
            )
            for entry in target.tensors
        ],
        adapter=None if target.adapter is None else _adapter_to_proto(target.adapter),
        encode_time=duration_to_proto(payload.encode_s) if payload.encode_s else None,
    )


def payload_from_proto(proto: weights_pb2.GetManifestResponse) -> Payload:
    """Raises ``CorruptDataError`` for types this end does not know, or a version digest that its tensors contradict."""
    try:
        encoding = _ENCODING_FROM_PROTO[proto.encoding]
        tensors = tuple(
            TensorEntry(
                name=tensor.name,
                dtype=_DTYPE_FROM_PROTO[tensor.dtype],
                shape=tuple(tensor.shape),
                offset=tensor.payload_offset,
                length=tensor.payload_length,
                digest=tensor.digest,
            )
            for tensor in proto.tensors
        )
    except KeyError as error:
        raise CorruptDataError(f"the manifest has an encoding or element type unknown here: {error}") from None
    manifest = Manifest.of(
        run_id=proto.version.run_id,
        policy=proto.version.policy,
        version=proto.version.number,
        tensors=tensors,
        adapter=_adapter_from_proto(proto.adapter) if proto.HasField("adapter") else None,
    )
    if manifest.digest != proto.version.digest:
        raise CorruptDataError(
            f"the manifest of version {manifest.version} names digest {proto.version.digest}, "
            f"its tensors make {manifest.digest}"
        )
    base = None
    if proto.HasField("base_version"):
        base = BaseVersion(number=proto.base_version, digest=proto.base_digest)
    return Payload(
        payload_id=proto.payload_id,
        encoding=encoding,
        size_bytes=proto.payload_size_bytes,
        target=manifest,
        base=base,
        encode_s=duration_from_proto(proto.encode_time),
    )


def _adapter_to_proto(adapter: AdapterIdentity) -> weights_pb2.Adapter:
    return weights_pb2.Adapter(
        rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets, base_digest=adapter.base
    )


def _adapter_from_proto(proto: weights_pb2.Adapter) -> AdapterIdentity:
    return AdapterIdentity(rank=proto.rank, alpha=proto.alpha, targets=tuple(proto.targets), base=proto.base_digest)


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
        wait=duration_to_proto(request.wait_s),
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
        wait_s=duration_from_proto(proto.wait) if proto.HasField("wait") else MANIFEST_WAIT_S,
    )


def not_ready_to_proto(error: PayloadNotReadyError) -> weights_pb2.GetManifestResponse:
    return weights_pb2.GetManifestResponse(
        not_ready=weights_pb2.PayloadNotReady(started=error.started, size_bytes=error.size_bytes)
    )


def not_ready_from_proto(proto: weights_pb2.GetManifestResponse, payload: str) -> PayloadNotReadyError | None:
    """The answer "not ready" about ``payload``; None when the manifest is there."""
    if not proto.HasField("not_ready"):
        return None
    return PayloadNotReadyError(payload, started=proto.not_ready.started, size_bytes=proto.not_ready.size_bytes)


def transports_from_proto(proto: weights_pb2.GetManifestRequest) -> tuple[str, ...]:
    """Those that this end knows; a receiver may know more."""
    return tuple(TRANSPORT_NAMES[number] for number in proto.transports if number in TRANSPORT_NAMES)


def weight_transfer_to_proto(transfer: WeightTransfer) -> weights_pb2.WeightTransfer:
    return weights_pb2.WeightTransfer(
        policy=transfer.policy,
        version=transfer.version,
        base_version=transfer.base_version,
        encoding=_ENCODINGS.get(transfer.encoding, weights_pb2.WEIGHT_ENCODING_UNSPECIFIED),
        transport=TRANSPORTS.get(transfer.transport, weights_pb2.WEIGHT_TRANSPORT_UNSPECIFIED),
        sources=transfer.sources,
        payload_size_bytes=transfer.payload_size_bytes,
        full_size_bytes=transfer.full_size_bytes,
        num_changes=transfer.num_changes,
        start_time=timestamp_to_proto(transfer.started_at),
        encode_time=duration_to_proto(transfer.encode_s),
        fetch_time=duration_to_proto(transfer.fetch_s),
        verify_time=duration_to_proto(transfer.verify_s),
        write_time=duration_to_proto(transfer.write_s),
        pause_time=duration_to_proto(transfer.pause_s),
        error=transfer.error,
    )


def weight_transfer_from_proto(proto: weights_pb2.WeightTransfer) -> WeightTransfer:
    return WeightTransfer(
        policy=proto.policy,
        version=proto.version,
        base_version=proto.base_version if proto.HasField("base_version") else None,
        encoding=_ENCODING_NAMES.get(proto.encoding, ""),
        transport=TRANSPORT_NAMES.get(proto.transport, ""),
        sources=tuple(proto.sources),
        payload_size_bytes=proto.payload_size_bytes,
        full_size_bytes=proto.full_size_bytes,
        num_changes=proto.num_changes,
        started_at=timestamp_from_proto(proto.start_time),
        encode_s=duration_from_proto(proto.encode_time),
        fetch_s=duration_from_proto(proto.fetch_time),
        verify_s=duration_from_proto(proto.verify_time),
        write_s=duration_from_proto(proto.write_time),
        pause_s=duration_from_proto(proto.pause_time),
        error=proto.error,
    )
