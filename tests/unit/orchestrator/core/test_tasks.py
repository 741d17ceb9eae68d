"""Curriculum and curation across restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.orchestrator.groups import TaskGroup
from services.orchestrator.tasks.orders import FilterSolved
from tests.unit.orchestrator.builders import trajectory
from tests.unit.orchestrator.world import World


async def test_curation_passes_over_solved_tasks_also_after_a_restart(worlds: Callable[..., World]) -> None:
    world = worlds(curation="filter_solved", size=40)
    _, (solved, *_) = await world.begin()
    played = TaskGroup(order=solved, position=world.core.groups[solved.task_group_id].position)
    for index in solved.indices:
        played.resolve(trajectory(solved.task_group_id, index, reward=1.0))
    before = world.core.training_orders.streams[""].curation
    assert before is not None
    for _ in range(28):  # and once more below: 1 - 0.9 ** 29 is the first that reaches 0.95
        assert all(before.accepts(row, 0) for row in range(10))
        world.core.observe(played)
    await world.send(*(trajectory(solved.task_group_id, i, reward=1.0) for i in solved.indices))
    [row] = [row for row in range(10) if not before.accepts(row, 0)]
    assert row == world.core.training_orders.row_of(played)
    await world.crash()
    curation = world.core.training_orders.streams[""].curation
    assert curation is not None and [r for r in range(10) if not curation.accepts(r, 0)] == [row]
    drawn = [world.core.training_orders.next_group().order.task.task_id for _ in range(40)]
    assert solved.task.task_id not in drawn and len(set(drawn)) == 9


async def test_what_a_prompt_brought_is_observed_once_by_whichever_process_lives_to_do_it(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(curation="filter_solved", size=40)
    _, (first, second, *_) = await world.begin()
    played = [world.core.training_orders.row_of(world.core.groups[order.task_group_id]) for order in (first, second)]
    await world.play(first)
    with monkeypatch.context() as dying:
        dying.setattr(world.core, "observe", lambda group: None)  # the process dies before this
        await world.play(second)
    observed: list[tuple[int, list[float]]] = []
    observe = FilterSolved.observe

    def noted(self: FilterSolved, row: int, rewards: list[float]) -> None:
        observed.append((row, list(rewards)))
        observe(self, row, rewards)

    monkeypatch.setattr(FilterSolved, "observe", noted)
    for _ in range(2):  # the first recovery observes the second group, and the next one reads of it
        observed.clear()
        await world.crash()
        assert sorted(observed) == sorted((row, [0.0, 1.0, 0.0, 1.0]) for row in played)


MIXTURE = [{"source": "a"}, {"source": "b", "weight": 2, "advantage_scale": 0.5}]


async def test_each_source_goes_on_in_its_own_curriculum_and_share_after_a_restart(
    worlds: Callable[..., World],
) -> None:
    world = worlds(train=MIXTURE, size=12, max_staleness=0)
    _, first = await world.begin()
    assert [order.source for order in first] == ["a", "b", "b"]
    for order in first:
        await world.play(order)
    batch = await world.pull(1)
    assert len(batch.sequences) == 12
    await world.crash()
    assert world.core.experience.mixtures["model0"].trained == {"a": 4, "b": 8}
    await world.publish(1)
    world.train()
    second = await world.orders(world.join(number=1))
    assert [order.source for order in second] == ["a", "b", "b"]
    seeds = [order.seed for order in (*first, *second)]
    assert len(set(seeds)) == 6, "each group of each source has a seed of its own"
    for source, count in {"a": 2, "b": 4}.items():
        tasks = [order.task.task_id for order in (*first, *second) if order.source == source]
        assert len(set(tasks)) == count, "no task of a pass comes twice"


async def test_two_runs_with_one_seed_issue_equal_tasks_and_seeds_also_after_a_kill(
    worlds: Callable[..., World],
) -> None:
    async def issued(mark: str, seed: int) -> list[tuple[object, ...]]:
        world = worlds(run={"seed": seed})
        world.mark = mark
        found = []
        for step in (1, 2, 3):
            if mark == "other" or step == 1:
                await world.crash()
            await world.publish(step - 1)
            world.train()
            for order in await world.orders(world.join(number=step - 1)):
                assert order.task_group_id.startswith(mark)
                found.append((order.task.task_id, order.seed, order.sampling, order.indices))
                await world.play(order, version=step - 1)
            await world.pull(step)
        return found

    one = await issued("one", 7)
    assert one == await issued("other", 7)
    assert len({seed for _, seed, *_ in one}) == len(one) and one != await issued("third", 8)
