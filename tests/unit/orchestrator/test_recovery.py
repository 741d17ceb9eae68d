"""What a damaged, unreadable or unusable record costs: itself, by its kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import BatchLostError, ConfigError, CorruptDataError, DeadlineError
from services.common.fates import ClosedReason, SetAsideReason
from services.common.types import TaskGroupOrder, Trajectory, WeightVersion
from services.orchestrator.batches import read_batch
from services.orchestrator.experience import Experience
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import Verdict
from services.orchestrator.run_control import RunState
from tests.unit.orchestrator.builders import failure, sequence, trajectory, with_tokens
from tests.unit.orchestrator.damage import flip, flip_header, loaded, remove, rows
from tests.unit.orchestrator.world import World

Make = Callable[..., World]


async def begun(world: World) -> list[TaskGroupOrder]:
    """Version 0 is published, and a replica has orders."""
    replica = world.join()
    await world.publish(0)
    world.train()
    return await world.orders(replica)


async def stepped(world: World, step: int) -> list[TaskGroupOrder]:
    """One training step: play what is issued, take the batch, publish."""
    orders = await world.orders(world.join(number=step - 1))
    for order in orders:
        await world.play(order, version=step - 1)
    await world.trainer_side.pull_batch("model0", step, 5.0)
    await world.publish(step)
    return orders


async def spoiled(world: World, kind: str, key: str, which: int = 0) -> None:
    """Kill the orchestrator, damage a record, start again."""
    await world.settle()
    await world.journal.close()
    flip(world.run_dir, kind, key, which)
    world.ring.metrics.close()
    world.open()


def set_aside(world: World) -> list[tuple[str, str, SetAsideReason]]:
    return [(noted.kind, noted.key, noted.reason) for noted in world.ring.aside]


def closed(world: World) -> dict[str, str]:
    return {record["task_group_id"]: record["reason"] for record in loaded(world.run_dir, records.CLOSED)}


async def trains_on(world: World, step: int) -> None:
    """The next step is played, assembled and published."""
    world.clock.now += 31.0
    world.ring.pool.expire()  # who played before the restart does not come back
    world.train()
    replica = world.join("fresh", number=step - 1)
    for _ in range(4):
        for order in await world.orders(replica):
            await world.play(order, version=step - 1)
    batch = await world.trainer_side.pull_batch("model0", step, 5.0)
    assert len(batch.record.entries) >= 8
    assert await world.publish(step) == step


async def test_the_slot_of_a_damaged_trajectory_is_open_again(worlds: Make) -> None:
    world = worlds()
    first, *_ = await begun(world)
    await world.play(first)  # complete, judged and waiting in the buffer
    name = first.task_group_id
    await spoiled(world, records.TRAJECTORY, f"{name}/1")
    assert world.ring.groups[name].unresolved == (1,)
    assert set_aside(world) == [(records.TRAJECTORY, f"{name}/1", SetAsideReason.DAMAGED)]
    assert await world.send(trajectory(name, 1, reward=1.0)) == [RecordOutcome.ACCEPTED]
    assert world.ring.experience.buffers["model0"].num_sequences == 4
    assert len(loaded(world.run_dir, records.VERDICT, name)) == 2  # it was judged again
    await world.crash()
    assert name not in world.ring.groups
    assert world.ring.experience.buffers["model0"].num_sequences == 4
    await trains_on(world, 1)


async def test_nothing_is_set_aside_twice_and_a_start_adds_nothing(worlds: Make) -> None:
    world = worlds()
    first, *_ = await begun(world)
    await world.send(trajectory(first.task_group_id, 1))
    await spoiled(world, records.TRAJECTORY, f"{first.task_group_id}/1")
    await world.settle()
    noted = loaded(world.run_dir, records.SET_ASIDE)
    assert len(noted) == 1
    assert {"kind", "key", "segment", "offset", "reason", "number"} <= noted[0].keys()
    for _ in range(3):
        await world.crash()
    await world.settle()
    assert len(loaded(world.run_dir, records.SET_ASIDE)) == 1
    assert len(world.ring.aside) == 1


async def test_a_damaged_task_group_is_not_waited_for_and_the_curriculum_goes_on_behind_it(worlds: Make) -> None:
    world = worlds()
    orders = await begun(world)
    last = orders[-1]
    await world.send(trajectory(last.task_group_id, 0))
    tasks = {order.task.task_id for order in orders}
    await spoiled(world, records.GROUP, last.task_group_id)
    assert last.task_group_id not in world.ring.groups
    assert sorted(set_aside(world)) == [
        (records.GROUP, last.task_group_id, SetAsideReason.DAMAGED),
        (records.TRAJECTORY, f"{last.task_group_id}/0", SetAsideReason.ORPHANED),
    ]
    await world.settle()
    assert closed(world) == {last.task_group_id: ClosedReason.SET_ASIDE}
    replica = world.join(running=[last.task_group_id])
    world.train()
    fresh = [o for o in await world.orders(replica) if o.task_group_id not in {x.task_group_id for x in orders}]
    assert len(fresh) == 1 and fresh[0].task.task_id not in tasks
    assert await world.send(trajectory(last.task_group_id, 1)) == [RecordOutcome.DUPLICATE]
    await world.crash()
    assert last.task_group_id not in world.ring.groups and len(world.ring.aside) == 2


async def test_the_group_of_a_damaged_assignment_is_issued_again(worlds: Make) -> None:
    world = worlds()
    orders = await begun(world)
    world.clock.now += 31.0
    world.ring.pool.expire()
    other = world.join("other")
    name = (await world.orders(other))[0].task_group_id
    await spoiled(world, records.ASSIGNMENT, name)
    assert world.ring.pool.owner(name) is None and len(world.ring.groups) == len(orders)
    world.train()
    assert name in {order.task_group_id for order in await world.orders(world.join("other", running=[name]))}


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_damaged_record_of_a_superseded_version_stops_nothing(worlds: Make, lost: int) -> None:
    world = worlds()
    world.steps = 6
    await world.crash()
    await begun(world)
    for step in (1, 2, 3):
        await stepped(world, step)
    await spoiled(world, records.VERSION, f"model0/{lost}")
    ledger = world.ring.ledgers["model0"]
    assert ledger.newest_number == 3 and ledger.get(lost) is None and not ledger.lacks_newest
    assert world.ring.batches["model0"].newest_version == 3
    assert set_aside(world) == [(records.VERSION, f"model0/{lost}", SetAsideReason.DAMAGED)]
    await trains_on(world, 4)


async def test_the_trainer_offers_a_newest_version_again_whose_record_is_damaged(worlds: Make) -> None:
    world = worlds()
    world.steps = 6
    await world.crash()
    await begun(world)
    await stepped(world, 1)
    await stepped(world, 2)
    await world.journal.close()
    flip(world.run_dir, records.VERSION, "model0/1")
    flip(world.run_dir, records.VERSION, "model0/2")
    world.ring.metrics.close()
    world.open()
    ledger = world.ring.ledgers["model0"]
    assert ledger.newest_number == 2 and ledger.lacks_newest and ledger.newest is None
    assert world.ring.batches["model0"].newest_version == 2
    replica = world.join(number=2)
    world.train()
    assert await world.orders(replica) == []  # it is not known what version 2 is
    assert await world.publish(2) == 2
    assert not ledger.lacks_newest
    assert len(await world.orders(replica)) > 0
    await trains_on(world, 3)


async def test_a_damaged_batch_that_was_trained_is_not_trained_again(worlds: Make) -> None:
    world = worlds()
    world.steps = 4
    await world.crash()
    await begun(world)
    seen: list[str] = []
    for step in (1, 2):
        await stepped(world, step)
        seen += [e["sequence_id"] for e in loaded(world.run_dir, records.BATCH, f"model0/{step}")[0]["sequences"]]
    await spoiled(world, records.BATCH, "model0/2")
    assert world.ring.batches["model0"].newest_step == 2
    await trains_on(world, 3)
    again = [e["sequence_id"] for e in loaded(world.run_dir, records.BATCH, "model0/3")[0]["sequences"]]
    assert not set(again) & set(seen)


async def test_a_damaged_batch_that_was_not_trained_is_put_together_again_of_other_sequences(worlds: Make) -> None:
    world = worlds()
    for order in await begun(world):
        await world.play(order)
    first = {entry.sequence_id for entry in (await world.trainer_side.pull_batch("model0", 1, 5.0)).record.entries}
    await spoiled(world, records.BATCH, "model0/1")
    assert world.ring.batches["model0"].newest_step == 0
    with pytest.raises(DeadlineError):
        await world.trainer_side.pull_batch("model0", 1, 0.05)
    await trains_on(world, 1)
    found = loaded(world.run_dir, records.BATCH, "model0/1")
    assert len(found) == 1 and not first & {entry["sequence_id"] for entry in found[0]["sequences"]}
    world.ring.batches["model0"]._recent.clear()
    again = await world.trainer_side.pull_batch("model0", 1, 5.0)  # the record that can be read
    assert {entry.sequence_id for entry in again.record.entries} == {e["sequence_id"] for e in found[0]["sequences"]}


async def test_a_recorded_batch_is_served_without_what_of_it_is_lost(worlds: Make) -> None:
    world = worlds(minibatches=2)
    for order in await begun(world):
        await world.play(order)
    whole = await world.trainer_side.pull_batch("model0", 1, 5.0)
    lost = whole.record.entries[0].sequence_id
    await spoiled(world, records.TRAJECTORY, lost.rpartition("/")[0])
    left = await world.trainer_side.pull_batch("model0", 1, 5.0)
    share = left.share(0, 1)
    assert {s.sequence_id for s in share.sequences} == {e.sequence_id for e in whole.record.entries} - {lost}
    assert sum(totals.num_sequences for totals in share.minibatches) == 7
    assert sum(totals.num_trained_tokens for totals in share.minibatches) == 7 * 4
    assert world.ring.counters["sequences_lost"] == 1
    reader = JournalReader(world.run_dir / "journal")
    with pytest.raises(CorruptDataError, match="lacks trajectories"):
        read_batch(reader, "model0", 1)  # `millrace replay` compares digests: it wants all of it
    reader.close()


async def test_a_batch_of_which_nothing_is_left_is_named_as_lost(worlds: Make) -> None:
    world = worlds()
    for order in await begun(world):
        await world.play(order)
    await world.trainer_side.pull_batch("model0", 1, 5.0)
    await world.publish(1)
    await world.crash()
    for path in (world.run_dir / "journal").glob("trajectories-*"):
        path.unlink()
    with pytest.raises(BatchLostError, match="no trajectory of the batch of step 1 of model0 can be used"):
        await world.trainer_side.pull_batch("model0", 1, 5.0)


async def test_a_part_that_is_not_in_the_damaged_batch_for_sure_is_not_trained(worlds: Make) -> None:
    """A group of two policies waits for one of them while the other's batch, which may have had it, is lost."""
    world = worlds(policies=("model0", "model1"))
    for order in await begun_with_two(world):
        await world.play(order)
    await world.trainer_side.pull_batch("model0", 1, 5.0)
    await spoiled(world, records.BATCH, "model0/1")
    assert world.ring.experience.buffers["model0"].num_sequences == 0
    assert world.ring.experience.buffers["model1"].num_sequences == 16
    assert world.ring.counters["sequences_set_aside"] == 16


