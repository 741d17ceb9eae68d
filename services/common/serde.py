"""Conversions between the records and the wire, in pairs: ``x_to_proto`` and ``x_from_proto``.

Token ids and log-probabilities travel as little-endian bytes; reading gives views on them, without a copy and without
Python per token. Whatever cannot be a record raises ``InvalidRequestError``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from services.common.errors import InvalidRequestError
from services.common.pb import pool_pb2, training_pb2, trajectory_pb2, weights_pb2
from services.common.serde_time import duration_from_proto as duration_from_proto
from services.common.serde_time import duration_to_proto as duration_to_proto
from services.common.serde_time import timestamp_from_proto as timestamp_from_proto
from services.common.serde_time import timestamp_to_proto as timestamp_to_proto
from services.common.serde_timing import timing_from_proto, timing_to_proto
from services.common.types import (
    FetchPlan,
    Interval,
    MinibatchTotals,
    Purpose,
    RolloutFailure,
    Sampling,
    Segment,
    Sequence,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSource,
    TrainingSequence,
    Trajectory,
    WeightVersion,
)

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")

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
_PURPOSE_TO_PROTO = {
    Purpose.TRAIN: trajectory_pb2.PURPOSE_TRAIN,
    Purpose.EVALUATION: trajectory_pb2.PURPOSE_EVALUATION,
}
_PURPOSE_FROM_PROTO = {number: purpose for purpose, number in _PURPOSE_TO_PROTO.items()}


def interval_to_proto(interval: Interval) -> pool_pb2.Interval:
    return pool_pb2.Interval(start=timestamp_to_proto(interval[0]), end=timestamp_to_proto(interval[1]))


def interval_from_proto(proto: pool_pb2.Interval) -> Interval:
    return timestamp_from_proto(proto.start), timestamp_from_proto(proto.end)


def segment_to_proto(segment: Segment) -> trajectory_pb2.Segment:
    return trajectory_pb2.Segment(
        source=_SOURCE_TO_PROTO[segment.source],
        token_ids=segment.token_ids.astype(_INT32, copy=False).tobytes(),
        logprobs=segment.logprobs.astype(_FLOAT32, copy=False).tobytes(),
        weight_version=segment.weight_version,
        mixed_cache=segment.mixed_cache,
        kept=segment.kept,
        temperature=segment.temperature,
        teacher_logprobs=segment.teacher_logprobs.astype(_FLOAT32, copy=False).tobytes(),
    )


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
            logprobs=np.frombuffer(logprobs, dtype=_FLOAT32),
            weight_version=proto.weight_version,
            mixed_cache=proto.mixed_cache,
            kept=proto.kept,
            temperature=proto.temperature if proto.HasField("temperature") else None,
            teacher_logprobs=np.frombuffer(teacher_logprobs, dtype=_FLOAT32),
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def sequence_to_proto(sequence: Sequence) -> trajectory_pb2.Sequence:
    return trajectory_pb2.Sequence(
        policy=sequence.policy,
        role=sequence.role,
        attempt=sequence.attempt,
        reward=sequence.reward,
        stop_reason=_STOP_TO_PROTO[sequence.stop_reason],
        segments=[segment_to_proto(segment) for segment in sequence.segments],
        metrics=dict(sequence.metrics),
        thread=sequence.thread,
    )


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
        segments=tuple(segment_from_proto(segment) for segment in proto.segments),
        metrics=dict(proto.metrics),
        thread=proto.thread,
    )


def trajectory_to_proto(trajectory: Trajectory) -> trajectory_pb2.Trajectory:
    return trajectory_pb2.Trajectory(
        task_group_id=trajectory.task_group_id,
        index=trajectory.index,
        sequences=[sequence_to_proto(sequence) for sequence in trajectory.sequences],
        reward=trajectory.reward,
        metrics=dict(trajectory.metrics),
        started_at=timestamp_to_proto(trajectory.started_at),
        finished_at=timestamp_to_proto(trajectory.finished_at),
        timing=timing_to_proto(trajectory.timing),
    )


def trajectory_from_proto(proto: trajectory_pb2.Trajectory, replica_id: str = "") -> Trajectory:
    return Trajectory(
        task_group_id=proto.task_group_id,
        index=proto.index,
        sequences=tuple(sequence_from_proto(sequence) for sequence in proto.sequences),
        reward=proto.reward,
        metrics=dict(proto.metrics),
        started_at=timestamp_from_proto(proto.started_at),
        finished_at=timestamp_from_proto(proto.finished_at),
        replica_id=replica_id,
        timing=timing_from_proto(proto.timing),
    )


def failure_to_proto(failure: RolloutFailure) -> trajectory_pb2.RolloutFailure:
    return trajectory_pb2.RolloutFailure(
        task_group_id=failure.task_group_id,
        index=failure.index,
        reason=failure.reason,
        detail=failure.detail,
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


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from the wire; raises ``InvalidRequestError`` naming ``what``."""
    try:
        value = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def sampling_to_proto(sampling: Sampling) -> trajectory_pb2.Sampling:
    return trajectory_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
    )


