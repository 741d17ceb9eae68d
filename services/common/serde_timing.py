"""Conversions between what a replica says of a rollout's course and the wire, in pairs.

It is for people and decides nothing, so what makes no sense is dropped instead of being refused.
"""

from __future__ import annotations

from services.common.pb import trajectory_pb2
from services.common.serde_time import finite, timestamp_from_proto, timestamp_to_proto
from services.common.types import NO_TIMING, RolloutPhase, RolloutTiming


def timing_to_proto(timing: RolloutTiming) -> trajectory_pb2.RolloutTiming | None:
    """None, and so nothing on the wire, for what nobody recorded."""
    if timing == NO_TIMING:
        return None
    return trajectory_pb2.RolloutTiming(
        accepted_at=timestamp_to_proto(timing.accepted_at),
        sent_at=timestamp_to_proto(timing.sent_at),
        num_sends=timing.num_sends,
        num_retries=timing.num_retries,
        phases=[
            trajectory_pb2.RolloutPhase(
                what=phase.what,
                begin_s=phase.begin_s,
                seconds=phase.seconds,
                policy=phase.policy,
                num_tokens=phase.num_tokens,
                first_version=phase.first_version,
                last_version=phase.last_version,
                detail=phase.detail,
            )
            for phase in timing.phases
        ],
    )


def timing_from_proto(proto: trajectory_pb2.RolloutTiming) -> RolloutTiming:
    return RolloutTiming(
        accepted_at=timestamp_from_proto(proto.accepted_at),
        sent_at=timestamp_from_proto(proto.sent_at),
        num_sends=proto.num_sends,
        num_retries=proto.num_retries,
        phases=tuple(
            RolloutPhase(
                what=phase.what,
                begin_s=finite(phase.begin_s),
                seconds=finite(phase.seconds),
                policy=phase.policy,
                num_tokens=phase.num_tokens,
                first_version=phase.first_version,
                last_version=phase.last_version,
                detail=phase.detail,
            )
            for phase in proto.phases
        ),
    )
