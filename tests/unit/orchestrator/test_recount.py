"""A kill loses no count that records restore."""

from __future__ import annotations

from collections.abc import Callable

from services.common import records
from tests.unit.orchestrator.builders import failure, trajectory
from tests.unit.orchestrator.world import World

TOLD = ("task_groups_issued", "tokens_recorded", "slots_cancelled", "failures_infrastructure")


async def test_what_was_recorded_behind_the_newest_state_is_counted_again_once(worlds: Callable[..., World]) -> None:
    world = worlds()
    _, (first, second, *_) = await world.begin()
    await world.send(trajectory(first.task_group_id, 0))
    world.core.write_state()
    await world.send(trajectory(first.task_group_id, 1))
    await world.send(failure(second.task_group_id, 0))
    await world.send(failure(second.task_group_id, 1, records.TOO_OLD))
    before = {name: world.core.counters[name] for name in TOLD}
    assert all(before.values()), before
    for _ in range(2):
        await world.crash()
        assert {name: world.core.counters[name] for name in TOLD} == before
