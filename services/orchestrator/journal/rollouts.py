"""The journal's lines of what rollouts leave, trajectories and failures, in pairs as in ``records``.

The arrays of a segment are packed (``packing``); ``plain_trajectory`` gives a line with lists of numbers instead.
"""

from __future__ import annotations

import base64

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
from services.orchestrator.journal.packing import (
    pack_floats,
    pack_tokens,
    unpack_floats,
    unpack_tokens,
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


def plain_trajectory(record: Json) -> Json:
    """A trajectory's line with its token ids and log-probabilities as lists, for readers other than Millrace."""
    return {**record, "sequences": [_plain_sequence(s) for s in record["sequences"]]}


def _plain_sequence(sequence: Json) -> Json:
    segments = [
        {
            **segment,
            "token_ids": unpack_tokens(segment["token_ids"], segment["num_tokens"]).tolist(),
            "logprobs": unpack_floats(segment["logprobs"]),  # float32: orjson writes the shortest decimals
            "teacher_logprobs": unpack_floats(segment["teacher_logprobs"]),
        }
        for segment in sequence["segments"]
    ]
    return {**sequence, "segments": segments}


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
                "num_tokens": segment.num_tokens,
                "token_ids": pack_tokens(segment.token_ids),
                "logprobs": pack_floats(segment.logprobs),
                "teacher_logprobs": pack_floats(segment.teacher_logprobs),
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
                token_ids=unpack_tokens(s["token_ids"], s["num_tokens"]),
                logprobs=unpack_floats(s["logprobs"]),
                weight_version=s["weight_version"],
                mixed_cache=s["mixed_cache"],
                kept=base64.b64decode(s["kept"]),
                temperature=s["temperature"],
                teacher_logprobs=unpack_floats(s["teacher_logprobs"]),
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
