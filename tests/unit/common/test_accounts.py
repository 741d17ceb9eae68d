"""Time accounts: the seconds of all activities sum to lanes x lifetime, and components have one kind each."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.telemetry.accounts import (
    Activity,
    TimeAccount,
)

# --- accounts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


NAMES = st.sampled_from(["working", "waiting for a batch", "waiting for weights"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "close", "enter", "rest", "lane", "leave", "pass"]), NAMES, st.integers(0, 7)),
    max_size=60,
)


@given(num_lanes=st.integers(1, 4), steps=STEPS)
def test_the_seconds_sum_to_lanes_times_lifetime_whatever_the_interleaving(
    num_lanes: int, steps: list[tuple[str, str, int]]
) -> None:
    clock = Clock()
    account = TimeAccount("c", num_lanes=num_lanes, clock=clock)
    lanes, waits = [], []  # type: ignore[var-annotated]
    for what, name, number in steps:
        clock.now += number * 0.25
        if what == "lane":
            lanes.append(ExitStack())
            lanes[-1].enter_context(account.lane(name))
        elif what == "leave" and lanes:
            lanes.pop().close()  # the context variable wants the order in which they came
        elif what == "open":
            lane = account._lanes[number % num_lanes]
            if num_lanes == 1 or lane not in account._free:
                waits.append(ExitStack())
                waits[-1].enter_context(account.during(name, "other", lane=lane))
        elif what == "close" and waits:
            waits.pop(number % len(waits)).close()  # in any order
        elif what == "enter" and num_lanes == 1:
            account.enter(name)
        elif what == "rest":
            account.rest(name)
        state = account.state()
        assert state.seconds == pytest.approx(num_lanes * (clock.now - 100.0))
        assert sum(activity.num_now for activity in state.activities) == num_lanes
        assert all(activity.seconds >= 0 for activity in state.activities)
        if clock.now > 100.0:
            assert sum(state.shares().values()) == pytest.approx(1.0)
    while lanes:
        lanes.pop().close()


def test_the_innermost_activity_counts_alone_and_the_outer_one_goes_on_afterwards() -> None:
    clock = Clock()
    account = TimeAccount("trainer/model0", clock=clock)
    account.enter("training")
    clock.now += 1.0
    with account.during("waiting for other ranks", on="trainer/model0/rank1"):
        clock.now += 3.0
    clock.now += 2.0
    assert account.state().shares() == {
        Activity("training"): 0.5,
        Activity("waiting for other ranks", "trainer/model0/rank1"): 0.5,
        Activity("idle"): 0.0,
    }


def test_a_rollout_that_starts_tasks_is_in_one_activity_at_a_time() -> None:
    clock = Clock()
    account = TimeAccount("replica/a", num_lanes=2, clock=clock)

    async def rollout() -> None:
        async def turn(seconds: float) -> None:
            with account.during("generating", on="engine"):
                clock.now += seconds
                await asyncio.sleep(0)

        with account.lane("playing"):
            await asyncio.gather(turn(1.0), turn(2.0), turn(4.0))

    asyncio.run(rollout())
    state = account.state()
    assert state.seconds == 14.0
    assert state.shares()[Activity("idle")] == 0.5


def test_what_nothing_occupies_is_in_the_rest_and_a_call_without_a_lane_is_nobodys_time() -> None:
    clock = Clock()
    account = TimeAccount("replica/a", num_lanes=3, clock=clock)
    account.rest("nothing issued", on="orchestrator")
    with account.lane("playing"), account.lane("playing"), account.lane("playing"), account.lane("playing") as none:
        assert none is None
        clock.now += 1.0
    account.rest("waiting for weights", on="publisher/model0")
    with account.during("generating"):
        clock.now += 1.0
    assert account.state().shares() == pytest.approx(
        {
            Activity("idle"): 0.0,
            Activity("nothing issued", "orchestrator"): 0.0,
            Activity("playing"): 0.5,
            Activity("waiting for weights", "publisher/model0"): 0.5,
        }
    )
