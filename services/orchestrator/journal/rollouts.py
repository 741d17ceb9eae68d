"""The journal's lines of trajectories and failures, in pairs as in ``records``.

The arrays of a segment are packed as text: bytes by significance (all lowest bytes, then all next ones), in base64.
Bytes of one significance are alike, so zstd halves them: 6.4 bytes per token with its log-probability, against 7.3 of
decimal numbers, for less time to write and read. ``plain_trajectory`` gives a line with lists of numbers instead.
"""

from __future__ import annotations

import base64
from binascii import Error, a2b_base64, b2a_base64
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError
from services.common.records.types import (
    Origin,
    RolloutFailure,
    RolloutPhase,
    RolloutTiming,
    Segment,
    Sequence,
    StopReason,
    TokenSource,
    Trajectory,
    by_name,
)
from services.orchestrator.journal.records import Json, from_pairs, pairs


def trajectory_key(task_group_id: str, index: int) -> str:
    return f"{task_group_id}/{index}"


def trajectory_to_json(trajectory: Trajectory) -> Json:
    return {
        **by_name(trajectory),
        "reward": float(trajectory.reward),
        "metrics": pairs(trajectory.metrics),
        "timing": timing_to_json(trajectory.timing),
        "sequences": [_sequence_to_json(s) for s in trajectory.sequences],
    }


def trajectory_from_json(record: Json) -> Trajectory:
    read = {
        "reward": float(record["reward"]),
        "metrics": from_pairs(record["metrics"]),
        "timing": timing_from_json(record["timing"]),
        "sequences": tuple(_sequence_from_json(s) for s in record["sequences"]),
    }
    return Trajectory(**{**record, **read})


def plain_trajectory(record: Json) -> Json:
    """A trajectory's line with its token ids and log-probabilities as lists, for readers other than Rollmill."""
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
        **by_name(sequence),
        "origin": sequence.origin.value,
        "reward": float(sequence.reward),
        "stop_reason": sequence.stop_reason.value,
        "metrics": pairs(sequence.metrics),
        "segments": [
            {
                "source": segment.source.value,
                "weight_version": segment.weight_version,
                "mixed_cache": segment.mixed_cache,
                "kept": base64.b64encode(segment.kept).decode() if segment.kept else "",
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
    read = {
        "origin": Origin(record["origin"]),
        "reward": float(record["reward"]),
        "stop_reason": StopReason(record["stop_reason"]),
        "metrics": from_pairs(record["metrics"]),
        "segments": tuple(
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
    }
    return Sequence(**{**record, **read})


def failure_to_json(failure: RolloutFailure) -> Json:
    return {**by_name(failure), "timing": timing_to_json(failure.timing)}


def failure_from_json(record: Json) -> RolloutFailure:
    return RolloutFailure(**{**record, "timing": timing_from_json(record["timing"])})


def timing_to_json(timing: RolloutTiming) -> Json:
    return {**by_name(timing), "phases": list(map(by_name, timing.phases))}


def timing_from_json(record: Json) -> RolloutTiming:
    return RolloutTiming(**{**record, "phases": tuple(RolloutPhase(**phase) for phase in record["phases"])})


_TOKEN = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_WIDTH = 4  # bytes of either


def pack_tokens(token_ids: npt.NDArray[np.int32]) -> str:
    """Token ids, [num_tokens] int32: three bytes each where sufficient."""
    if not len(token_ids):
        return ""
    planes = _planes(token_ids, _TOKEN)
    return _text(planes if planes[_WIDTH - 1].strip(b"\0") else planes[: _WIDTH - 1])


def unpack_tokens(text: str, num_tokens: int) -> npt.NDArray[np.int32]:
    """[num_tokens] int32; raises ``CorruptDataError`` for text that does not hold as many."""
    return _array(text, num_tokens, _TOKEN).astype(np.int32, copy=False)


def pack_floats(values: npt.NDArray[np.float32]) -> str:
    """Log-probabilities, [num_tokens] float32, bit by bit."""
    return _text(_planes(values, _FLOAT)) if len(values) else ""


def unpack_floats(text: str) -> npt.NDArray[np.float32]:
    """[num_tokens] float32, bit by bit; raises ``CorruptDataError`` for text that ``pack_floats`` does not write."""
    return _array(text, None, _FLOAT).astype(np.float32, copy=False)


def _planes(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> list[bytes]:
    """The lowest byte of every number, the next of every number, and so on. Slices of bytes: for some dozens of numbers they
    take half as long as numpy does, and no longer for thousands."""
    data = values.astype(dtype, copy=False).tobytes()
    return [data[significance::_WIDTH] for significance in range(_WIDTH)]


def _text(planes: list[bytes]) -> str:
    return b2a_base64(b"".join(planes), newline=False).decode("ascii")


def _array(text: str, count: int | None, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not text and not count:
        return np.zeros(0, dtype)
    try:
        data = np.frombuffer(a2b_base64(text), np.uint8)
    except (Error, ValueError) as error:
        raise CorruptDataError(f"an array of a record is not base64: {error}") from error
    count = len(data) // _WIDTH if count is None else count
    width = len(data) // count if count > 0 else 0
    if not 0 < width <= _WIDTH or width * count != len(data):
        raise CorruptDataError(f"an array of a record has {len(data)} bytes for {count} numbers")
    found = np.zeros((count, _WIDTH), np.uint8)
    found[:, :width] = data.reshape(width, count).T
    return found.view(dtype)[:, 0]
