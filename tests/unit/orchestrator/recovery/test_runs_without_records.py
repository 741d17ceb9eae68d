"""A run goes on without any records of a kind."""

from __future__ import annotations

import pytest

from services.orchestrator.journal import entries
from tests.unit.orchestrator.builders import failure, trajectory
from tests.unit.orchestrator.damage import flip_header, loaded, remove, rows
from tests.unit.orchestrator.recovery.helpers import (
    Make,
    trains_on,
)
from tests.unit.orchestrator.world import World

EVERY_KIND = [
    *(entries.RUN, entries.GROUP, entries.ASSIGNMENT, entries.TRAJECTORY, entries.FAILURE, entries.VERDICT),
    *(entries.CLOSED, entries.OBSERVATION, entries.BATCH, entries.VERSION, entries.EVALUATION_START),
    *(entries.EVALUATION, entries.STATE),
]


async def lived(world: World) -> None:
    """A history with records of every kind, in the middle of step 3."""
    world.steps = 9
    await world.crash()
    await world.begin()
    await world.core.begin_evaluation("mine")
    for order in await world.orders(world.join()):
        await world.play(order)
    for step in (1, 2):
        await world.step(step)
    assert await world.orders(world.join(number=2))
    world.clock.now += 31.0
    world.core.pool.expire()
    first, *_ = await world.orders(world.join("other", number=2))
    world.journal.submit(entries.RUN, "", {"run_id": "unit", "mark": "abc", "started_at": 0.0})
    await world.send(trajectory(first.task_group_id, 0, version=2), failure(first.task_group_id, 1))
    world.core.write_state()
    await world.settle()
    assert {kind for kind in EVERY_KIND if rows(world.run_dir, kind)} == set(EVERY_KIND)


UNKNOWN = [entries.GROUP, entries.TRAJECTORY, entries.CLOSED, entries.BATCH]


@pytest.mark.parametrize(
    ("kind", "is_there"), [*((kind, False) for kind in EVERY_KIND), *((kind, True) for kind in UNKNOWN)]
)
async def test_the_run_goes_on_without_all_records_of_a_kind_or_with_one_that_does_not_tell_which_it_was(
    worlds: Make, kind: str, is_there: bool
) -> None:
    world = worlds(curation="filter_solved")
    await lived(world)
    names = {row.key for row in rows(world.run_dir, entries.GROUP)}
    seen = {e["sequence_id"] for batch in loaded(world.run_dir, entries.BATCH) for e in batch["sequences"]}
    await world.journal.close()
    if is_there:
        flip_header(world.run_dir, kind, rows(world.run_dir, kind)[-1].key, -1)
    else:
        remove(world.run_dir, kind)
    world.core.metrics.close()
    world.open()
    newest = world.core.ledgers["model0"]
    if kind == entries.VERSION:
        for number in range(newest.newest_number + 1):
            await world.publish(number)
    assert newest.newest_number == (1 if kind == entries.VERSION else 2)
    await trains_on(world, newest.newest_number + 1)
    [batch] = loaded(world.run_dir, entries.BATCH, f"model0/{newest.newest_number}")[-1:]
    if kind != entries.VERSION:
        assert not seen & {entry["sequence_id"] for entry in batch["sequences"]}
    issued = [row.key for row in rows(world.run_dir, entries.GROUP)]
    assert len(set(issued)) == len(issued)
    if kind != entries.GROUP:
        assert names <= set(issued)
    before = len(world.core.aside)
    assert before or not is_there
    await world.crash()
    assert len(world.core.aside) == before
