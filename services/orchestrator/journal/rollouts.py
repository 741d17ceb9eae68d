"""The journal's lines of what rollouts leave, trajectories and failures, in pairs as in ``records``.

float32 log-probabilities are written as the shortest decimals that give the same float32 back, packed bytes in base64.
"""

from __future__ import annotations

import base64

import numpy as np

from services.common.types import (
    NO_TIMING,
    RolloutFailure,
    RolloutPhase,
    RolloutTiming,
    Segment,
    Sequence,
    StopReason,
    TokenSource,
    Trajectory,
)
from services.orchestrator.journal.records import Json, from_pairs, pairs


def trajectory_key(task_group_id: str, index: int) -> str:
    return f"{task_group_id}/{index}"


def trajectory_to_json(trajectory: Trajectory) -> Json:
    return {
        "task_group_id": trajectory.task_group_id,
        "index": trajectory.index,
        "reward": float(trajectory.reward),
        "replica_id": trajectory.replica_id,
        "started_at": float(trajectory.started_at),
        "finished_at": float(trajectory.finished_at),
        "metrics": pairs(trajectory.metrics),
        "timing": timing_to_json(trajectory.timing),
        "sequences": [_sequence_to_json(s) for s in trajectory.sequences],
    }


def trajectory_from_json(record: Json) -> Trajectory:
    return Trajectory(
        task_group_id=record["task_group_id"],
        index=record["index"],
        reward=float(record["reward"]),
        replica_id=record["replica_id"],
        started_at=record["started_at"],
        finished_at=record["finished_at"],
        metrics=from_pairs(record["metrics"]),
        timing=timing_from_json(record.get("timing")),
        sequences=tuple(_sequence_from_json(s) for s in record["sequences"]),
    )


def _sequence_to_json(sequence: Sequence) -> Json:
    return {
        "policy": sequence.policy,
        "role": sequence.role,
        "attempt": sequence.attempt,
        "thread": sequence.thread,
        "reward": float(sequence.reward),
        "stop_reason": sequence.stop_reason.value,
        "metrics": pairs(sequence.metrics),
        "segments": [
            {
                "source": segment.source.value,
                "weight_version": segment.weight_version,
                "mixed_cache": segment.mixed_cache,
                "kept": base64.b64encode(segment.kept).decode(),
                "temperature": segment.temperature,
                "token_ids": segment.token_ids,
                "logprobs": segment.logprobs,
                "teacher_logprobs": segment.teacher_logprobs,
            }
            for segment in sequence.segments
        ],
    }


def _sequence_from_json(record: Json) -> Sequence:
    return Sequence(
        policy=record["policy"],
        role=record["role"],
        attempt=record["attempt"],
        thread=record.get("thread", 0),
        reward=float(record["reward"]),
        stop_reason=StopReason(record["stop_reason"]),
        metrics=from_pairs(record["metrics"]),
        segments=tuple(
            Segment(
                source=TokenSource(s["source"]),
                token_ids=np.array(s["token_ids"], dtype=np.int32),
                logprobs=np.array(s["logprobs"], dtype=np.float32),
                weight_version=s["weight_version"],
                mixed_cache=s["mixed_cache"],
                kept=base64.b64decode(s.get("kept", "")),  # absent, as what stands below, in journals that lack them
                temperature=s.get("temperature"),
                teacher_logprobs=np.array(s.get("teacher_logprobs", ()), dtype=np.float32),
            )
            for s in record["segments"]
        ),
    )


def failure_to_json(failure: RolloutFailure) -> Json:
    return {
        "task_group_id": failure.task_group_id,
        "index": failure.index,
        "reason": failure.reason,
        "detail": failure.detail,
        "replica_id": failure.replica_id,
        "started_at": float(failure.started_at),
        "finished_at": float(failure.finished_at),
        "timing": timing_to_json(failure.timing),
    }


def failure_from_json(record: Json) -> RolloutFailure:
    return RolloutFailure(**{**record, "timing": timing_from_json(record.get("timing"))})


def timing_to_json(timing: RolloutTiming) -> Json:
    return {
        "accepted_at": timing.accepted_at,
        "sent_at": timing.sent_at,
        "num_sends": timing.num_sends,
        "num_retries": timing.num_retries,
        # By name: `asdict` copies everything it meets, which takes ten times as long.
        "phases": [
            {
                "what": phase.what,
                "begin_s": phase.begin_s,
                "seconds": phase.seconds,
                "policy": phase.policy,
                "num_tokens": phase.num_tokens,
                "first_version": phase.first_version,
                "last_version": phase.last_version,
                "detail": phase.detail,
            }
            for phase in timing.phases
        ],
    }


def timing_from_json(record: Json | None) -> RolloutTiming:
    """None in journals that lack it."""
    if record is None:
        return NO_TIMING
    return RolloutTiming(**{**record, "phases": tuple(RolloutPhase(**phase) for phase in record["phases"])})