async def begun_with_two(world: World) -> list[TaskGroupOrder]:
    replica = world.join()
    for policy in ("model0", "model1"):
        await world.publish(0, policy=policy)
    world.train()
    return await world.orders(replica)


async def test_a_group_of_which_a_part_was_trained_is_not_played_again(worlds: Make) -> None:
    world = worlds(policies=("model0", "model1"))
    orders = await begun_with_two(world)
    for order in orders:
        await world.play(order)
    batch = await world.trainer_side.pull_batch("model0", 1, 5.0)
    name = batch.record.entries[0].sequence_id.split("/")[0]
    await spoiled(world, records.TRAJECTORY, f"{name}/2")
    assert name not in world.ring.groups
    await world.settle()
    assert closed(world)[name] == ClosedReason.SET_ASIDE
    assert world.ring.experience.buffers["model1"].num_sequences == 12
    await world.crash()
    assert name not in world.ring.groups


@pytest.mark.parametrize("kind", [records.VERDICT, records.CLOSED, records.STATE, records.OBSERVATION, records.RUN])
async def test_a_damaged_record_of_another_kind_stops_nothing(worlds: Make, kind: str) -> None:
    world = worlds(curation="filter_solved")
    await begun(world)
    await stepped(world, 1)
    world.ring.write_state()
    await world.settle()
    mark, started = world.ring.names._mark, world.ring.started_at
    if kind == records.RUN:
        world.ring.journal.submit(records.RUN, "", lambda: {"run_id": "unit", "mark": "abc", "started_at": 0.0})
        await world.settle()
    key = rows(world.run_dir, kind)[-1].key
    await spoiled(world, kind, key, -1)
    assert (world.ring.names._mark, world.ring.started_at) == (mark, started)
    await trains_on(world, 2)


