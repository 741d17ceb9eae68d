"""Records on the wire: ``codec`` converts them by the names of their fields; here are the exceptions.

Token ids and log-probabilities travel as little-endian bytes; reading gives views on them. Timings and time accounts are for
display and decide nothing: an invalid time in them is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.duration_pb2 import Duration as ProtoDuration
from google.protobuf.timestamp_pb2 import Timestamp as ProtoTimestamp

from services.common import codec
from services.common.codec import read as read
from services.common.codec import write as write
from services.common.errors import CorruptDataError
from services.common.pb import pool_pb2, training_pb2, weights_pb2
from services.common.records import (
    FetchPlan,
    Interval,
    RefusalReason,
    RolloutFailure,
    RolloutPhase,
    TrainingSequence,
    WeightTransfer,
)
from services.common.telemetry.accounts import AccountState, ActivityTime, PeerState
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

codec.DISPLAYED |= {RolloutPhase, RolloutFailure, ActivityTime, AccountState, PeerState}
codec.RENAMED |= {
    ActivityTime: {"name": "activity"},
    AdapterIdentity: {"base": "base_digest"},
    FetchPlan: {"own_shard": "own_stripe"},
    TensorEntry: {"offset": "payload_offset", "length": "payload_length"},
    WeightTransfer: {"started_at": "start_time"},
}

REFUSAL_NUMBERS, REFUSAL_REASONS = codec.members(RefusalReason, pool_pb2.RefusalReason.DESCRIPTOR)
_ENCODING_NUMBERS, _ENCODINGS = codec.members(Encoding, weights_pb2.WeightEncoding.DESCRIPTOR)
# As ``weights.transports`` of the recipe writes them.
TRANSPORTS = {
    "grpc": weights_pb2.WEIGHT_TRANSPORT_GRPC,
    "mapped": weights_pb2.WEIGHT_TRANSPORT_MAPPED,
    "bulk": weights_pb2.WEIGHT_TRANSPORT_BULK,
}
TRANSPORT_NAMES = {number: name for name, number in TRANSPORTS.items()}


def timestamp_to_proto(seconds: float) -> ProtoTimestamp:
    whole = int(seconds // 1)
    return ProtoTimestamp(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


def timestamp_from_proto(proto: ProtoTimestamp) -> float:
    return proto.seconds + proto.nanos * 1e-9


def duration_to_proto(seconds: float) -> ProtoDuration:
    whole = int(seconds)
    return ProtoDuration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def duration_from_proto(proto: ProtoDuration) -> float:
    return proto.seconds + proto.nanos * 1e-9


def interval_to_proto(interval: Interval) -> pool_pb2.Interval:
    return pool_pb2.Interval(start=timestamp_to_proto(interval[0]), end=timestamp_to_proto(interval[1]))


def interval_from_proto(proto: pool_pb2.Interval) -> Interval:
    return timestamp_from_proto(proto.start), timestamp_from_proto(proto.end)


def batch_chunks(items: Iterable[TrainingSequence], most_bytes: int) -> Iterator[training_pb2.PullBatchResponse]:
    """The sequences in order, as many in a chunk as fit into ``most_bytes``; one that does not is alone in its chunk."""
    response, size = training_pb2.PullBatchResponse(), 0
    for item in items:
        proto = write(item, response.chunk.sequences.add())
        num_bytes = proto.ByteSize()
        if size and size + num_bytes > most_bytes:
            following = training_pb2.PullBatchResponse()
            following.chunk.sequences.append(proto)
            del response.chunk.sequences[-1]
            yield response
            response, size = following, 0
        size += num_bytes
    if size:
        yield response


# -- weights ------------------------------------------------------------------------------------------------------------


def payload_to_proto(payload: Payload) -> weights_pb2.GetManifestResponse:
    target = payload.target
    proto = weights_pb2.GetManifestResponse(
        version=weights_pb2.WeightVersion(
            policy=target.policy, number=target.version, digest=target.digest, run_id=target.run_id
        ),
        encoding=_ENCODING_NUMBERS[payload.encoding],  # type: ignore[arg-type]
        base_version=payload.base.number if payload.base else None,
        base_digest=payload.base.digest if payload.base else "",
        payload_id=payload.payload_id,
        payload_size_bytes=payload.size_bytes,
        encode_time=duration_to_proto(payload.encode_s) if payload.encode_s else None,
    )
    for entry in target.tensors:
        write(entry, proto.tensors.add())
    if target.adapter is not None:
        write(target.adapter, proto.adapter)
    return proto


def payload_from_proto(proto: weights_pb2.GetManifestResponse) -> Payload:
    """Raises ``CorruptDataError`` for types this end does not know, or a version digest that its tensors contradict."""
    encoding = _ENCODINGS.get(proto.encoding)
    tensors = tuple([read(TensorEntry, tensor) for tensor in proto.tensors])
    if encoding is None or not all(tensor.dtype for tensor in tensors):
        raise CorruptDataError("the manifest has an encoding or element type unknown here")
    manifest = Manifest.of(
        run_id=proto.version.run_id,
        policy=proto.version.policy,
        version=proto.version.number,
        tensors=tensors,
        adapter=read(AdapterIdentity, proto.adapter) if proto.HasField("adapter") else None,
    )
    if manifest.digest != proto.version.digest:
        raise CorruptDataError(
            f"the manifest of version {manifest.version} names digest {proto.version.digest}, "
            f"its tensors make {manifest.digest}"
        )
    return Payload(
        payload_id=proto.payload_id,
        encoding=encoding,
        size_bytes=proto.payload_size_bytes,
        target=manifest,
        base=_base_of(proto),
        encode_s=duration_from_proto(proto.encode_time),
    )


def _base_of(proto: weights_pb2.GetManifestRequest | weights_pb2.GetManifestResponse) -> BaseVersion | None:
    return BaseVersion(number=proto.base_version, digest=proto.base_digest) if proto.HasField("base_version") else None


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
    return PayloadRequest(
        run_id=proto.run_id,
        policy=proto.policy,
        version=proto.version,
        base=_base_of(proto),
        wait_s=duration_from_proto(proto.wait) if proto.HasField("wait") else MANIFEST_WAIT_S,
    )


def transports_from_proto(proto: weights_pb2.GetManifestRequest) -> tuple[str, ...]:
    """Those that this end knows; a receiver may know more."""
    return tuple(TRANSPORT_NAMES[number] for number in proto.transports if number in TRANSPORT_NAMES)


def not_ready_to_proto(error: PayloadNotReadyError) -> weights_pb2.GetManifestResponse:
    return weights_pb2.GetManifestResponse(
        not_ready=weights_pb2.PayloadNotReady(started=error.started, size_bytes=error.size_bytes)
    )


def not_ready_from_proto(proto: weights_pb2.GetManifestResponse, payload: str) -> PayloadNotReadyError | None:
    """The answer "not ready" about ``payload``; None when the manifest is there."""
    if not proto.HasField("not_ready"):
        return None
    return PayloadNotReadyError(payload, started=proto.not_ready.started, size_bytes=proto.not_ready.size_bytes)
