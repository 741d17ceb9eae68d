"""Conversions between seconds and the wire's instants and durations, in pairs."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration as ProtoDuration
from google.protobuf.timestamp_pb2 import Timestamp as ProtoTimestamp


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
