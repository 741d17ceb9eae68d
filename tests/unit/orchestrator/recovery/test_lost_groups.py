"""A damaged record of a task group, a state or an evaluation costs only itself."""

from __future__ import annotations

from services.common.records import ClosedReason, SetAsideReason
from services.orchestrator.groups import RunState
from services.orchestrator.ingest import Answer, RecordOutcome
from services.orchestrator.journal import entries
from tests.unit.orchestrator.builders import trajectory
from tests.unit.orchestrator.damage import loaded
from tests.unit.orchestrator.recovery.helpers import (
    Make,
    closed,
    set_aside,
    spoiled,
    trains_on,
)


async def test_the_slot_of_a_damaged_trajectory_is_open_again(worlds: Make) -> None:
    world = worlds()
    _, (first, *_) = await world.begin()
    await world.play(first)  # complete, judged and waiting in the buffer
    name = first.task_group_id
    await spoiled(world, entries.TRAJECTORY, f"{name}/1")
    assert world.core.groups[name].unresolved == (1,)
    assert set_aside(world) == [(entries.TRAJECTORY, f"{name}/1", SetAsideReason.DAMAGED)]
    assert await world.send(trajectory(name, 1, reward=1.0)) == [RecordOutcome.ACCEPTED]
    assert world.core.experience.buffers["model0"].num_sequences == 4
    assert len(loaded(world.run_dir, entries.VERDICT, name)) == 2  # judged again
    await world.crash()
    assert name not in world.core.groups
    assert world.core.experience.buffers["model0"].num_sequences == 4
    await trains_on(world, 1)


async def test_a_damaged_task_group_is_not_waited_for_and_the_curriculum_goes_on_behind_it(worlds: Make) -> None:
    world = worlds()
    _, orders = await world.begin()
    last = orders[-1]
    await world.send(trajectory(last.task_group_id, 0))
    tasks = {order.task.task_id for order in orders}
    await spoiled(world, entries.GROUP, last.task_group_id)
    assert last.task_group_id not in world.core.groups
    assert sorted(set_aside(world)) == [
        (entries.GROUP, last.task_group_id, SetAsideReason.DAMAGED),
        (entries.TRAJECTORY, f"{last.task_group_id}/0", SetAsideReason.ORPHANED),
    ]
    await world.settle()
    assert closed(world) == {last.task_group_id: ClosedReason.SET_ASIDE}
    replica = world.join(running=[last.task_group_id])
    world.train()
    fresh = [o for o in await world.orders(replica) if o.task_group_id not in {x.task_group_id for x in orders}]
    assert len(fresh) == 1 and fresh[0].task.task_id not in tasks
    assert await world.send(trajectory(last.task_group_id, 1)) == [RecordOutcome.DUPLICATE]
    await world.crash()
    assert last.task_group_id not in world.core.groups and len(world.core.aside) == 2


async def test_the_record_of_a_group_of_a_damaged_assignment_is_taken_before_its_replica_has_joined_again(
    worlds: Make,
) -> None:
    """Streams of records and of orders are opened again in any order, and a refused record is dropped."""
    world = worlds()
    await world.begin()
    world.clock.now += 31.0
    world.core.pool.expire()
    (name,) = [order.task_group_id for order in await world.orders(world.join("other", slots=4))]
    await spoiled(world, entries.ASSIGNMENT, name)
    assert not world.core.pool.has_met(("other", "1")), "no other record says who it was"
    answers: list[Answer] = []
    world.core.ingest.submit(trajectory(name, 0), answers.append, ("other", "1"))
    world.core.ingest.submit(trajectory(name, 1), answers.append, ("other", ""))
    await world.settle()
    assert sorted(answer.outcome for answer in answers) == [RecordOutcome.ACCEPTED, RecordOutcome.REFUSED]


async def test_a_group_of_which_a_part_was_trained_is_not_played_again(worlds: Make) -> None:
    world = worlds(policies=("model0", "model1"))
    _, orders = await world.begin()
    for order in orders:
        await world.play(order)
    batch = await world.pull(1)
    name = batch.record.entries[0].sequence_id.split("/")[0]
    await spoiled(world, entries.TRAJECTORY, f"{name}/2")
    assert name not in world.core.groups
    await world.settle()
    assert closed(world)[name] == ClosedReason.SET_ASIDE
    assert world.core.experience.buffers["model1"].num_sequences == 12
    await world.crash()
    assert name not in world.core.groups


async def test_the_state_before_a_damaged_one_counts(worlds: Make) -> None:
    world = worlds()
    await world.begin()
    world.core.pause()
    await world.settle()
    world.core.counters["records_duplicate"] = 7
    world.core.write_state()
    await spoiled(world, entries.STATE, "", -1)
    assert world.core.control.state is RunState.PAUSED
    assert world.core.counters["records_duplicate"] == 0
    assert world.core.counters["task_groups_issued"] > 0


async def test_a_damaged_start_of_an_evaluation_lets_go_of_its_task_groups(worlds: Make) -> None:
    world = worlds()
    await world.publish(0)
    await world.core.begin_evaluation("mine")
    await world.orders(world.join())
    assert len(world.core.groups) == 3
    await spoiled(world, entries.EVALUATION_START, "mine")
    assert not world.core.groups and not world.core.evaluations.passes
    await world.core.begin_evaluation("mine")
    assert world.core.evaluations.passes


async def test_a_damaged_result_of_an_evaluation_is_computed_again(worlds: Make) -> None:
    world = worlds()
    await world.publish(0)
    await world.core.begin_evaluation("mine")
    for order in await world.orders(world.join()):
        await world.play(order)
    before = dict(world.core.evaluations.results)
    [name] = before
    await spoiled(world, entries.EVALUATION, name)
    assert world.core.evaluations.results == before
    await world.crash()
    assert world.core.evaluations.results == before