async def test_the_state_before_a_damaged_one_counts(worlds: Make) -> None:
    world = worlds()
    await begun(world)
    world.ring.pause()
    await world.settle()
    world.ring.counters["records_duplicate"] = 7
    world.ring.write_state()
    await spoiled(world, records.STATE, "", -1)
    assert world.ring.control.state is RunState.PAUSED
    assert world.ring.counters["records_duplicate"] == 0
    assert world.ring.counters["task_groups_issued"] > 0


async def test_a_damaged_start_of_an_evaluation_lets_go_of_its_task_groups(worlds: Make) -> None:
    world = worlds()
    await world.publish(0)
    await world.ring.begin_evaluation("mine")
    await world.orders(world.join())
    assert len(world.ring.groups) == 3
    await spoiled(world, records.EVALUATION_START, "mine")
    assert not world.ring.groups and not world.ring.evaluations.running
    await world.ring.begin_evaluation("mine")
    assert world.ring.evaluations.running


async def test_a_damaged_result_of_an_evaluation_is_computed_again(worlds: Make) -> None:
    world = worlds()
    await world.publish(0)
    await world.ring.begin_evaluation("mine")
    for order in await world.orders(world.join()):
        await world.play(order)
    before = dict(world.ring.evaluations.results)
    [name] = before
    await spoiled(world, records.EVALUATION, name)
    assert world.ring.evaluations.results == before
    await world.crash()
    assert world.ring.evaluations.results == before


