"""Replay: the drawable groups, their marks in a batch record, and unchanged draws after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common.config.training import BatchConfig, ReplayConfig
from services.common.records import RankBatch
from services.orchestrator.buffer.buffer import AdvantageGroup, ReplayStore
from services.orchestrator.journal.journal import collect
from tests.unit.orchestrator.builders import advantage_groups, complete_group
from tests.unit.orchestrator.world import World


def made(name: str, version: int, size: int = 2) -> AdvantageGroup:
    return advantage_groups(complete_group(name, [float(i) for i in range(size)], version))[0]


def names(groups: list[AdvantageGroup]) -> list[str]:
    return [group.task_group_id for group in groups]


@given(
    lags=st.lists(st.lists(st.integers(1, 4), max_size=6), max_size=12),
    capacity=st.integers(1, 20),
    max_staleness=st.integers(1, 5),
    wanted=st.integers(0, 20),
)
def test_nothing_is_drawn_twice_in_a_batch_or_beyond_its_bound_and_the_store_stays_within_its_capacity(
    lags: list[list[int]], capacity: int, max_staleness: int, wanted: int
) -> None:
    store = ReplayStore("p", ReplayConfig(ratio=0.5, capacity=capacity, max_staleness=max_staleness), seed=1)
    trained: list[str] = []
    for step, of_step in enumerate(lags, start=1):
        groups = [made(f"{step}.{i}", max(0, step - lag), size=1 + i % 3) for i, lag in enumerate(of_step)]
        store.trained(groups, step)
        trained += names(groups)
        drawn = store.draw(step + 1, wanted)
        assert len(names(drawn)) == len(set(names(drawn))) and set(names(drawn)) <= set(trained)
        assert all(step - (group.min_version or 0) <= max_staleness for group in drawn)
        assert sum(group.size for group in store.groups) <= capacity
        have = sum(group.size for group in drawn)
        assert have >= wanted or len(drawn) == len(store.groups)
        assert sum(group.size for group in drawn[:-1]) < max(wanted, 1), "no group more than was wanted"
        assert names(store.draw(step + 1, wanted)) == names(drawn), "decided by step and contents"


def test_the_oldest_arrivals_leave_first_and_a_group_without_trained_tokens_never_comes() -> None:
    store = ReplayStore("p", ReplayConfig(ratio=0.5, capacity=4, max_staleness=8), seed=1)
    empty = made("empty", 0)
    unread = (replace(m, sequence=replace(m.sequence, segments=m.sequence.segments[:1])) for m in empty.members)
    empty = replace(empty, members=tuple(unread))
    assert empty.min_version is None
    store.trained([made("a", 0), made("b", 0), empty, made("c", 0)], 1)
    assert names(list(store.groups)) == ["b", "c"]


def test_what_is_replayed_follows_the_seed_of_the_run() -> None:
    def drawn(seed: int, step: int = 2) -> list[str]:
        store = ReplayStore("p", ReplayConfig(ratio=0.5, capacity=100, max_staleness=8), seed)
        store.trained([made(str(number), 0) for number in range(12)], 1)
        return names(store.draw(step, 6))

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed)) for seed in range(20)}) > 10
    assert drawn(1, step=2) != drawn(1, step=3)


def test_more_minibatches_than_fresh_sequences_are_refused() -> None:
    with pytest.raises(ValidationError, match="4 fresh sequences"):
        BatchConfig(size=8, minibatches=5, replay=ReplayConfig(ratio=0.5))


Make = Callable[..., World]


def stored(world: World) -> list[tuple[str, float, float, list[tuple[str, float]]]]:
    groups = world.core.experience.replay["model0"].groups
    return [(g.task_group_id, g.mean, g.std, [(m.sequence_id, m.sequence.reward) for m in g.members]) for g in groups]


HALF = {"ratio": 0.5, "capacity": 100, "max_staleness": 2}


async def test_fresh_sequences_are_trained_once_and_replayed_ones_are_marked_and_young(worlds: Make) -> None:
    world = worlds(run={"steps": 6}, replay=HALF, minibatches=2)
    await world.publish(0)
    world.train()
    fresh: list[str] = []
    for number in range(1, 7):
        entries = (await world.step(number)).record.entries
        again = [entry for entry in entries if entry.replayed]
        assert {entry.sequence_id for entry in again} <= set(fresh)
        assert all(entry.staleness <= 2 for entry in again)
        fresh += [entry.sequence_id for entry in entries if not entry.replayed]
        assert len({entry.sequence_id for entry in entries}) == len(entries)
        assert len(again) == (0 if number == 1 else 4)
        assert len(entries) - len(again) == 4
    assert len(fresh) == len(set(fresh)) == 24
    assert world.core.counters["sequences_replayed"] == 20
    assert world.core.experience.admission.accounts["model0"].accepted == 0, "replayed sequences hold no quota"


async def test_a_batch_tells_replayed_and_fresh_staleness_apart(worlds: Make) -> None:
    world = worlds(run={"steps": 6}, replay={**HALF, "max_staleness": 5}, max_staleness=0)
    await world.publish(0)
    world.train()
    for number in range(1, 5):
        statistics = (await world.step(number)).record.statistics
    assert (statistics["staleness_max"], statistics["num_replayed"], statistics["num_sequences"]) == (0.0, 4.0, 8.0)
    assert 1.0 <= statistics["replayed_staleness_max"] <= 4.0


def ids(share: RankBatch) -> list[tuple[str, float, float, int]]:
    return [(s.sequence_id, s.group_mean, s.sequence.reward, s.staleness) for s in share.sequences]


@pytest.mark.parametrize("group_by", ["attempt", "policy"])
async def test_a_restart_at_any_moment_gives_the_same_batches_and_the_same_store(worlds: Make, group_by: str) -> None:
    """One world dies between all steps, the other never."""
    penalty = {"max_tokens": 4, "buffer_tokens": 2}
    settings: dict[str, Any] = {"replay": {**HALF, "capacity": 8}, "group_by": group_by, "overlong_penalty": penalty}
    steady, mortal = worlds(run={"steps": 6}, **settings), worlds(run={"steps": 6}, **settings)
    for world in (steady, mortal):
        await world.publish(0)
        world.train()
    for number in range(1, 6):
        expected = await steady.step(number)
        replica = mortal.join(number=number - 1)
        for order in await mortal.orders(replica):
            await mortal.play(order, version=number - 1)
        found = await mortal.pull(number)
        await mortal.crash()  # the batch is recorded, its version not published
        again = await mortal.pull(number)
        assert ids(again.share(0, 1)) == ids(found.share(0, 1)) == ids(expected.share(0, 1))
        assert again.record == found.record
        await mortal.publish(number)
        assert stored(mortal) == stored(steady)
        await mortal.crash()
        assert stored(mortal) == stored(steady)
        mortal.train()
        accounts = [world.core.experience.admission.accounts["model0"].accepted for world in (steady, mortal)]
        assert accounts[0] == accounts[1]


async def test_trajectories_that_may_be_replayed_are_not_collected(worlds: Make) -> None:
    world = worlds(run={"steps": 6}, replay=HALF)
    world.segment_bytes = 1  # a record a segment
    await world.crash()
    await world.publish(0)
    world.train()
    for number in (1, 2, 3):
        await world.step(number)
    live = world.core.experience.buffered_groups()
    assert collect(world.journal, {"model0": 3}, live | set(world.core.groups)), "some are too old to be drawn again"
    fourth = await world.step(4)
    assert any(entry.replayed for entry in fourth.record.entries)
    await world.crash()
    assert (await world.pull(4)).record == fourth.record
