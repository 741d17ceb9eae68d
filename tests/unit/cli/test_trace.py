"""The life of a task group from the known facts: any order of events, any lost piece, any clock."""

from __future__ import annotations

import dataclasses
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.cli.inspect.run_model import Assignment, GroupFacts, SequenceFacts, SlotFacts, Used
from services.cli.inspect.trace import (
    add_notes,
    events,
    fit_clocks,
    group_as_json,
    seconds_in,
    show,
    stages,
    status,
)
from services.common.records import RolloutPhase
from services.orchestrator.journal.entries import GroupVerdict

TIMES = st.floats(min_value=1.0, max_value=1e6)
TIME_OR_LOST = st.one_of(st.just(0.0), TIMES)
SECONDS = st.floats(min_value=0.0, max_value=100.0)
NAMES = st.sampled_from(["a", "b", ""])


def phases() -> st.SearchStrategy[tuple[RolloutPhase, ...]]:
    kinds = st.sampled_from(["generate", "step", "judge", "retry", "not_recorded", "a kind of the future"])
    phase = st.builds(RolloutPhase, what=kinds, begin_s=SECONDS, seconds=SECONDS, detail=st.text(max_size=8))
    return st.lists(phase, max_size=4).map(tuple)


def slots(index: int) -> st.SearchStrategy[SlotFacts]:
    sequence = SequenceFacts(
        policy="model0", role="agent", attempt=0, reward=1.0, num_tokens=3, num_trained_tokens=2, versions=(1, 2),
        stop_reason="stop",
    )  # fmt: skip
    times = ("durable_at", "accepted_at", "started_at", "finished_at", "sent_at")
    return st.builds(
        SlotFacts,
        index=st.just(index),
        replica_id=NAMES,
        **dict.fromkeys(times, TIME_OR_LOST),
        num_sends=st.integers(0, 3),
        phases=phases(),
        reward=st.sampled_from([None, 0.0, 1.0]),
        failure=st.sampled_from(["", "TIMEOUT [x]"]),
        sequences=st.just((sequence,)),
    )


def uses() -> st.SearchStrategy[Used]:
    stretches = st.lists(st.tuples(TIMES, SECONDS).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=2)
    return st.builds(
        used,
        training_step=st.integers(1, 5),
        assembled_at=TIME_OR_LOST,
        replayed=st.booleans(),
        pulls=st.lists(st.tuples(st.integers(0, 3), TIMES), max_size=2).map(tuple),
        compute=stretches.map(tuple),
        loss=st.one_of(st.none(), st.just(0.5)),
        published_at=TIME_OR_LOST,
    )


@st.composite
def groups(draw: st.DrawFn) -> GroupFacts:
    """Any pieces of a task group, in any order, with any of them lost."""
    num_slots = draw(st.integers(0, 4))
    known = draw(st.lists(st.sampled_from(range(num_slots)), unique=True)) if num_slots else []
    outcomes = st.sampled_from(["kept", "equal_rewards", "surplus", "expired", "resampled_away"])
    return GroupFacts(
        task_group_id="mark-00000001",
        task_id="[/red] $x",
        purpose=draw(st.sampled_from(["train", "evaluation"])),
        num_slots=num_slots,
        assignments=tuple(draw(st.lists(st.builds(Assignment, at=TIME_OR_LOST, replica_id=NAMES), max_size=3))),
        slots={index: draw(slots(index)) for index in sorted(known)},
        verdicts=verdict(draw(outcomes)) if draw(st.booleans()) else (),
        judged_at=draw(TIME_OR_LOST),
        uses=tuple(draw(st.lists(uses(), max_size=2))),
        closed_at=draw(TIME_OR_LOST),
        closed_reason=draw(st.sampled_from(["", "trained", "expired"])),
        evaluated_at=draw(TIME_OR_LOST),
    )


@given(groups())
def test_whatever_is_known_is_told_in_stages_that_touch_each_other_and_events_in_order_of_time(
    facts: GroupFacts,
) -> None:
    found = stages(facts)
    assert all(stage.seconds >= 0 for stage in found)
    assert all(left.end == right.begin for left, right in pairwise(found))
    times = [event.at for event in events(facts, with_slots=True)]
    assert times == sorted(times) and all(times)
    console = Console(record=True, width=120, file=io.StringIO())
    show(facts, console, with_slots=True)
    assert facts.task_group_id in console.export_text()
    assert orjson.loads(orjson.dumps(group_as_json(facts)))["status"] == status(facts)


@given(st.floats(min_value=-1000.0, max_value=1000.0), st.lists(st.floats(0.0, 5.0), min_size=5, max_size=5))
def test_a_clock_that_is_off_is_moved_so_that_cause_comes_before_effect(off: float, gaps: list[float]) -> None:
    true = [10_000.0]
    for gap in gaps:
        true.append(true[-1] + gap)
    issued, accepted, started, finished, sent, durable = true
    slot = SlotFacts(
        index=0, replica_id="far", durable_at=durable,
        accepted_at=accepted + off, started_at=started + off, finished_at=finished + off, sent_at=sent + off,
    )  # fmt: skip
    facts = GroupFacts(
        task_group_id="g", num_slots=1, assignments=(Assignment(at=issued, replica_id="far"),), slots={0: slot}
    )
    fit_clocks(facts)
    order = [issued, slot.accepted_at, slot.started_at, slot.finished_at, slot.sent_at, durable]
    assert all(right - left > -1e-6 for left, right in pairwise(order))
    assert slot.finished_at - slot.started_at == pytest.approx(finished - started, abs=1e-6)
    assert abs(facts.clocks.get("far", 0.0)) <= abs(off) + 1e-6  # by the least that fits
    if off == 0:
        assert facts.clocks == {}


