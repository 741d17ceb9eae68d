"""A record that is readable and cannot be applied is set aside alone."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.records import ClosedReason, SetAsideReason, WeightVersion
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import GroupVerdict
from tests.unit.orchestrator.builders import failure, trajectory
from tests.unit.orchestrator.damage import flip, loaded, rows
from tests.unit.orchestrator.recovery.helpers import (
    Make,
    closed,
    set_aside,
    trains_on,
)
from tests.unit.orchestrator.world import World


async def test_what_cannot_be_computed_costs_its_task_group(worlds: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of an earlier release's record that the bounds do not check."""
    world = worlds()
    _, orders = await world.begin()
    name = orders[0].task_group_id
    await world.send(*(trajectory(name, index, reward=float(index)) for index in range(4)))
    real = ExperiencePipeline.resolved

    def overflows(self: ExperiencePipeline, group: TaskGroup, outcome: Outcome) -> list[GroupVerdict]:
        if group.id == name and group.complete:
            raise OverflowError("(34, 'Numerical result out of range')")
        return real(self, group, outcome)

    monkeypatch.setattr(ExperiencePipeline, "resolved", overflows)
    await world.crash()
    assert name not in world.core.groups
    assert (entries.GROUP, name, SetAsideReason.REFUSED) in set_aside(world)
    await world.settle()
    assert closed(world)[name] == ClosedReason.SET_ASIDE
    accounts = world.core.experience.admission.accounts["model0"]
    live = world.core.groups.values()
    assert (accounts.running_slots, accounts.accepted) == (sum(len(group.unresolved) for group in live), 0)
    await world.crash()
    await trains_on(world, 1)


async def test_a_journal_of_which_nothing_can_be_applied_is_refused_with_the_command_to_look_at_it(
    worlds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    await world.begin()
    await world.settle()
    await world.journal.close()
    monkeypatch.setattr("services.orchestrator.recovery.MOST_TRIES", 2)
    monkeypatch.setattr(ExperiencePipeline, "issued", lambda *args: {}["x"])
    with pytest.raises(ConfigError, match=r"rollmill journal .* list --content.*rollmill export"):
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
    _, orders = await world.begin()
    name = orders[0].task_group_id
    record = {**entries.to_json(trajectory(name, 2)), **change}
    world.journal.submit(entries.TRAJECTORY, f"{name}/2", record)
    await world.settle()
    await world.crash()
    assert world.core.groups[name].unresolved == (0, 1, 2, 3)
    assert set_aside(world) == [(entries.TRAJECTORY, f"{name}/2", SetAsideReason.UNREADABLE)]
    await trains_on(world, 1)


@pytest.mark.parametrize(
    ("kind", "key", "record"),
    [
        (entries.VERSION, "model0/1", {"policy": "nobody", "number": 1, "digest": "x", "sources": [], "checkpoint_step": 0, "metrics": [], "compute": []}),
        (entries.VERSION, "model0/0", {"policy": "model0", "number": 0, "digest": "other", "sources": [], "checkpoint_step": 0, "metrics": [], "compute": []}),
        (entries.BATCH, "model0/1", {"policy": "nobody", "training_step": 1, "sequences": [], "minibatches": [], "statistics": []}),
        (entries.EVALUATION_START, "x", {"evaluation_id": "x", "versions": [{"policy": "nobody", "number": 1}]}),
    ],
)  # fmt: skip
async def test_a_record_that_can_be_read_and_not_applied_is_set_aside(
    worlds: Make, kind: str, key: str, record: dict[str, Any]
) -> None:
    world = worlds()
    await world.begin()
    world.journal.submit(kind, key, record)
    await world.settle()
    await world.crash()
    assert (kind, key, SetAsideReason.REFUSED) in set_aside(world)
    await world.crash()
    assert len(world.core.aside) == 1
    assert world.core.ledgers["model0"].versions[0].digest == "d0"


async def test_versions_after_a_gap_are_taken_in_the_order_of_their_numbers(worlds: Make) -> None:
    """Their records are gone without a trace."""
    world = worlds()
    world.steps = 9
    await world.crash()
    await world.publish(0)
    for number in (3, 4):
        version = WeightVersion(policy="model0", number=number, digest=f"d{number}")
        world.journal.submit(
            entries.VERSION, f"model0/{number}", entries.to_json(entries.VersionRecord(version=version))
        )
    await world.settle()
    await world.crash()
    assert world.core.ledgers["model0"].newest_number == 4
    assert world.core.experience.admission.accounts["model0"].version == 4
    await trains_on(world, 5)


# --- without any records of a kind


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
        flip(world.run_dir, kind, rows(world.run_dir, kind)[-1].key, -1, header=True)
    else:
        for path in (world.run_dir / "journal").glob(f"{kind}-*"):
            path.unlink()
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
