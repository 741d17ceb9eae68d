"""Records survive the wire unchanged, and invalid messages are refused."""

from __future__ import annotations

import json
import math
import struct
import time
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.common.pb import account_pb2, pool_pb2, training_pb2, trajectory_pb2, weights_pb2
from services.common.records import (
    DeviceTurn,
    FetchPlan,
    MinibatchTotals,
    Origin,
    RolloutFailure,
    RolloutTiming,
    Sampling,
    Segment,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSequence,
    TrainingSequence,
    Trajectory,
    WeightTransfer,
    WeightVersion,
)
from services.common.telemetry.accounts import AccountState, AnyActivity, Component, PeerState
from services.common.wire import (
    batch_chunks,
    json_object,
    read,
    timestamp_to_proto,
    write,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.floats(allow_nan=False)
int32 = st.integers(0, 2**31 - 1)
int64 = st.integers(0, 2**63 - 1)
tokens = st.lists(int32, max_size=40)
LARGE = frozenset({"version", "number", "base_version", "first_version", "last_version", "seed", "staleness"})
TIMES = frozenset({"started_at", "finished_at", "accepted_at", "sent_at", "timeout_s", "encode_s", "fetch_s", "verify_s",
                   "write_s", "pause_s", "begin_s", "seconds", "longest_now_s", "cpu_s", "silent_s"})  # fmt: skip


@st.composite
def policy_segments(draw: st.DrawFn) -> Segment:
    ids = draw(tokens)
    logprobs = draw(st.lists(st.floats(width=32, max_value=0, allow_nan=False), min_size=len(ids), max_size=len(ids)))
    made = Segment.policy(ids, logprobs, draw(int64), draw(st.booleans()), draw(st.binary(max_size=30)))
    scored = np.array(logprobs[::-1] if draw(st.booleans()) else [], dtype=np.float32)
    return replace(made, temperature=draw(st.none() | st.floats(0.01, 4)), teacher_logprobs=scored)


def values_of(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Any value that the wire carries in a field of this type and name."""
    if hint in GIVEN:
        return GIVEN[hint]
    if hint is int:
        return int64 if name in LARGE else int32
    if hint is float:
        return st.floats(0, 4e9 if name.endswith("_at") else 1e6) if name in TIMES else number
    if is_dataclass(hint):
        return records_of(hint)
    if isinstance(hint, type):
        return st.sampled_from(hint)  # type: ignore[call-overload]
    first, *others = (values_of(part, name) for part in get_args(hint) if part not in (..., type(None)))
    if get_origin(hint) is tuple:
        return st.lists(first, max_size=3).map(tuple)
    return st.dictionaries(first, *others, max_size=3) if others else st.none() | first


def records_of(record: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(record)
    return st.builds(record, **({f.name: values_of(hints[f.name], f.name) for f in fields(record)} | given))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
GIVEN: dict[Any, st.SearchStrategy[Any]] = {
    str: text,
    Component: text,
    AnyActivity: text,
    bool: st.booleans(),
    Any: json_values,
    Segment: policy_segments() | tokens.map(Segment.environment),
}
GIVEN[TokenSequence] = st.one_of(
    records_of(TokenSequence, parent=st.none(), origin=st.just(Origin.ROOT)), records_of(TokenSequence, parent=int32)
)


def same(left: Any, right: Any) -> bool:
    """Equal, arrays bit by bit; times (the wire has nanoseconds) to a microsecond."""
    if is_dataclass(left):
        return type(left) is type(right) and all(
            math.isclose(getattr(left, f.name), getattr(right, f.name), rel_tol=0, abs_tol=1e-6)
            if f.name in TIMES
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


def made_segment(segment: Segment) -> trajectory_pb2.Segment:
    return write(segment, trajectory_pb2.Segment())


plans = st.lists(text, min_size=1, max_size=3).flatmap(
    lambda relays: st.builds(
        FetchPlan, relays=st.just(tuple(relays)), own_shard=st.none() | st.integers(0, len(relays) - 1)
    )
)
transfers = records_of(
    WeightTransfer,
    encoding=st.sampled_from(["", "full", "delta"]),
    transport=st.sampled_from(["", "grpc", "mapped", "bulk"]),
)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (values_of(Segment), trajectory_pb2.Segment),
        (values_of(TokenSequence), trajectory_pb2.Sequence),
        (records_of(Trajectory), trajectory_pb2.Trajectory),
        (records_of(RolloutFailure), trajectory_pb2.RolloutFailure),
        (records_of(Task), trajectory_pb2.Task),
        (records_of(Sampling), trajectory_pb2.Sampling),
        (records_of(TaskGroupOrder), pool_pb2.RunTaskGroup),
        (records_of(TrainingSequence), training_pb2.TrainingSequence),
        (records_of(WeightVersion), weights_pb2.WeightVersion),
        (plans, pool_pb2.FetchPlan),
        (transfers, weights_pb2.WeightTransfer),
        (records_of(MinibatchTotals), training_pb2.MinibatchTotals),
        (records_of(DeviceTurn), pool_pb2.DeviceTurn),
        (records_of(AccountState), account_pb2.TimeAccount),
        (records_of(PeerState), account_pb2.PeerState),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@given(data=st.data())
def test_records_round_trip(records: st.SearchStrategy[Any], message: type[Message], data: st.DataObject) -> None:
    record = data.draw(records)
    left_out = {"replica_id": record.replica_id} if hasattr(record, "replica_id") else {}
    assert same(read(type(record), wire(write(record, message())), **left_out), record)


def test_times_that_are_no_numbers_are_dropped_and_never_refused() -> None:
    timing = trajectory_pb2.RolloutTiming(phases=[trajectory_pb2.RolloutPhase(begin_s=math.nan, seconds=math.inf)])
    (phase,) = read(RolloutTiming, wire(timing)).phases
    assert (phase.begin_s, phase.seconds) == (0.0, 0.0)
    activity = account_pb2.ActivityTime(activity="a", seconds=math.nan, longest_now_s=math.inf)
    account = account_pb2.TimeAccount(activities=[activity], cpu_s=math.nan)
    (found,) = read(AccountState, wire(account)).activities
    assert (found.seconds, found.longest_now_s) == (0.0, 0.0)
    peer = read(PeerState, wire(account_pb2.PeerState(silent_s=1e300, accounts=[account])))
    assert timestamp_to_proto(time.time() - peer.silent_s).seconds > 0
    assert peer.accounts[0].cpu_s == 0.0


def test_token_ids_and_logprobs_are_little_endian_on_the_wire() -> None:
    proto = made_segment(Segment.policy([1, 258], [-0.5, -2.0], 3))
    assert proto.token_ids == struct.pack("<2i", 1, 258)
    assert proto.logprobs == struct.pack("<2f", -0.5, -2.0)
    assert proto.weight_version == 3


def test_reading_makes_views_and_not_copies() -> None:
    segment = read(Segment, made_segment(Segment.policy([1, 2], [-0.5, -2.0], 3)))
    assert isinstance(segment.token_ids.base, bytes)
    assert isinstance(segment.logprobs.base, bytes)
    assert not segment.token_ids.flags.writeable


def test_absent_sampling_fields_take_their_defaults_and_zeros_are_not_absent() -> None:
    assert read(Sampling, trajectory_pb2.Sampling()) == Sampling()
    found = read(Sampling, trajectory_pb2.Sampling(temperature=0.0, max_new_tokens=0, top_p=0.9))
    assert found == Sampling(temperature=0.0, max_new_tokens=0, top_p=0.9)


ENVIRONMENT = trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT
POLICY = trajectory_pb2.TOKEN_SOURCE_POLICY


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (trajectory_pb2.Segment(), "Segment.source is missing or unknown"),
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
        read(Trajectory, trajectory_pb2.Trajectory(sequences=[sequence]))


def test_an_enum_value_from_a_newer_peer_is_refused_and_not_guessed() -> None:
    proto = trajectory_pb2.Sequence.FromString(b"\x28\x63")  # field 5, value 99
    with pytest.raises(InvalidRequestError, match="99"):
        read(TokenSequence, proto)


def test_an_order_without_a_purpose_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"RunTaskGroup\.purpose is missing"):
        read(TaskGroupOrder, pool_pb2.RunTaskGroup(task_group_id="g1"))


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
        read(Task, trajectory_pb2.Task(task_id="t", data_json=data))


@given(st.lists(st.integers(1, 400), max_size=30))
def test_chunks_hold_every_sequence_once_in_order_and_keep_the_bound(lengths: list[int]) -> None:
    items = [
        TrainingSequence(
            sequence_id=f"g/{position}/0",
            sequence=TokenSequence(
                policy="model0", segments=(Segment.environment(list(range(length))),), reward=0.5,
                stop_reason=StopReason.STOP,
            ),
            group_mean=0.5, group_std=1.0, group_size=2, staleness=1, minibatch=0, position=position,
        )
        for position, length in enumerate(lengths)
    ]  # fmt: skip
    chunks = [response.chunk for response in batch_chunks(items, 1000)]
    found = [read(TrainingSequence, proto) for chunk in chunks for proto in chunk.sequences]
    assert [f.sequence_id for f in found] == [f"g/{position}/0" for position in range(len(lengths))]
    assert [f.sequence.num_tokens for f in found] == lengths
    for chunk in chunks:
        assert len(chunk.sequences) == 1 or sum(s.ByteSize() for s in chunk.sequences) <= 1000