def test_phases_at_the_same_time_count_once() -> None:
    overlapping = (
        RolloutPhase(what="generate", begin_s=0.0, seconds=2.0),
        RolloutPhase(what="generate", begin_s=1.0, seconds=2.0),
        RolloutPhase(what="step", begin_s=5.0, seconds=1.0),
    )
    slot = SlotFacts(index=0, replica_id="a", durable_at=1.0, phases=overlapping)
    assert seconds_in(slot, "generate") == 3.0
    assert seconds_in(slot, other_than="generate") == 1.0


def known(**changes: Any) -> GroupFacts:
    slot = SlotFacts(index=0, replica_id="a", durable_at=3.0, reward=1.0)
    complete = GroupFacts(
        task_group_id="g", num_slots=1, assignments=(Assignment(at=1.0, replica_id="a"),), slots={0: slot}
    )
    return dataclasses.replace(complete, **changes)


def verdict(outcome: str) -> tuple[GroupVerdict, ...]:
    return (
        GroupVerdict(policy="p", role="r", attempt=0, num_sequences=1, num_kept=0, mean=0.0, std=1.0, outcome=outcome),
    )


def used(**changes: Any) -> Used:
    facts = {"policy": "p", "training_step": 1, "assembled_at": 4.0, "num_sequences": 1, "batch_size": 1}
    return Used(**{**facts, "minibatches": (0,), "staleness_max": 0, **changes})


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (known(slots={}), "running"),
        (known(slots={}, closed_at=2.0, closed_reason="training is over"), "cancelled"),
        (known(slots={0: SlotFacts(index=0, replica_id="a", durable_at=3.0, failure="X")}), "failed"),
        (known(verdicts=verdict("kept")), "waiting for a batch"),
        (known(verdicts=verdict("kept"), closed_at=9.0, closed_reason="expired"), "expired"),
        (known(verdicts=verdict("equal_rewards")), "filtered"),
        (known(verdicts=verdict("equal_rewards"), slots={}, closed_at=9.0), "filtered"),  # its records were collected
        (known(verdicts=verdict("surplus")), "surplus"),
        (known(uses=(used(),)), "in a batch"),
        (known(uses=(used(pulls=((0, 5.0),)),)), "training"),
        (known(uses=(used(published_at=6.0),)), "trained"),
        (known(uses=(used(published_at=6.0), used(policy="q"))), "in a batch"),
        (known(uses=(used(published_at=6.0), used(training_step=2, replayed=True))), "trained"),
        (known(purpose="evaluation"), "evaluated"),
    ],
)
def test_the_status_is_what_became_of_it(facts: GroupFacts, word: str) -> None:
    assert status(facts) == word


def test_notes_come_from_lines_that_concern_the_group_and_torn_lines_do_no_harm(
    tmp_path: Path,
) -> None:
    def at(second: int) -> str:
        return f"1970-01-01T00:00:{second:02d}Z"

    name = "mark-00000001"
    facts = known(task_group_id=name, uses=(used(),), slots={0: SlotFacts(index=0, replica_id="a", durable_at=40.0)})
    lines: list[dict[str, Any]] = [
        {"event": "record.dropped", "task_group": name, "outcome": "duplicate", "index": 0, "timestamp": at(30)},
        {"event": "record.dropped", "task_group": f"{name}1", "outcome": "duplicate", "index": 0, "timestamp": at(30)},
        {"event": "replica.lease_lost", "replica": "a", "timestamp": at(20)},
        {"event": "replica.lease_lost", "replica": "z", "timestamp": at(20)},
        {"event": "replica.replaced", "replica": "a", "timestamp": at(25)},
        {"event": "replica.lease_lost", "replica": "a", "timestamp": at(50)},  # after it was complete
        {"event": "batch.pulled", "policy": "p", "step": 1, "rank": 1, "timestamp": at(45)},
        {"event": "batch.pulled", "policy": "p", "step": 1, "rank": 1, "timestamp": at(46)},  # asked again
        {"event": "batch.pulled", "policy": "p", "step": 2, "rank": 0, "timestamp": at(46)},
        {"event": "rollout.retry", "task_group": name, "index": 0, "timestamp": "no time"},
    ]
    (tmp_path / "logs").mkdir()
    torn = b'{"event": "record.dropped", "task_group": "mark-000'
    (tmp_path / "logs" / "orchestrator.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in lines) + torn)
    add_notes(tmp_path, facts)
    assert [(note.at, note.event) for note in facts.notes] == [
        (0.0, "rollout.retry"),
        (20.0, "replica.lease_lost"),
        (25.0, "replica.replaced"),
        (30.0, "record.dropped"),
    ]
    assert facts.uses[0].pulls == ((1, 45.0),)
