"""Conversions between the records and the wire, in pairs: ``x_to_proto`` and ``x_from_proto``.

Token ids and log-probabilities travel as little-endian bytes; reading gives views on them, without a copy and without
Python per token. Invalid messages raise ``InvalidRequestError``. The timing of a rollout is for display and
decides nothing, so an invalid time is dropped instead of being refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import orjson
from google.protobuf.duration_pb2 import Duration as ProtoDuration
from google.protobuf.timestamp_pb2 import Timestamp as ProtoTimestamp

from services.common.errors import InvalidRequestError
from services.common.pb import pool_pb2, training_pb2, trajectory_pb2
from services.common.records.device_turn import DeviceTurn
from services.common.records.types import (
    EMPTY_LOGPROBS,
    NO_TIMING,
    Interval,
    MinibatchTotals,
    Origin,
    Purpose,
    RolloutFailure,
    RolloutPhase,
    RolloutTiming,
    Sampling,
    Segment,
    Sequence,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSource,
    TrainingSequence,
    Trajectory,
    by_name,
)
from services.common.text.encodable import encodable

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_MOST_S = 1e9  # thirty years: larger values are not measured, and instants computed with them would not fit the wire

_SOURCE_TO_PROTO = {
    TokenSource.POLICY: trajectory_pb2.TOKEN_SOURCE_POLICY,
    TokenSource.ENVIRONMENT: trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT,
}
_SOURCE_FROM_PROTO = {number: source for source, number in _SOURCE_TO_PROTO.items()}
_STOP_TO_PROTO = {
    StopReason.STOP: trajectory_pb2.STOP_REASON_STOP,
    StopReason.LENGTH: trajectory_pb2.STOP_REASON_LENGTH,
    StopReason.TURN_LIMIT: trajectory_pb2.STOP_REASON_TURN_LIMIT,
    StopReason.ENVIRONMENT: trajectory_pb2.STOP_REASON_ENVIRONMENT,
    StopReason.ABORTED: trajectory_pb2.STOP_REASON_ABORTED,
}
_STOP_FROM_PROTO = {number: reason for reason, number in _STOP_TO_PROTO.items()}
_ORIGIN_TO_PROTO = {
    Origin.ROOT: trajectory_pb2.SEQUENCE_ORIGIN_UNSPECIFIED,
    Origin.BRANCH: trajectory_pb2.SEQUENCE_ORIGIN_BRANCH,
    Origin.COMPACTION: trajectory_pb2.SEQUENCE_ORIGIN_COMPACTION,
    Origin.SUBAGENT: trajectory_pb2.SEQUENCE_ORIGIN_SUBAGENT,
}
_ORIGIN_FROM_PROTO = {number: origin for origin, number in _ORIGIN_TO_PROTO.items()}
_PURPOSE_TO_PROTO = {
    Purpose.TRAIN: trajectory_pb2.PURPOSE_TRAIN,
    Purpose.EVALUATION: trajectory_pb2.PURPOSE_EVALUATION,
}
_PURPOSE_FROM_PROTO = {number: purpose for purpose, number in _PURPOSE_TO_PROTO.items()}


def timestamp_to_proto(seconds: float) -> ProtoTimestamp:
    whole = int(seconds // 1)
    return ProtoTimestamp(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


def timestamp_from_proto(proto: ProtoTimestamp) -> float:
    return proto.seconds + proto.nanos * 1e-9


def finite(seconds: float) -> float:
    """A measured time, for display: an invalid value becomes 0."""
    if 0.0 <= seconds <= _MOST_S:
        return seconds
    return _MOST_S if _MOST_S < seconds < math.inf else 0.0


def duration_to_proto(seconds: float) -> ProtoDuration:
    whole = int(seconds)
    return ProtoDuration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def duration_from_proto(proto: ProtoDuration) -> float:
    return proto.seconds + proto.nanos * 1e-9


def interval_to_proto(interval: Interval) -> pool_pb2.Interval:
    return pool_pb2.Interval(start=timestamp_to_proto(interval[0]), end=timestamp_to_proto(interval[1]))


def interval_from_proto(proto: pool_pb2.Interval) -> Interval:
    return timestamp_from_proto(proto.start), timestamp_from_proto(proto.end)


def _fields_of_segment(segment: Segment) -> dict[str, Any]:
    return {
        "source": _SOURCE_TO_PROTO[segment.source],
        "token_ids": segment.token_ids.astype(_INT32, copy=False).tobytes(),
        "logprobs": segment.logprobs.astype(_FLOAT32, copy=False).tobytes(),
        "weight_version": segment.weight_version,
        "mixed_cache": segment.mixed_cache,
        "kept": segment.kept,
        "temperature": segment.temperature,
        "teacher_logprobs": segment.teacher_logprobs.astype(_FLOAT32, copy=False).tobytes(),
    }


def segment_from_proto(proto: trajectory_pb2.Segment) -> Segment:
    source = _SOURCE_FROM_PROTO.get(proto.source)
    if source is None:
        raise InvalidRequestError(f"segment has no source (got {proto.source})")
    # Each access copies the bytes: one each.
    token_ids, logprobs, teacher_logprobs = proto.token_ids, proto.logprobs, proto.teacher_logprobs
    if len(token_ids) % 4 or len(logprobs) % 4 or len(teacher_logprobs) % 4:
        raise InvalidRequestError("token ids and log-probabilities must be whole 4-byte values")
    try:
        return Segment(
            source=source,
            token_ids=np.frombuffer(token_ids, dtype=_INT32),
            logprobs=np.frombuffer(logprobs, dtype=_FLOAT32) if logprobs else EMPTY_LOGPROBS,
            weight_version=proto.weight_version,
            mixed_cache=proto.mixed_cache,
            kept=proto.kept,
            temperature=proto.temperature if proto.HasField("temperature") else None,
            teacher_logprobs=np.frombuffer(teacher_logprobs, dtype=_FLOAT32) if teacher_logprobs else EMPTY_LOGPROBS,
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def fill_sequence(proto: trajectory_pb2.Sequence, sequence: Sequence) -> None:
    """Write a sequence into an empty message in place: a message that is put into another is copied, tokens and
    all."""
    proto.policy = sequence.policy
    proto.role = sequence.role
    proto.attempt = sequence.attempt
    proto.reward = sequence.reward
    proto.stop_reason = _STOP_TO_PROTO[sequence.stop_reason]
    proto.thread = sequence.thread
    if sequence.parent is not None:
        proto.parent = sequence.parent
        proto.origin = _ORIGIN_TO_PROTO[sequence.origin]
    for segment in sequence.segments:
        proto.segments.add(**_fields_of_segment(segment))
    if sequence.metrics:
        proto.metrics.update(sequence.metrics)


def sequence_from_proto(proto: trajectory_pb2.Sequence) -> Sequence:
    stop_reason = _STOP_FROM_PROTO.get(proto.stop_reason)
    if stop_reason is None:
        raise InvalidRequestError(f"sequence has no stop reason (got {proto.stop_reason})")
    return Sequence(
        policy=proto.policy,
        role=proto.role,
        attempt=proto.attempt,
        reward=proto.reward,
        stop_reason=stop_reason,
        segments=tuple([segment_from_proto(segment) for segment in proto.segments]),
        metrics=dict(proto.metrics) if proto.metrics else {},  # to copy an empty map takes a microsecond
        thread=proto.thread,
        parent=proto.parent if proto.HasField("parent") else None,
        origin=_ORIGIN_FROM_PROTO.get(proto.origin, Origin.ROOT),
    )


def totals_to_proto(totals: MinibatchTotals) -> training_pb2.MinibatchTotals:
    return training_pb2.MinibatchTotals(**by_name(totals))


def totals_from_proto(proto: training_pb2.MinibatchTotals) -> MinibatchTotals:
    return MinibatchTotals(num_sequences=proto.num_sequences, num_trained_tokens=proto.num_trained_tokens)


def _fill_training_sequence(proto: training_pb2.TrainingSequence, item: TrainingSequence) -> None:
    proto.sequence_id = item.sequence_id
    fill_sequence(proto.sequence, item.sequence)
    proto.group_mean = item.group_mean
    proto.group_std = item.group_std
    proto.group_size = item.group_size
    proto.staleness = item.staleness
    proto.minibatch = item.minibatch
    proto.position = item.position
    if item.advantage_scale != 1.0:
        proto.advantage_scale = item.advantage_scale


def batch_chunks(items: Iterable[TrainingSequence], most_bytes: int) -> Iterator[training_pb2.PullBatchResponse]:
    """The sequences in order, as many in a chunk as fit into ``most_bytes``; one that does not is alone in its chunk."""
    response, size = training_pb2.PullBatchResponse(), 0
    for item in items:
        proto = response.chunk.sequences.add()
        _fill_training_sequence(proto, item)
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


def training_sequence_from_proto(proto: training_pb2.TrainingSequence) -> TrainingSequence:
    return TrainingSequence(
        sequence_id=proto.sequence_id,
        sequence=sequence_from_proto(proto.sequence),
        group_mean=proto.group_mean,
        group_std=proto.group_std,
        group_size=proto.group_size,
        staleness=proto.staleness,
        minibatch=proto.minibatch,
        position=proto.position,
        advantage_scale=proto.advantage_scale if proto.HasField("advantage_scale") else 1.0,
    )


def fill_trajectory(proto: trajectory_pb2.Trajectory, trajectory: Trajectory) -> None:
    """Write a trajectory into an empty message, such as a field of another."""
    proto.task_group_id = trajectory.task_group_id
    proto.index = trajectory.index
    proto.reward = trajectory.reward
    for sequence in trajectory.sequences:
        fill_sequence(proto.sequences.add(), sequence)
    if trajectory.metrics:
        proto.metrics.update(trajectory.metrics)
    proto.started_at.CopyFrom(timestamp_to_proto(trajectory.started_at))
    proto.finished_at.CopyFrom(timestamp_to_proto(trajectory.finished_at))
    if (timing := timing_to_proto(trajectory.timing)) is not None:
        proto.timing.CopyFrom(timing)


def trajectory_from_proto(proto: trajectory_pb2.Trajectory, replica_id: str = "") -> Trajectory:
    return Trajectory(
        task_group_id=proto.task_group_id,
        index=proto.index,
        sequences=tuple([sequence_from_proto(sequence) for sequence in proto.sequences]),
        reward=proto.reward,
        metrics=dict(proto.metrics) if proto.metrics else {},
        started_at=timestamp_from_proto(proto.started_at),
        finished_at=timestamp_from_proto(proto.finished_at),
        replica_id=replica_id,
        timing=timing_from_proto(proto.timing) if proto.HasField("timing") else NO_TIMING,
    )


def timing_to_proto(timing: RolloutTiming) -> trajectory_pb2.RolloutTiming | None:
    """None, and so nothing on the wire, if no timing was recorded."""
    if timing == NO_TIMING:
        return None
    return trajectory_pb2.RolloutTiming(
        accepted_at=timestamp_to_proto(timing.accepted_at),
        sent_at=timestamp_to_proto(timing.sent_at),
        num_sends=timing.num_sends,
        num_retries=timing.num_retries,
        phases=[
            trajectory_pb2.RolloutPhase(**{**by_name(phase), "detail": encodable(phase.detail)})
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


def failure_to_proto(failure: RolloutFailure) -> trajectory_pb2.RolloutFailure:
    return trajectory_pb2.RolloutFailure(
        task_group_id=failure.task_group_id,
        index=failure.index,
        reason=encodable(failure.reason),
        detail=encodable(failure.detail),
        started_at=timestamp_to_proto(failure.started_at),
        finished_at=timestamp_to_proto(failure.finished_at),
        timing=timing_to_proto(failure.timing),
    )


def failure_from_proto(proto: trajectory_pb2.RolloutFailure, replica_id: str = "") -> RolloutFailure:
    return RolloutFailure(
        task_group_id=proto.task_group_id,
        index=proto.index,
        reason=proto.reason,
        detail=proto.detail,
        replica_id=replica_id,
        started_at=timestamp_from_proto(proto.started_at),
        finished_at=timestamp_from_proto(proto.finished_at),
        timing=timing_from_proto(proto.timing),
    )


def task_to_proto(task: Task) -> trajectory_pb2.Task:
    return trajectory_pb2.Task(task_id=task.task_id, data_json=orjson.dumps(task.data))


def task_from_proto(proto: trajectory_pb2.Task) -> Task:
    return Task(task_id=proto.task_id, data=json_object(proto.data_json, "the task's data"))


_LONG_INTEGER = re.compile(rb"(\d{18})\d+")


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from the wire; raises ``InvalidRequestError`` with the name ``what``."""
    try:
        value = orjson.loads(_LONG_INTEGER.sub(rb"\1", data)) if data else {}
        if _LONG_INTEGER.search(data):  # orjson makes a float of an integer beyond 64 bits
            value = json.loads(data)
    except ValueError as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def sampling_to_proto(sampling: Sampling) -> trajectory_pb2.Sampling:
    return trajectory_pb2.Sampling(**by_name(sampling))


