"""Absurd records, each made from a valid one: its name, the change, and the reason of the refusal."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from services.common.kept_tokens import left_out_row, pack
from services.common.pb import trajectory_pb2
from services.common.records import RefusalReason as Reason

Trajectory = trajectory_pb2.Trajectory
Edit = Callable[[Trajectory], None]

VOCABULARY, CONTEXT, NEW_TOKENS = 500, 64, 14


def segment_of(num_tokens: int, version: int = 0) -> trajectory_pb2.Segment:
    """Of the policy."""
    return trajectory_pb2.Segment(
        source=trajectory_pb2.TOKEN_SOURCE_POLICY,
        token_ids=np.zeros(num_tokens, "<i4").tobytes(),
        logprobs=np.full(num_tokens, -1.0, "<f4").tobytes(),
        weight_version=version,
    )


def prompt_of(num_tokens: int) -> trajectory_pb2.Segment:
    return trajectory_pb2.Segment(
        source=trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT,
        token_ids=np.zeros(num_tokens, "<i4").tobytes(),
        weight_version=-1,
    )


def good(task_group_id: str, index: int, reward: float = 0.0) -> Trajectory:
    found = Trajectory(task_group_id=task_group_id, index=index, reward=reward)
    found.started_at.seconds, found.finished_at.seconds = 1_700_000_000, 1_700_000_001
    found.sequences.add(
        policy="model0",
        role="agent",
        reward=reward,
        stop_reason=trajectory_pb2.STOP_REASON_STOP,
        segments=[prompt_of(2), segment_of(6)],
    )
    return found


def token(position: int, value: int) -> Edit:
    def edit(found: Trajectory) -> None:
        for segment in found.sequences[0].segments:
            ids = np.frombuffer(segment.token_ids, "<i4").copy()
            if position < len(ids):
                ids[position] = value
                segment.token_ids = ids.tobytes()
                return

    return edit


def said(name: str, value: float) -> Edit:
    """The third log-probability of the policy's segment becomes this."""

    def edit(found: Trajectory) -> None:
        segment = found.sequences[0].segments[1]
        values = np.full(6, -1.0, "<f4")
        values[2] = value
        setattr(segment, name, values.tobytes())

    return edit


def reward(value: float, of_sequence: bool = True) -> Edit:
    def edit(found: Trajectory) -> None:
        if of_sequence:
            found.sequences[0].reward = value
        else:
            found.reward = value

    return edit


def sequences(number: int) -> Edit:
    def edit(found: Trajectory) -> None:
        first = trajectory_pb2.Sequence()
        first.CopyFrom(found.sequences[0])
        del found.sequences[:]
        found.sequences.extend([first] * number)

    return edit


def segments(*made: trajectory_pb2.Segment) -> Edit:
    def edit(found: Trajectory) -> None:
        del found.sequences[0].segments[:]
        found.sequences[0].segments.extend(made)

    return edit


def field(name: str, value: object) -> Edit:
    """Of the sequence."""

    def edit(found: Trajectory) -> None:
        setattr(found.sequences[0], name, value)

    return edit


def of_segment(name: str, value: object, position: int = 1) -> Edit:
    def edit(found: Trajectory) -> None:
        setattr(found.sequences[0].segments[position], name, value)

    return edit


def metrics(values: dict[str, float], of_sequence: bool = True) -> Edit:
    def edit(found: Trajectory) -> None:
        (found.sequences[0] if of_sequence else found).metrics.update(values)

    return edit


def time(name: str, seconds: int) -> Edit:
    def edit(found: Trajectory) -> None:
        getattr(found, name).seconds = seconds

    return edit


def phases(number: int, **more: object) -> Edit:
    def edit(found: Trajectory) -> None:
        for _ in range(number):
            found.timing.phases.add(**{"what": "generate", "seconds": 1.0, **more})  # type: ignore[arg-type]

    return edit


KEPT_OUTSIDE = pack([left_out_row([VOCABULARY + 7])] * 6, 6)

