"""Conversions between weight payloads, requests for them and the wire, in pairs. Used by publishers and by receivers."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.errors import CorruptDataError
from services.common.pb import tensor_pb2, weights_pb2
from services.common.weights.adapter import AdapterIdentity
from services.common.weights.manifest import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    PayloadRequest,
    ReceiverRates,
    TensorEntry,
)
from services.common.weights.not_ready import LONGEST_RETRY_S, PayloadNotReadyError
from services.common.wire.records import duration_from_proto, duration_to_proto
from services.common.wire.transfers import TRANSPORT_NAMES, TRANSPORTS

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
# Deltas have one coding, which the protocol calls fast; the other profile of the protocol is refused.
_PROFILES = {
    Encoding.FULL: weights_pb2.DELTA_PROFILE_UNSPECIFIED,
    Encoding.DELTA: weights_pb2.DELTA_PROFILE_FAST,
}


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
        profile=_PROFILES[payload.encoding],
        adapter=None if target.adapter is None else _adapter_to_proto(target.adapter),
        encode_time=duration_to_proto(payload.encode_s) if payload.encode_s else None,
        choice=payload.choice,
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
    if proto.profile not in _PROFILES.values():
        raise CorruptDataError(f"the manifest has delta profile {proto.profile}, unknown here")
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
        choice=proto.choice,
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
        wait=duration_to_proto(request.wait_s) if request.wait_s is not None else None,
        link_bytes_per_second=request.rates.link,
        decode_bytes_per_second=request.rates.decode,
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
        wait_s=duration_from_proto(proto.wait) if proto.HasField("wait") else None,
        rates=ReceiverRates(link=proto.link_bytes_per_second, decode=proto.decode_bytes_per_second),
    )


def not_ready_to_proto(error: PayloadNotReadyError) -> weights_pb2.GetManifestResponse:
    return weights_pb2.GetManifestResponse(
        not_ready=weights_pb2.PayloadNotReady(
            retry_after=duration_to_proto(error.after_s), started=error.started, size_bytes=error.size_bytes
        )
    )


def not_ready_from_proto(proto: weights_pb2.GetManifestResponse, payload: str) -> PayloadNotReadyError | None:
    """The answer "not ready" about ``payload``; None when the manifest is there."""
    if not proto.HasField("not_ready"):
        return None
    answer = proto.not_ready
    return PayloadNotReadyError(
        payload,
        min(LONGEST_RETRY_S, duration_from_proto(answer.retry_after)),  # the source is not trusted with a long silence
        started=answer.started,
        size_bytes=answer.size_bytes,
    )


def transports_from_proto(proto: weights_pb2.GetManifestRequest) -> tuple[str, ...]:
    """Those that this end knows; a receiver may know more."""
    return tuple(TRANSPORT_NAMES[number] for number in proto.transports if number in TRANSPORT_NAMES)