def sampling_from_proto(proto: trajectory_pb2.Sampling) -> Sampling:
    """Absent fields take their default."""
    return Sampling(**{field.name: value for field, value in proto.ListFields()})


def order_to_proto(order: TaskGroupOrder) -> pool_pb2.RunTaskGroup:
    return pool_pb2.RunTaskGroup(
        task_group_id=order.task_group_id,
        task=task_to_proto(order.task),
        indices=order.indices,
        purpose=_PURPOSE_TO_PROTO[order.purpose],
        sampling=sampling_to_proto(order.sampling),
        required_versions=dict(order.required_versions),
        seed=order.seed,
        timeout=duration_to_proto(order.timeout_s),
        policies=order.policies,
        source=order.source,
    )


def order_from_proto(proto: pool_pb2.RunTaskGroup) -> TaskGroupOrder:
    purpose = _PURPOSE_FROM_PROTO.get(proto.purpose)
    if purpose is None:
        raise InvalidRequestError(f"task group {proto.task_group_id} has no purpose (got {proto.purpose})")
    return TaskGroupOrder(
        task_group_id=proto.task_group_id,
        task=task_from_proto(proto.task),
        indices=tuple(proto.indices),
        purpose=purpose,
        sampling=sampling_from_proto(proto.sampling),
        required_versions=dict(proto.required_versions),
        seed=proto.seed,
        timeout_s=duration_from_proto(proto.timeout),
        policies=tuple(proto.policies),
        source=proto.source,
    )


def device_turn_to_proto(turn: DeviceTurn) -> pool_pb2.DeviceTurn:
    return pool_pb2.DeviceTurn(number=turn.number, yours=turn.yours)


def device_turn_from_proto(proto: pool_pb2.DeviceTurn) -> DeviceTurn:
    return DeviceTurn(number=proto.number, yours=proto.yours)
