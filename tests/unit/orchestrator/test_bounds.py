"""Bounds of records and reports, the allowed senders, and the reports about refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from services.cli.watch import warnings_of
from services.common.kept_tokens import KeptRow, kept_rows, left_out_row, pack
from services.common.pb import run_pb2
from services.common.records import (
    Purpose,
    Refusal,
    RolloutFailure,
    RolloutPhase,
    RolloutTiming,
    Sampling,
    Segment,
    TaskGroupOrder,
    TokenSequence,
    Trajectory,
    counter_of,
)
from services.common.records import RefusalReason as Reason
from services.orchestrator.ingest import (
    MOST_SENDERS,
    MOST_SEQUENCES,
    Answer,
    PolicyBounds,
    RecordBounds,
    RecordOutcome,
    RecordRefusedError,
    bounded_failure,
)
from services.orchestrator.tasks.prompts import vocab_size
from tests.unit.orchestrator.builders import failure, order, sequence, trajectory
from tests.unit.orchestrator.world import World

Worlds = Callable[..., World]


def reason_of(made: Trajectory, bounds: PolicyBounds | None = None, **ordered: Any) -> Reason | None:
    """Reason for which a trajectory is refused; None for an accepted one."""
    known = RecordBounds({"model0": bounds or PolicyBounds(context_length=64, vocab_size=100)})
    issued = replace(order(), **ordered)
    try:
        known.check(made, issued, {"model0": 3})
    except RecordRefusedError as error:
        return error.refusal.reason
    return None


def of(*segments: Segment, **changes: Any) -> Trajectory:
    return trajectory("g", 0, replace(sequence(), segments=segments, **changes))


PROMPT = Segment.environment([1, 2])


def said(num_tokens: int, **changes: Any) -> Segment:
    return replace(Segment.policy(np.zeros(num_tokens), np.full(num_tokens, -1.0), 0), **changes)


# -- records ----------------------------------------------------------------------------------------------------------


def test_records_at_their_bounds_are_taken() -> None:
    bounds = PolicyBounds(context_length=8, vocab_size=100)
    for made in (
        of(PROMPT, replace(said(6), token_ids=np.array([0, 99, 99, 0, 1, 2], np.int32))),
        of(PROMPT, said(6), reward=1e6),
        of(PROMPT, said(6), reward=-1e6),
        of(PROMPT, replace(said(6), logprobs=np.array([0, 1e-3, -1e5, -1, -1, -1], np.float32))),
        of(PROMPT, said(6, weight_version=3)),
        of(PROMPT, said(6, temperature=1e-6)),
        of(PROMPT, said(0), said(2), Segment.environment([]), said(2)),
        of(PROMPT),  # no sample, so no trained token
        of(PROMPT, said(6), attempt=1023, thread=5, metrics={"x": -1e15}),
    ):
        assert reason_of(made, bounds, sampling=Sampling(max_new_tokens=6)) is None


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_turn_is_what_the_policy_wrote_between_two_tokens_of_the_environment(num_tokens: int) -> None:
    most = Sampling(max_new_tokens=4)
    apart = of(PROMPT, said(4), Segment.environment([1] * num_tokens), said(4))
    assert reason_of(apart, PolicyBounds(context_length=100), sampling=most) is None
    swapped = of(PROMPT, said(2), said(2, weight_version=1), said(1, weight_version=2))
    assert reason_of(swapped, sampling=most) is Reason.LENGTH
    around_nothing = of(PROMPT, said(4), Segment.environment([]), said(1))
    assert reason_of(around_nothing, sampling=most) is Reason.LENGTH


def test_a_policy_whose_vocabulary_is_not_known_is_bounded_from_below_alone_until_its_trainer_says() -> None:
    bounds = RecordBounds({"model0": PolicyBounds(context_length=64)})
    large = of(PROMPT, replace(said(1), token_ids=np.array([2**31 - 1], np.int32)))
    bounds.check(large, order(), {"model0": 0})
    negative = of(replace(PROMPT, token_ids=np.array([-1, 5], np.int32)), said(1))
    with pytest.raises(RecordRefusedError):
        bounds.check(negative, order(), {"model0": 0})
    bounds.learn_vocabulary("model0", 0)  # a trainer that does not say
    bounds.check(large, order(), {"model0": 0})
    bounds.learn_vocabulary("model0", 1000)
    with pytest.raises(RecordRefusedError, match="ids 0 to 999"):
        bounds.check(large, order(), {"model0": 0})


def test_rewards_from_which_an_advantage_cannot_be_made_are_refused_in_training_alone() -> None:
    binary = PolicyBounds(context_length=64, takes_reward=lambda reward: reward in (0.0, 1.0), same_rewards=True)
    half = trajectory("g", 0, sequence(0.5))
    assert reason_of(half, binary) is Reason.REWARD
    assert reason_of(half, binary, purpose=Purpose.EVALUATION) is None
    threads = trajectory("g", 0, sequence(1.0, thread=0), sequence(0.0, thread=1))
    assert reason_of(threads, binary) is Reason.REWARD
    assert reason_of(trajectory("g", 0, sequence(1.0), sequence(0.0, attempt=1)), binary) is None
    assert reason_of(threads, replace(binary, same_rewards=False)) is None


def test_teachers_are_where_they_were_asked_for() -> None:
    scored = of(PROMPT, said(2, teacher_logprobs=np.array([-1, -2], np.float32)))
    taught = PolicyBounds(context_length=64, taught=True)
    assert reason_of(scored, taught) is None
    assert reason_of(scored) is Reason.TEACHER
    assert reason_of(of(PROMPT, said(2)), taught) is Reason.TEACHER
    wrong = of(PROMPT, said(2, teacher_logprobs=np.array([-1, np.nan], np.float32)))
    assert reason_of(wrong, taught) is Reason.TEACHER


def test_a_workflow_may_leave_as_many_sequences_as_its_settings_say(worlds: Worlds) -> None:
    many = trajectory("g", 0, *[sequence()] * (MOST_SEQUENCES + 1))
    assert reason_of(many) is Reason.COUNT
    bounds = RecordBounds({"model0": PolicyBounds(context_length=64)}, max_sequences=2000)
    bounds.check(many, order(), {"model0": 0})


def test_a_clock_that_is_set_back_during_a_rollout_costs_no_record() -> None:
    back = replace(of(PROMPT, said(2)), started_at=1.7e9, finished_at=1.7e9 - 3600)
    assert reason_of(back) is None
    assert reason_of(replace(back, finished_at=1.6e9)) is Reason.TIME
    assert reason_of(replace(back, started_at=math.nan)) is Reason.TIME


def test_a_failure_keeps_what_fits_and_loses_the_rest() -> None:
    fine = RolloutFailure(task_group_id="g", index=0, reason="X", detail="short", started_at=1.0, finished_at=2.0)
    assert bounded_failure(fine) is fine
    phases = tuple(RolloutPhase(what="generate", begin_s=0.0, seconds=1.0) for _ in range(5000))
    absurd = replace(fine, reason="r" * 999, detail="d" * 99_999, started_at=-1.0, timing=RolloutTiming(phases=phases))
    cut = bounded_failure(absurd)
    assert (len(cut.reason), len(cut.detail), cut.started_at, cut.timing.phases) == (64, 8192, 0.0, ())
    assert bounded_failure(cut) is cut


# -- senders ----------------------------------------------------------------------------------------------------------


async def answered(world: World, made: Trajectory | RolloutFailure, sender: tuple[str, str] | None) -> list[Answer]:
    answers: list[Answer] = []
    world.core.ingest.submit(made, answers.append, sender)
    await world.settle()
    return answers


async def test_a_slot_is_filled_by_whom_it_was_given_to_now_or_before(worlds: Worlds) -> None:
    world = worlds()
    name = (await world.begin("first"))[1][0].task_group_id
    second = world.join("second")
    stranger = (await answered(world, trajectory(name, 0), ("second", "1")))[0]
    assert (stranger.outcome, stranger.refusal and stranger.refusal.reason) == (
        RecordOutcome.REFUSED,
        Reason.NOT_THE_OWNER,
    )
    world.clock.now += 31.0  # the first one's lease runs out, and its slots are issued again
    world.join("second")
    world.core.pool.expire()
    await world.settle()
    assert name in {issued.task_group_id for issued in await world.orders(second)}
    zombie = (await answered(world, trajectory(name, 0, reward=1.0), ("first", "1")))[0]
    heir = (await answered(world, trajectory(name, 0), ("second", "1")))[0]
    assert (zombie.outcome, heir.outcome) == (RecordOutcome.ACCEPTED, RecordOutcome.DUPLICATE)
    for nobody in (("third", "1"), ("first", "2"), ("", ""), ("first", "")):
        (refused,) = await answered(world, trajectory(name, 1), nobody)
        assert refused.outcome is RecordOutcome.REFUSED
        assert refused.refusal is not None and refused.refusal.reason is Reason.NOT_A_MEMBER
    assert 1 in world.core.groups[name].unresolved  # its slot is still open


async def test_owners_are_known_after_a_restart_and_a_stranger_cannot_adopt_a_task_group(worlds: Worlds) -> None:
    world = worlds()
    _, orders = await world.begin("first")
    names = [issued.task_group_id for issued in orders]
    await world.crash()
    assert (await answered(world, trajectory(names[0], 0), ("first", "1")))[0].outcome is RecordOutcome.ACCEPTED
    refused = (await answered(world, trajectory(names[0], 1), ("second", "1")))[0].refusal
    assert refused is not None and refused.reason is Reason.NOT_A_MEMBER
    world.clock.now += 31.0
    world.core.pool.expire()  # the groups have no replica now
    thief = world.join("thief", running=names, slots=1)
    assert not thief.assignments
    back = world.join("first", running=names)
    assert set(back.assignments) == set(names)


async def test_a_refused_slot_fails_so_that_its_group_completes_and_the_reason_is_counted(worlds: Worlds) -> None:
    world = worlds()
    name = (await world.begin())[1][0].task_group_id
    bad = trajectory(name, 0, sequence(1e300), reward=0.0)
    (told,) = await answered(world, bad, ("a", "1"))
    assert told.outcome is RecordOutcome.INVALID
    assert told.refusal is not None and told.refusal.reason is Reason.REWARD
    stored = world.core.groups[name].outcomes[0]
    assert isinstance(stored, RolloutFailure) and stored.reason == "INVALID_RECORD"
    assert world.core.counters["refused_reward"] == world.core.counters["failures_invalid_record"] == 1
    for index in (1, 2, 3):
        await answered(world, trajectory(name, index, reward=float(index % 2)), ("a", "1"))
    assert name not in world.core.groups
    await world.crash()
    assert world.core.experience.buffers["model0"].num_sequences == 3


async def test_a_failure_of_a_replica_does_not_pose_as_a_word_of_the_orchestrator(worlds: Worlds) -> None:
    world = worlds()
    name = (await world.begin())[1][0].task_group_id
    posing = RolloutFailure(task_group_id=name, index=0, reason="TOO_OLD", replica_id="a")
    await answered(world, posing, ("a", "1"))
    assert world.core.counters["slots_cancelled"] == 0
    assert world.core.counters["failures_replica_too_old"] == 1


# -- reports about refusals -------------------------------------------------------------------------------------------


async def test_a_replica_whose_every_record_is_refused_is_named_and_one_good_record_ends_it(worlds: Worlds) -> None:
    world = worlds()
    slots = [(o.task_group_id, i) for o in (await world.begin())[1] for i in o.indices]
    watch = world.watch()

    def look() -> set[tuple[str, str]]:
        for _ in range(3):
            world.clock.now += 1.0
            watch.report_stalls()
        return {(stall.component, stall.cause.value) for stall in world.core.stalls}

    with structlog.testing.capture_logs() as logs:
        for slot in slots[:7]:
            await answered(world, trajectory(*slot, sequence(math.inf)), ("a", "1"))
        assert ("replica/a", "records_refused") not in look()
        await answered(world, trajectory(*slots[7], sequence(math.inf)), ("a", "1"))
        assert ("replica/a", "records_refused") in look()
    told = [entry for entry in logs if entry["event"] == "record.refused"]
    assert 1 <= len(told) < 8, "one of a kind is told in a second"
    await answered(world, trajectory(*slots[8]), ("a", "1"))
    assert ("replica/a", "records_refused") not in look()


async def test_refusals_remember_a_bounded_number_of_senders_and_what_was_refused_most(worlds: Worlds) -> None:
    core, record = worlds().core, failure()
    ingest, counters = core.ingest, core.counters
    for number in range(MOST_SENDERS + 50):
        ingest.drop(record, RecordOutcome.REFUSED, f"{number}" + "x" * 999, Refusal(reason=Reason.NAME, detail="d"))
    ingest.drop(record, RecordOutcome.REFUSED, "0" + "x" * 999, Refusal(reason=Reason.TIME, detail="d"))
    assert len(ingest.streaks) <= MOST_SENDERS + 1
    assert all(len(sender) <= 64 for sender in ingest.streaks)
    assert {name: n for name, n in counters.items() if n and name.startswith("refused_")} == {
        counter_of(Reason.NAME): MOST_SENDERS + 50, counter_of(Reason.TIME): 1
    }  # fmt: skip
    (told,) = warnings_of(run_pb2.RunProgress(counters=counters))
    assert told.startswith(f"refused records: {MOST_SENDERS + 51}, most because of name")


# -- vocabulary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 152064}', 152_064),
        ('{"text_config": {"vocab_size": 7}}', 7),
        ('{"vocab_size": 0}', None),
        ('{"vocab_size": "many"}', None),
        ('{"vocab_size": true}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_the_vocabulary_is_what_the_models_config_says(tmp_path: Path, config: str, size: int | None) -> None:
    assert vocab_size(str(tmp_path)) is None, "it is not here"
    (tmp_path / "config.json").write_text(config)
    assert vocab_size(str(tmp_path)) == size
    assert vocab_size("none") is vocab_size("a/b/c") is vocab_size("../x") is None


# --- records of truncated sampling


BOUNDS = RecordBounds({"model0": PolicyBounds(context_length=64)})
CUT: dict[str, Any] = {"top_p": 0.9, "min_p": 0.05}


def fault_of(record: Trajectory, issued: TaskGroupOrder) -> str:
    try:
        BOUNDS.check(record, issued, {"model0": 0})
    except RecordRefusedError as error:
        return error.refusal.detail
    return ""


def rows_for(token_ids: np.ndarray) -> list[KeptRow]:
    """Each token and the next one could be drawn."""
    return kept_rows(token_ids[:, None] + 1, np.ones(len(token_ids), np.int64), token_ids.astype(np.int64))


def cut(made: TokenSequence, kept: bytes | None = None, temperature: float | None = None) -> TokenSequence:
    prompt, said = made.segments
    told = pack(rows_for(said.token_ids), said.num_tokens) if kept is None else kept
    return replace(made, segments=(prompt, replace(said, kept=told, temperature=temperature)))


@pytest.mark.parametrize(
    ("kept", "temperature", "fault"),
    [
        (b"", None, "the tokens that top_k, top_p and min_p kept are missing"),
        (b"\x00", None, "cannot be unpacked"),
        (pack([left_out_row([2])], 4), None, "token 2 (number 2)"),
        (pack([left_out_row([9])], 3), None, "3 tokens in 1 rows are with 4"),
        (None, 0.0, "temperature is 0.0"),
        (None, float("nan"), "temperature is nan"),
        (None, 0.7, ""),
    ],
)
def test_a_segment_without_the_distribution_that_it_was_drawn_from_is_refused(
    kept: bytes | None, temperature: float | None, fault: str
) -> None:
    if kept == pack([left_out_row([2])], 4):  # of the third token alone, which it then could not be
        kept = pack([left_out_row([9])] * 2 + [left_out_row([2])], 4)
    record = trajectory("g", 0, cut(sequence(), kept, temperature))
    found = fault_of(record, replace(order(), sampling=Sampling(**CUT)))
    assert fault in found and bool(found) == bool(fault)


def test_an_engine_need_not_tell_what_was_kept_of_the_whole_distribution() -> None:
    assert fault_of(trajectory("g", 0, sequence()), order()) == ""
