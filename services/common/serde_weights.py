"""Conversions between weight payloads and the wire, in pairs. Used by publishers and by receivers."""

from __future__ import annotations

from services.common.errors import CorruptDataError
from services.common.pb import tensor_pb2, weights_pb2
from services.common.serde import duration_from_proto, duration_to_proto
from services.common.weights.manifest import BaseVersion, Encoding, Manifest, Payload, Profile, TensorEntry

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
_PROFILE_TO_PROTO = {
    None: weights_pb2.DELTA_PROFILE_UNSPECIFIED,
    Profile.FAST: weights_pb2.DELTA_PROFILE_FAST,
    Profile.SMALL: weights_pb2.DELTA_PROFILE_SMALL,
}
_PROFILE_FROM_PROTO = {number: profile for profile, number in _PROFILE_TO_PROTO.items()}


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
        profile=_PROFILE_TO_PROTO[payload.profile],
        encode_time=duration_to_proto(payload.encode_s) if payload.encode_s else None,
    )


def payload_from_proto(proto: weights_pb2.GetManifestResponse) -> Payload:
    """Raises ``CorruptDataError`` for types this end does not know, or a version digest that its tensors contradict."""
    try:
        encoding = _ENCODING_FROM_PROTO[proto.encoding]
        profile = _PROFILE_FROM_PROTO[proto.profile]
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
        raise CorruptDataError(f"the manifest has an encoding, profile or element type unknown here: {error}") from None
    manifest = Manifest.of(
        run_id=proto.version.run_id, policy=proto.version.policy, version=proto.version.number, tensors=tensors
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
        profile=profile,
        encode_s=duration_from_proto(proto.encode_time),
    )