_DEFAULT_SAMPLING = Sampling()


def sampling_from_proto(proto: trajectory_pb2.Sampling, default: Sampling = _DEFAULT_SAMPLING) -> Sampling:
    """Absent fields take the value of ``default``."""
    return Sampling(
        temperature=proto.temperature if proto.HasField("temperature") else default.temperature,
        top_p=proto.top_p if proto.HasField("top_p") else default.top_p,
        top_k=proto.top_k if proto.HasField("top_k") else default.top_k,
        min_p=proto.min_p if proto.HasField("min_p") else default.min_p,
        max_new_tokens=proto.max_new_tokens if proto.HasField("max_new_tokens") else default.max_new_tokens,
        min_new_tokens=proto.min_new_tokens if proto.HasField("min_new_tokens") else default.min_new_tokens,
    )


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
    )


def order_from_proto(proto: pool_pb2.RunTaskGroup, default: Sampling = _DEFAULT_SAMPLING) -> TaskGroupOrder:
    purpose = _PURPOSE_FROM_PROTO.get(proto.purpose)
    if purpose is None:
        raise InvalidRequestError(f"task group {proto.task_group_id} has no purpose (got {proto.purpose})")
    return TaskGroupOrder(
        task_group_id=proto.task_group_id,
        task=task_from_proto(proto.task),
        indices=tuple(proto.indices),
        purpose=purpose,
        sampling=sampling_from_proto(proto.sampling, default),
        required_versions=dict(proto.required_versions),
        seed=proto.seed,
        timeout_s=duration_from_proto(proto.timeout),
        policies=tuple(proto.policies),
    )


def weight_version_to_proto(version: WeightVersion, run_id: str = "") -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(
        policy=version.policy, number=version.number, digest=version.digest, sources=version.sources, run_id=run_id
    )


def weight_version_from_proto(proto: weights_pb2.WeightVersion) -> WeightVersion:
    return WeightVersion(policy=proto.policy, number=proto.number, digest=proto.digest, sources=tuple(proto.sources))


def fetch_plan_to_proto(plan: FetchPlan) -> pool_pb2.FetchPlan:
    return pool_pb2.FetchPlan(relays=plan.relays, own_stripe=plan.own_stripe)


def fetch_plan_from_proto(proto: pool_pb2.FetchPlan) -> FetchPlan:
    own = proto.own_stripe if proto.HasField("own_stripe") else None
    if own is not None and not 0 <= own < len(proto.relays):
        raise InvalidRequestError(f"a fetch plan of {len(proto.relays)} relays names stripe {own}")
    return FetchPlan(relays=tuple(proto.relays), own_stripe=own)


def totals_to_proto(totals: MinibatchTotals) -> training_pb2.MinibatchTotals:
    return training_pb2.MinibatchTotals(
        num_sequences=totals.num_sequences, num_trained_tokens=totals.num_trained_tokens
    )


def totals_from_proto(proto: training_pb2.MinibatchTotals) -> MinibatchTotals:
    return MinibatchTotals(num_sequences=proto.num_sequences, num_trained_tokens=proto.num_trained_tokens)


def training_sequence_to_proto(item: TrainingSequence) -> training_pb2.TrainingSequence:
    return training_pb2.TrainingSequence(
        sequence_id=item.sequence_id,
        sequence=sequence_to_proto(item.sequence),
        group_mean=item.group_mean,
        group_std=item.group_std,
        group_size=item.group_size,
        staleness=item.staleness,
        minibatch=item.minibatch,
        position=item.position,
    )


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
    )
