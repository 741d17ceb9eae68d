"""Conversions between records of weight transfers and the wire, in pairs. Replicas report them, the orchestrator keeps them."""

from __future__ import annotations

from services.common.pb import weights_pb2
from services.common.records.types import WeightTransfer
from services.common.wire.records import (
    duration_from_proto,
    duration_to_proto,
    timestamp_from_proto,
    timestamp_to_proto,
)

# Names that this end does not know are left empty: a record is for people, and is not worth a refusal.
_ENCODINGS = {"full": weights_pb2.WEIGHT_ENCODING_FULL, "delta": weights_pb2.WEIGHT_ENCODING_DELTA}
TRANSPORTS = {
    "grpc": weights_pb2.WEIGHT_TRANSPORT_GRPC,
    "mapped": weights_pb2.WEIGHT_TRANSPORT_MAPPED,
    "bulk": weights_pb2.WEIGHT_TRANSPORT_BULK,
}
_ENCODING_NAMES = {number: name for name, number in _ENCODINGS.items()}
TRANSPORT_NAMES = {number: name for name, number in TRANSPORTS.items()}


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
        choice=transfer.choice,
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
        choice=proto.choice,
    )