ABSURD: dict[str, tuple[Edit, Reason]] = {
    "a token id outside the vocabulary": (token(0, VOCABULARY), Reason.TOKEN_ID),
    "the largest token id": (token(1, 2**31 - 1), Reason.TOKEN_ID),
    "a negative token id": (token(1, -1), Reason.TOKEN_ID),
    "the smallest token id, of the policy": (token(4, -(2**31)), Reason.TOKEN_ID),
    "a reward whose square overflows": (reward(1.7e308), Reason.REWARD),
    "the least float as a reward": (reward(-sys.float_info.max), Reason.REWARD),
    "an outcome that overflows": (reward(1.7e308, of_sequence=False), Reason.REWARD),
    "an infinite reward": (reward(float("inf")), Reason.REWARD),
    "a reward that is no number": (reward(float("nan"), of_sequence=False), Reason.REWARD),
    "a reward just beyond the bound": (reward(-1_000_001.0), Reason.REWARD),
    "a log-probability of +3e38": (said("logprobs", 3e38), Reason.LOGPROB),
    "a log-probability of -3e38": (said("logprobs", -3e38), Reason.LOGPROB),
    "a log-probability that is no number": (said("logprobs", float("nan")), Reason.LOGPROB),
    "a probability of e": (said("logprobs", 1.0), Reason.LOGPROB),
    "a teacher where there is none": (said("teacher_logprobs", -1.0), Reason.TEACHER),
    "a teacher that is sure beyond 1": (said("teacher_logprobs", 3e38), Reason.TEACHER),
    "500,000 tokens": (segments(prompt_of(2), segment_of(500_000)), Reason.LENGTH),
    "one token more than a turn has": (segments(prompt_of(2), segment_of(NEW_TOKENS + 1)), Reason.LENGTH),
    "one token more in two halves of a turn": (segments(prompt_of(2), segment_of(8), segment_of(7)), Reason.LENGTH),
    "one token more than the context has": (segments(prompt_of(CONTEXT), segment_of(1)), Reason.LENGTH),
    "no token at all": (segments(), Reason.LENGTH),
    "no prompt": (segments(segment_of(6)), Reason.LENGTH),
    "10,000 sequences": (sequences(10_000), Reason.COUNT),
    "60,000 sequences": (
        lambda found: found.sequences.extend([trajectory_pb2.Sequence(policy="model0", stop_reason=1)] * 60_000),
        Reason.COUNT,
    ),
    "no sequence": (sequences(0), Reason.COUNT),
    "20,000 empty segments": (segments(prompt_of(2), *[segment_of(0)] * 20_000), Reason.COUNT),
    "a role of 1 MB": (field("role", "x" * 1_000_000), Reason.NAME),
    "an empty role": (field("role", ""), Reason.NAME),
    "a role that cannot be printed": (field("role", "agent\n\x1b[2J"), Reason.NAME),
    "a role that is shown backwards": (field("role", "a\u202eb"), Reason.NAME),
    "log-probabilities of the environment": (
        of_segment("logprobs", np.full(2, -1.0, "<f4").tobytes(), 0),
        Reason.UNREADABLE,
    ),
    "kept tokens of the environment": (of_segment("kept", pack([left_out_row([1])] * 2, 2), 0), Reason.UNREADABLE),
    "two turns with an empty word between": (
        segments(prompt_of(2), segment_of(NEW_TOKENS), prompt_of(0), segment_of(NEW_TOKENS)),
        Reason.LENGTH,
    ),
    "attempt -9": (field("attempt", -9), Reason.NUMBER),
    "attempt 2**31 - 1": (field("attempt", 2**31 - 1), Reason.NUMBER),
    "thread -1": (field("thread", -1), Reason.NUMBER),
    "50,000 metrics": (metrics({f"m{i}": 1.0 for i in range(50_000)}), Reason.METRIC),
    "a metric that is no number": (metrics({"penalty": float("nan")}), Reason.METRIC),
    "an infinite metric of the trajectory": (metrics({"x": float("inf")}, of_sequence=False), Reason.METRIC),
    "a metric without a name": (metrics({"": 1.0}), Reason.NAME),
    "a metric with a name of 1 MB": (metrics({"x" * 1_000_000: 1.0}), Reason.NAME),
    "an unknown policy": (field("policy", "nobody"), Reason.POLICY),
    "no policy": (field("policy", ""), Reason.POLICY),
    "version -1": (of_segment("weight_version", -1), Reason.UNREADABLE),
    "a version of the environment below -1": (of_segment("weight_version", -(2**62), 0), Reason.VERSION),
    "a version from the future": (of_segment("weight_version", 9), Reason.VERSION),
    "the last version that there can be": (of_segment("weight_version", 2**63 - 1), Reason.VERSION),
    "fewer log-probabilities than tokens": (of_segment("logprobs", b"\0\0\0\0"), Reason.UNREADABLE),
    "half a token": (of_segment("token_ids", b"\0\0"), Reason.UNREADABLE),
    "a segment without a source": (of_segment("source", 0), Reason.UNREADABLE),
    "a stop reason that does not exist": (field("stop_reason", 77), Reason.UNREADABLE),
    "kept tokens that are noise": (of_segment("kept", b"\xff" * 100), Reason.KEPT_TOKENS),
    "kept tokens outside the vocabulary": (of_segment("kept", KEPT_OUTSIDE), Reason.KEPT_TOKENS),
    "a temperature that is no number": (of_segment("temperature", float("nan")), Reason.TEMPERATURE),
    "temperature 0 in training": (of_segment("temperature", 0.0), Reason.TEMPERATURE),
    "a negative temperature": (of_segment("temperature", -1.0), Reason.TEMPERATURE),
    "temperature 1e300": (of_segment("temperature", 1e300), Reason.TEMPERATURE),
    "a start before 1970": (time("started_at", -5), Reason.TIME),
    "an end after the year 10000": (time("finished_at", 2**62), Reason.TIME),
    "an end ten years before the start": (time("finished_at", 1_400_000_000), Reason.TIME),
    "phases by the thousand": (phases(5000), Reason.TIME),
    "a phase with a name of 1 MB": (phases(1, what="x" * 1_000_000), Reason.TIME),
    "a phase of a version that does not exist": (phases(1, first_version=-(2**62)), Reason.TIME),
    "2**31 - 1 sends": (lambda found: setattr(found.timing, "num_sends", 2**31 - 1), Reason.TIME),
    "a phase of -5 tokens": (phases(1, num_tokens=-5), Reason.TIME),
}
