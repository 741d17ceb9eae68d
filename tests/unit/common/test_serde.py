"""Records survive the wire unchanged, and invalid messages are refused."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.common.pb import account_pb2, pool_pb2, trajectory_pb2
from services.common.records.types import (
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
    WeightVersion,
)
from services.common.wire import records as serde
from services.common.wire.accounts import account_from_proto, peer_from_proto
from services.common.wire.records import json_object, timestamp_to_proto, timing_from_proto
from services.common.wire.weights import weight_version_from_proto, weight_version_to_proto

INT32_MAX = 2**31 - 1
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.floats(allow_nan=False)
moment = st.floats(0, 4e9)
counts = st.dictionaries(text, number, max_size=3)
int32 = st.integers(0, INT32_MAX)
int64 = st.integers(0, 2**63 - 1)
tokens = st.lists(int32, max_size=40)


@st.composite
def policy_segments(draw: st.DrawFn) -> Segment:
    ids = draw(tokens)
    logprobs = draw(st.lists(st.floats(width=32, max_value=0, allow_nan=False), min_size=len(ids), max_size=len(ids)))
    made = Segment.policy(ids, logprobs, draw(int64), draw(st.booleans()), draw(st.binary(max_size=30)))
    scored = np.array(logprobs[::-1] if draw(st.booleans()) else [], dtype=np.float32)
    return replace(made, temperature=draw(st.none() | st.floats(0.01, 4)), teacher_logprobs=scored)


segments = st.one_of(policy_segments(), tokens.map(Segment.environment))
made_sequences = st.builds(
    Sequence,
    policy=text,
    segments=st.lists(segments, max_size=4).map(tuple),
    reward=number,
    stop_reason=st.sampled_from(StopReason),
    role=text,
    attempt=int32,
    metrics=counts,
    thread=int32,
)


@st.composite
def with_parents(draw: st.DrawFn) -> Sequence:
    made = draw(made_sequences)
    parent = draw(st.none() | st.integers(0, 2**31 - 1))
    return made if parent is None else replace(made, parent=parent, origin=draw(st.sampled_from(Origin)))


sequences = with_parents()
phases = st.builds(
    RolloutPhase,
    what=text,
    begin_s=st.floats(0, 1e6),
    seconds=st.floats(0, 1e6),
    policy=text,
    num_tokens=int32,
    first_version=int64,
    last_version=int64,
    detail=text,
)
timings = st.builds(
    RolloutTiming,
    accepted_at=moment,
    sent_at=moment,
    num_sends=int32,
    num_retries=int32,
    phases=st.lists(phases, max_size=3).map(tuple),
)
trajectories = st.builds(
    Trajectory,
    task_group_id=text,
    index=int32,
    sequences=st.lists(sequences, max_size=3).map(tuple),
    reward=number,
    metrics=counts,
    started_at=moment,
    finished_at=moment,
    replica_id=text,
    timing=timings,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
tasks = st.builds(Task, task_id=text, data=st.dictionaries(text, json_values, max_size=4))
samplings = st.builds(
    Sampling, temperature=number, top_p=number, top_k=int32, min_p=number, max_new_tokens=int32, min_new_tokens=int32
)
orders = st.builds(
    TaskGroupOrder,
    task_group_id=text,
    task=tasks,
    indices=st.lists(int32, max_size=8).map(tuple),
    purpose=st.sampled_from(Purpose),
    sampling=samplings,
    required_versions=st.dictionaries(text, int64, max_size=2),
    seed=int64,
    timeout_s=st.floats(0, 1e6),
    source=text,
)
training_sequences = st.builds(
    TrainingSequence,
    sequence_id=text,
    sequence=sequences,
    group_mean=number,
    group_std=number,
    group_size=int32,
    staleness=int64,
    minibatch=int32,
    position=int32,
    advantage_scale=number,
)
versions = st.builds(
    WeightVersion, policy=text, number=int64, digest=text, sources=st.lists(text, max_size=3).map(tuple)
)


TIMES = frozenset({"started_at", "finished_at", "accepted_at", "sent_at", "timeout_s"})


def same(left: Any, right: Any, about: frozenset[str] = TIMES) -> bool:
    """Equal, arrays bit by bit; times (the wire has nanoseconds) to a microsecond."""
    if is_dataclass(left):
        return type(left) is type(right) and all(
            math.isclose(getattr(left, f.name), getattr(right, f.name), rel_tol=0, abs_tol=1e-6)
            if f.name in about
            else same(getattr(left, f.name), getattr(right, f.name))
            for f in fields(left)
        )
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def wire(message: Any) -> Any:
    """The message after parsing."""
    return type(message).FromString(message.SerializeToString())


def filled(fill: Callable[[Any, Any], None], proto: Any, record: Any) -> Any:
    fill(proto, record)
    return proto


def made_segment(segment: Segment) -> trajectory_pb2.Segment:
    sequence = Sequence(policy="p", segments=(segment,), reward=0.0, stop_reason=StopReason.STOP)
    return filled(serde.fill_sequence, trajectory_pb2.Sequence(), sequence).segments[0]


@given(segments)
def test_segments_round_trip(segment: Segment) -> None:
    assert same(serde.segment_from_proto(wire(made_segment(segment))), segment)


@given(sequences)
def test_sequences_round_trip(sequence: Sequence) -> None:
    proto = filled(serde.fill_sequence, trajectory_pb2.Sequence(), sequence)
    assert same(serde.sequence_from_proto(wire(proto)), sequence)


@given(trajectories)
def test_trajectories_round_trip(trajectory: Trajectory) -> None:
    proto = filled(serde.fill_trajectory, trajectory_pb2.Trajectory(), trajectory)
    read = serde.trajectory_from_proto(wire(proto), trajectory.replica_id)
    assert same(read, trajectory)


@given(
    st.builds(
        RolloutFailure,
        task_group_id=text,
        index=int32,
        reason=text,
        detail=text,
        replica_id=text,
        started_at=moment,
        finished_at=moment,
        timing=timings,
    )
)
def test_failures_round_trip(failure: RolloutFailure) -> None:
    assert same(serde.failure_from_proto(wire(serde.failure_to_proto(failure)), failure.replica_id), failure)


def test_times_that_are_no_numbers_are_dropped_and_never_refused() -> None:
    timing = trajectory_pb2.RolloutTiming(phases=[trajectory_pb2.RolloutPhase(begin_s=math.nan, seconds=math.inf)])
    (phase,) = timing_from_proto(wire(timing)).phases
    assert (phase.begin_s, phase.seconds) == (0.0, 0.0)
    activity = account_pb2.ActivityTime(activity="a", seconds=math.nan, longest_now_s=math.inf)
    account = account_pb2.TimeAccount(activities=[activity], cpu_s=math.nan)
    (read,) = account_from_proto(wire(account)).activities
    assert (read.seconds, read.longest_now_s) == (0.0, 0.0)
    peer = peer_from_proto(wire(account_pb2.PeerState(silent_s=1e300, accounts=[account])))
    assert timestamp_to_proto(time.time() - peer.silent_s).seconds > 0
    assert peer.accounts[0].cpu_s == 0.0


@given(tasks)
def test_tasks_round_trip(task: Task) -> None:
    assert serde.task_from_proto(wire(serde.task_to_proto(task))) == task


@given(samplings)
def test_samplings_round_trip(sampling: Sampling) -> None:
    assert serde.sampling_from_proto(wire(serde.sampling_to_proto(sampling))) == sampling


@given(orders)
def test_orders_round_trip(order: TaskGroupOrder) -> None:
    assert same(serde.order_from_proto(wire(serde.order_to_proto(order))), order)


@given(training_sequences)
def test_training_sequences_round_trip(item: TrainingSequence) -> None:
    (chunk,) = serde.batch_chunks([item], 1)
    assert same(serde.training_sequence_from_proto(wire(chunk.chunk.sequences[0])), item)


@given(versions)
def test_weight_versions_round_trip(version: WeightVersion) -> None:
    assert weight_version_from_proto(wire(weight_version_to_proto(version, "r1"))) == version


@given(st.builds(MinibatchTotals, num_sequences=int64, num_trained_tokens=int64))
def test_totals_round_trip(totals: MinibatchTotals) -> None:
    assert serde.totals_from_proto(wire(serde.totals_to_proto(totals))) == totals


@given(st.tuples(moment, moment))
def test_intervals_round_trip_to_a_microsecond(interval: tuple[float, float]) -> None:
    assert serde.interval_from_proto(wire(serde.interval_to_proto(interval))) == pytest.approx(
        interval, rel=0, abs=1e-6
    )


@given(st.floats(-1e9, 1e9))
def test_durations_round_trip_and_their_parts_have_one_sign(seconds: float) -> None:
    proto = serde.duration_to_proto(seconds)
    assert serde.duration_from_proto(proto) == pytest.approx(seconds, rel=0, abs=1e-6)
    assert proto.seconds * proto.nanos >= 0
    assert abs(proto.nanos) < 1_000_000_000


def test_token_ids_and_logprobs_are_little_endian_on_the_wire() -> None:
    proto = made_segment(Segment.policy([1, 258], [-0.5, -2.0], 3))
    assert proto.token_ids == struct.pack("<2i", 1, 258)
    assert proto.logprobs == struct.pack("<2f", -0.5, -2.0)
    assert proto.weight_version == 3


def test_arrays_of_the_other_byte_order_are_sent_little_endian() -> None:
    segment = Segment(source=TokenSource.ENVIRONMENT, token_ids=np.array([1, 258], dtype=">i4"))
    assert made_segment(segment).token_ids == struct.pack("<2i", 1, 258)


def test_reading_makes_views_and_not_copies() -> None:
    segment = serde.segment_from_proto(made_segment(Segment.policy([1, 2], [-0.5, -2.0], 3)))
    assert isinstance(segment.token_ids.base, bytes)
    assert isinstance(segment.logprobs.base, bytes)
    assert not segment.token_ids.flags.writeable


def test_absent_sampling_fields_take_their_defaults_and_zeros_are_not_absent() -> None:
    assert serde.sampling_from_proto(trajectory_pb2.Sampling()) == Sampling()
    read = serde.sampling_from_proto(trajectory_pb2.Sampling(temperature=0.0, max_new_tokens=0, top_p=0.9))
    assert read == Sampling(temperature=0.0, max_new_tokens=0, top_p=0.9)


def test_every_field_of_sampling_on_the_wire_is_one_of_the_record() -> None:
    assert set(trajectory_pb2.Sampling.DESCRIPTOR.fields_by_name) == {field.name for field in fields(Sampling)}


ENVIRONMENT = trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT
POLICY = trajectory_pb2.TOKEN_SOURCE_POLICY


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (trajectory_pb2.Segment(), "no source"),
        (trajectory_pb2.Segment(source=ENVIRONMENT, token_ids=b"12345"), "whole 4-byte values"),
        (trajectory_pb2.Segment(source=POLICY, token_ids=b"1234", logprobs=b"12"), "whole 4-byte values"),
        (trajectory_pb2.Segment(source=POLICY, token_ids=b"1234"), "1 tokens but 0 log-probabilities"),
        (trajectory_pb2.Segment(source=ENVIRONMENT, logprobs=b"1234"), "neither log-probabilities nor kept tokens"),
        (trajectory_pb2.Segment(source=ENVIRONMENT, kept=b"1"), "neither log-probabilities nor kept tokens"),
        (
            trajectory_pb2.Segment(source=ENVIRONMENT, teacher_logprobs=b"1234"),
            "neither log-probabilities nor kept tokens",
        ),
        (trajectory_pb2.Segment(source=POLICY, teacher_logprobs=b"12"), "whole 4-byte values"),
        (
            trajectory_pb2.Segment(source=POLICY, teacher_logprobs=b"1234"),
            "0 tokens but 1 log-probabilities of a teacher",
        ),
        (trajectory_pb2.Segment(source=POLICY, weight_version=-1), "weight version -1"),
    ],
)
def test_what_cannot_be_a_segment_is_refused(segment: trajectory_pb2.Segment, said: str) -> None:
    sequence = trajectory_pb2.Sequence(stop_reason=trajectory_pb2.STOP_REASON_STOP, segments=[segment])
    with pytest.raises(InvalidRequestError, match=said):
        serde.trajectory_from_proto(trajectory_pb2.Trajectory(sequences=[sequence]))


def test_a_sequence_without_a_stop_reason_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no stop reason"):
        serde.sequence_from_proto(trajectory_pb2.Sequence())


def test_an_enum_value_from_a_newer_peer_is_refused_and_not_guessed() -> None:
    proto = trajectory_pb2.Sequence.FromString(b"\x28\x63")  # field 5, value 99
    with pytest.raises(InvalidRequestError, match="99"):
        serde.sequence_from_proto(proto)


def test_an_order_without_a_purpose_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="g1 has no purpose"):
        serde.order_from_proto(pool_pb2.RunTaskGroup(task_group_id="g1"))


def test_integers_of_a_task_stay_exact_beyond_64_bits() -> None:
    data = {"n": 2**63, "m": -(10**30), "in": [{"x": 10**400}], "text": "\u1234" + "5" * 30, "f": 0.1234567890123456789}
    assert json_object(json.dumps(data).encode(), "task_json") == data
    assert type(json_object(b'{"f": 1.00000000000000000000e3}', "task_json")["f"]) is float
    for text in (
        b'{"n": 1' + b"0" * 5000 + b"}",
        b'{"n": 12345678901234567890, "m": NaN}',
        b'{"n": 012345678901234567890}',
    ):
        with pytest.raises(InvalidRequestError, match="task_json is not JSON"):
            json_object(text, "task_json")


@pytest.mark.parametrize(("data", "said"), [(b"{", "not JSON"), (b"[1]", "must be a JSON object, got list")])
def test_task_data_that_is_no_json_object_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        serde.task_from_proto(trajectory_pb2.Task(task_id="t", data_json=data))


def test_the_bytes_of_a_trajectory_do_not_change_between_releases() -> None:
    """Journals and peers of another release read these bytes. Fields may be added, never moved."""
    trajectory = Trajectory(
        task_group_id="g1",
        index=2,
        sequences=(
            Sequence(
                policy="p",
                segments=(Segment.environment([1]), Segment.policy([2], [-0.5], 7, mixed_cache=True)),
                reward=1.0,
                stop_reason=StopReason.LENGTH,
                role="solver",
                attempt=1,
                metrics={"turns": 1.0},
            ),
        ),
        reward=0.5,
        started_at=1.5,
        finished_at=2.0,
    )
    golden = bytes.fromhex(
        "0a0267311002"  # task_group_id "g1", index 2
        "1a530a01701206736f6c766572180121000000000000f03f2802"  # sequence: policy, role, attempt, reward, LENGTH
        "3213080212040100000020ffffffffffffffffff01"  # environment segment: token 1, version -1
        "321208011204020000001a04000000bf20072801"  # policy segment: token 2, logprob -0.5, version 7, mixed cache
        "3a100a057475726e7311000000000000f03f"  # metrics of the sequence
        "21000000000000e03f320808011080cab5ee013a020802"  # reward 0.5, started, finished
    )
    assert (
        filled(serde.fill_trajectory, trajectory_pb2.Trajectory(), trajectory).SerializeToString(deterministic=True)
        == golden
    )


@given(st.lists(st.integers(1, 400), max_size=30))
def test_chunks_hold_every_sequence_once_in_order_and_keep_the_bound(lengths: list[int]) -> None:
    items = [
        TrainingSequence(
            sequence_id=f"g/{position}/0",
            sequence=Sequence(
                policy="model0", segments=(Segment.environment(list(range(length))),), reward=0.5,
                stop_reason=StopReason.STOP,
            ),
            group_mean=0.5, group_std=1.0, group_size=2, staleness=1, minibatch=0, position=position,
        )
        for position, length in enumerate(lengths)
    ]  # fmt: skip
    chunks = [response.chunk for response in serde.batch_chunks(items, 1000)]
    found = [serde.training_sequence_from_proto(proto) for chunk in chunks for proto in chunk.sequences]
    assert [f.sequence_id for f in found] == [f"g/{position}/0" for position in range(len(lengths))]
    assert [f.sequence.num_tokens for f in found] == lengths
    for chunk in chunks:
        assert len(chunk.sequences) == 1 or sum(s.ByteSize() for s in chunk.sequences) <= 1000
