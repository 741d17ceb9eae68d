"""Conversions between seconds and the wire's instants and durations, in pairs."""

from __future__ import annotations

import math

from google.protobuf.duration_pb2 import Duration as ProtoDuration
from google.protobuf.timestamp_pb2 import Timestamp as ProtoTimestamp

_MOST_S = 1e9  # thirty years: what is larger was not measured, and instants reckoned with it would not fit the wire


def timestamp_to_proto(seconds: float) -> ProtoTimestamp:
    whole = int(seconds // 1)
    return ProtoTimestamp(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


def timestamp_from_proto(proto: ProtoTimestamp) -> float:
    return proto.seconds + proto.nanos * 1e-9


def finite(seconds: float) -> float:
    """A time that somebody measured, for people: what is no time becomes 0."""
    return min(max(seconds, 0.0), _MOST_S) if math.isfinite(seconds) else 0.0


def duration_to_proto(seconds: float) -> ProtoDuration:
    whole = int(seconds)
    return ProtoDuration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def duration_from_proto(proto: ProtoDuration) -> float:
    return proto.seconds + proto.nanos * 1e-9
