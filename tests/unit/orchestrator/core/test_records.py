"""Records of rollouts: the first durable one of a slot wins, and every other one gets an answer."""

from __future__ import annotations

from collections.abc import Callable

from services.orchestrator.ingest import RecordOutcome
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World


async def test_first_durable_record_of_a_slot_wins_and_later_ones_are_counted(worlds: Callable[..., World]) -> None:
    world = worlds()
    _, (order, *_) = await world.begin()
    name = order.task_group_id
    first, second = trajectory(name, 0, reward=1.0), trajectory(name, 0, reward=0.0)
    assert await world.send(first, second) == [RecordOutcome.ACCEPTED, RecordOutcome.DUPLICATE]
    assert await world.send(failure(name, 0)) == [RecordOutcome.DUPLICATE]
    assert world.core.groups[name].outcomes[0] is first
    assert world.core.counters["records_duplicate"] == 2
    await world.crash()
    outcome = world.core.groups[name].outcomes[0]
    assert not isinstance(outcome, type(failure()))
    assert outcome.reward == 1.0


async def test_unknown_and_malformed_records_are_answered_and_counted(worlds: Callable[..., World]) -> None:
    world = worlds()
    _, (order, *_) = await world.begin()
    name = order.task_group_id
    assert await world.send(trajectory("abc-99999999", 0), trajectory("other-00000001", 0), trajectory(name, 7)) == [
        RecordOutcome.UNKNOWN,
        RecordOutcome.UNKNOWN,
        RecordOutcome.UNKNOWN,
    ]
    nan = trajectory(name, 2, reward=float("nan"))
    assert (
        await world.send(trajectory(name, 0, sequence(policy="nobody")), trajectory(name, 1, sequence(version=5)), nan)
        == [RecordOutcome.INVALID] * 3
    )
    outcomes = world.core.groups[name].outcomes
    assert [outcomes[i].reason for i in range(3)] == ["INVALID_RECORD"] * 3  # type: ignore[union-attr]
    assert "unknown policy 'nobody'" in outcomes[0].detail  # type: ignore[union-attr]
    assert "version 5 of model0 is from the future: the newest is 0" in outcomes[1].detail  # type: ignore[union-attr]
    assert world.core.counters["records_unknown"] == 3
    assert world.core.counters["records_invalid"] == 3