ABSURD = {
    "a huge reward": trajectory("g", 3, reward=1e300),
    "the largest reward": trajectory("g", 3, reward=-sys.float_info.max),
    "a token id beyond the vocabulary": trajectory("g", 3, with_tokens(sequence(), [5, 700])),
    "a negative token id": trajectory("g", 3, with_tokens(sequence(), [-1])),
    "a log-probability of 3e38": trajectory("g", 3, with_tokens(sequence(), [1], logprob=3e38)),
    "no sequence": Trajectory(task_group_id="g", index=3, sequences=(), reward=0.0),
    "attempt -9": trajectory("g", 3, sequence(attempt=-9)),
    "a policy of nobody": trajectory("g", 3, sequence(policy="nobody")),
}


@pytest.mark.parametrize("name", ABSURD)
async def test_what_an_earlier_release_took_in_and_nobody_can_train_is_set_aside(worlds: Make, name: str) -> None:
    world = worlds()
    world.vocab_sizes = {"model0": 500}
    await world.crash()
    orders = await begun(world)
    group = orders[0].task_group_id
    await world.send(*(trajectory(group, index, reward=float(index)) for index in range(3)))
    absurd = replace(ABSURD[name], task_group_id=group)
    world.ring.journal.submit(records.TRAJECTORY, f"{group}/3", lambda: rollouts.trajectory_to_json(absurd))
    await world.settle()
    await world.crash()
    assert set_aside(world) == [(records.TRAJECTORY, f"{group}/3", SetAsideReason.REFUSED)]
    assert world.ring.groups[group].unresolved == (3,)
    await world.crash()
    assert len(loaded(world.run_dir, records.SET_ASIDE)) == len(world.ring.aside) == 1
    await trains_on(world, 1)


async def test_a_recorded_batch_is_served_without_what_its_trainer_cannot_read(worlds: Make) -> None:
    """The vocabulary is known when the trainer joins, and the batch was recorded before."""
    world = worlds()
    orders = await begun(world)
    for order in orders[1:]:
        await world.play(order)
    name = orders[0].task_group_id
    beyond = trajectory(name, 0, with_tokens(sequence(1.0), [5, 700]), reward=1.0)
    await world.send(beyond, *(trajectory(name, index) for index in (1, 2, 3)))
    world.trainer_side.join("model0", "t", 1, 0, {}, vocab_size=500)
    for _ in range(2):
        batch = None
        for step in (1, 2):
            batch = await world.trainer_side.pull_batch("model0", step, 5.0)
            ids = {entry.sequence_id for entry in batch.record.entries}
            if any(i.startswith(name) for i in ids):
                break
            await world.publish(step)
        assert batch is not None and f"{name}/0/0" not in ids and len(ids) == 7
        assert sum(totals.num_sequences for totals in batch.share(0, 1).minibatches) == 7
        assert world.ring.counters["sequences_lost"] == 1
        world.ring.batches["model0"]._recent.clear()
        world.ring.counters.clear()


