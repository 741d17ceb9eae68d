"""The timing in a rollout's record: phases, retries, a bound; empty when turned off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.errors import InfrastructureError
from services.inference.rollouts import MAX_PHASES, RolloutClock
from tests.unit.inference.fakes import make_order, played
from tests.unit.inference.test_rollout import make_player, raises


async def test_a_trajectory_says_what_its_rollout_did_and_when() -> None:
    player, records, _, _ = await make_player()
    await played(player, make_order(indices=(0,)))
    (trajectory,) = records.trajectories
    timing = trajectory.timing
    assert 0 < timing.accepted_at <= trajectory.started_at
    (generated,) = [phase for phase in timing.phases if phase.what == "generate"]
    assert generated.num_tokens == trajectory.sequences[0].num_trained_tokens > 0
    assert (generated.policy, generated.first_version, generated.last_version) == ("model0", 0, 0)
    assert generated.end_s <= trajectory.finished_at - trajectory.started_at + 1e-3


async def test_a_failure_says_it_too_with_every_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.inference.rollouts._RETRY_BASE_S", 0.001)
    player, records, _, _ = await make_player(raises(InfrastructureError("down")))
    await played(player, make_order(indices=(0,)))
    (failure,) = records.failures
    assert failure.timing.num_retries == 2
    assert [(phase.what, phase.detail) for phase in failure.timing.phases] == [("retry", "INFRASTRUCTURE")] * 2
    assert 0 < failure.started_at <= failure.finished_at


async def test_a_rollout_that_waits_for_a_slot_shows_how_long() -> None:
    async def slowly(context: Any) -> None:
        await asyncio.sleep(0.05)

    player, records, _, _ = await make_player(slowly, num_slots=1)
    await played(player, make_order(indices=(0, 1)))
    first, second = sorted(records.trajectories, key=lambda trajectory: trajectory.started_at)
    assert second.started_at - second.timing.accepted_at >= first.finished_at - first.started_at > 0.04


def test_a_long_rollout_is_bounded_and_says_how_much_is_left_out() -> None:
    clock = RolloutClock()
    for _ in range(MAX_PHASES + 7):
        with clock.phase("step") as phase:
            phase.detail = "x" * 1000
    phases = clock.timing().phases
    assert len(phases) == MAX_PHASES + 1
    assert (phases[-1].what, phases[-1].detail) == ("not_recorded", "7 more phases")
    assert max(len(phase.detail) for phase in phases) <= 120