async def test_what_cannot_be_computed_costs_its_task_group(worlds: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a record of an earlier release may hold that bounds do not see."""
    world = worlds()
    orders = await begun(world)
    name = orders[0].task_group_id
    await world.send(*(trajectory(name, index, reward=float(index)) for index in range(4)))
    real = Experience.resolved

    def overflows(self: Experience, group: TaskGroup, outcome: Outcome) -> list[Verdict]:
        if group.id == name and group.complete:
            raise OverflowError("(34, 'Numerical result out of range')")
        return real(self, group, outcome)

    monkeypatch.setattr(Experience, "resolved", overflows)
    await world.crash()
    assert name not in world.ring.groups
    assert (records.GROUP, name, SetAsideReason.REFUSED) in set_aside(world)
    await world.settle()
    assert closed(world)[name] == ClosedReason.SET_ASIDE
    accounts = world.ring.experience.admission.accounts["model0"]
    live = world.ring.groups.values()
    assert (accounts.running_slots, accounts.accepted) == (sum(len(group.unresolved) for group in live), 0)
    await world.crash()
    await trains_on(world, 1)


async def test_a_journal_of_which_nothing_can_be_applied_is_refused_with_the_command_to_look_at_it(
    worlds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    await begun(world)
    await world.settle()
    await world.journal.close()
    monkeypatch.setattr("services.orchestrator.recovery.MOST_TRIES", 2)
    monkeypatch.setattr(Experience, "issued", lambda *args: {}["x"])
    with pytest.raises(ConfigError, match=r"millrace journal .* repair"):
        world.open()


@pytest.mark.parametrize(
    "change",
    [
        {"index": 9},
        {"task_group_id": "abc-00000099"},
        {"sequences": 3},
        {"reward": "much"},
        {"metrics": None},
    ],
)
async def test_a_trajectory_that_says_nothing_sensible_is_unreadable(worlds: Make, change: dict[str, Any]) -> None:
    world = worlds()
    orders = await begun(world)
    name = orders[0].task_group_id
    record = {**rollouts.trajectory_to_json(trajectory(name, 2)), **change}
    world.ring.journal.submit(records.TRAJECTORY, f"{name}/2", lambda: record)
    await world.settle()
    await world.crash()
    assert world.ring.groups[name].unresolved == (0, 1, 2, 3)
    assert set_aside(world) == [(records.TRAJECTORY, f"{name}/2", SetAsideReason.UNREADABLE)]
    await trains_on(world, 1)


@pytest.mark.parametrize(
    ("kind", "key", "record"),
    [
        (records.VERSION, "model0/1", {"policy": "nobody", "number": 1, "digest": "x", "sources": [], "checkpoint_step": 0, "metrics": []}),
        (records.VERSION, "model0/0", {"policy": "model0", "number": 0, "digest": "other", "sources": [], "checkpoint_step": 0, "metrics": []}),
        (records.BATCH, "model0/1", {"policy": "nobody", "training_step": 1, "sequences": [], "minibatches": [], "statistics": []}),
        (records.EVALUATION_START, "x", {"evaluation_id": "x", "versions": [{"policy": "nobody", "number": 1}]}),
    ],
)  # fmt: skip
async def test_a_record_that_can_be_read_and_not_applied_is_set_aside(
    worlds: Make, kind: str, key: str, record: dict[str, Any]
) -> None:
    world = worlds()
    await begun(world)
    world.ring.journal.submit(kind, key, lambda: record)
    await world.settle()
    await world.crash()
    assert (kind, key, SetAsideReason.REFUSED) in set_aside(world)
    await world.crash()
    assert len(world.ring.aside) == 1
    assert world.ring.ledgers["model0"].knows(0, "d0")


async def test_versions_after_a_gap_are_taken_in_the_order_of_their_numbers(worlds: Make) -> None:
    """Their records are gone without a trace."""
    world = worlds()
    world.steps = 9
    await world.crash()
    await world.publish(0)
    for number in (3, 4):
        version = WeightVersion(policy="model0", number=number, digest=f"d{number}")
        world.ring.journal.submit(
            records.VERSION, f"model0/{number}", lambda version=version: records.version_to_json(version, 0, {})
        )
    await world.settle()
    await world.crash()
    assert world.ring.ledgers["model0"].newest_number == 4
    assert world.ring.experience.admission.accounts["model0"].version == 4
    await trains_on(world, 5)


EVERY_KIND = [
    *(records.RUN, records.GROUP, records.ASSIGNMENT, records.TRAJECTORY, records.FAILURE, records.VERDICT),
    *(records.CLOSED, records.OBSERVATION, records.BATCH, records.VERSION, records.EVALUATION_START),
    *(records.EVALUATION, records.STATE),
]


async def lived(world: World) -> None:
    """A history with records of every kind, in the middle of step 3."""
    world.steps = 9
    await world.crash()
    await begun(world)
    await world.ring.begin_evaluation("mine")
    for order in await world.orders(world.join()):
        await world.play(order)
    for step in (1, 2):
        await stepped(world, step)
    assert await world.orders(world.join(number=2))
    world.clock.now += 31.0
    world.ring.pool.expire()
    first, *_ = await world.orders(world.join("other", number=2))
    world.journal.submit(records.RUN, "", lambda: {"run_id": "unit", "mark": "abc", "started_at": 0.0})
    await world.send(trajectory(first.task_group_id, 0, version=2), failure(first.task_group_id, 1))
    world.ring.write_state()
    await world.settle()
    assert {kind for kind in EVERY_KIND if rows(world.run_dir, kind)} == set(EVERY_KIND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "with_index"), [*((kind, True) for kind in EVERY_KIND), (records.BATCH, False), (records.CLOSED, False)]
)
async def test_the_run_goes_on_without_all_records_of_a_kind(worlds: Make, kind: str, with_index: bool) -> None:
    world = worlds(curation="filter_solved")
    await lived(world)
    names = {row.key for row in rows(world.run_dir, records.GROUP)}
    seen = {e["sequence_id"] for batch in loaded(world.run_dir, records.BATCH) for e in batch["sequences"]}
    await world.journal.close()
    remove(world.run_dir, kind, with_index=with_index)
    world.ring.metrics.close()
    world.open()
    newest = world.ring.ledgers["model0"]
    if kind == records.VERSION:
        for number in range(newest.newest_number + 1):
            await world.publish(number)
    assert newest.newest_number == (1 if kind == records.VERSION else 2)
    await trains_on(world, newest.newest_number + 1)
    [batch] = loaded(world.run_dir, records.BATCH, f"model0/{newest.newest_number}")[-1:]
    if kind != records.VERSION:
        assert not seen & {entry["sequence_id"] for entry in batch["sequences"]}
    issued = [row.key for row in rows(world.run_dir, records.GROUP)]
    assert len(set(issued)) == len(issued)
    if kind != records.GROUP:
        assert names <= set(issued)
    before = len(world.ring.aside)
    await world.crash()
    assert len(world.ring.aside) == before


@pytest.mark.parametrize("kind", [records.GROUP, records.TRAJECTORY, records.CLOSED, records.BATCH, records.VERSION])
async def test_the_run_goes_on_when_a_record_does_not_even_tell_which_it_was(worlds: Make, kind: str) -> None:
    world = worlds(curation="filter_solved")
    await lived(world)
    seen = {e["sequence_id"] for batch in loaded(world.run_dir, records.BATCH) for e in batch["sequences"]}
    await world.journal.close()
    flip_header(world.run_dir, kind, rows(world.run_dir, kind)[-1].key, -1)
    world.ring.metrics.close()
    world.open()
    if world.ring.ledgers["model0"].lacks_newest or kind == records.VERSION:
        await world.publish(2)
    await trains_on(world, 3)
    batches = {
        row.key: batch
        for row, batch in zip(rows(world.run_dir, records.BATCH), loaded(world.run_dir, records.BATCH), strict=True)
    }
    assert not seen & {entry["sequence_id"] for entry in batches["model0/3"]["sequences"]}
    assert sum(world.ring.aside.counts().values()) >= 1
    before = len(world.ring.aside)
    await world.crash()
    assert len(world.ring.aside) == before
