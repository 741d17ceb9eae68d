"""Several policies in one run: each with its own quota, versions and speed; no policy waits for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from services.common.errors import DeadlineError
from services.orchestrator.members import Held, Replica
from tests.unit.orchestrator.world import World

AB = ("a", "b")


def swapped(world: World, replica: Replica, **versions: int) -> None:
    """The replica reports these versions."""
    held = {policy: Held(number, f"d{number}") for policy, number in versions.items()}
    world.replica_api.report(replica.replica_id, replica.incarnation, held=held, num_tokens=0, emission=[])


async def test_apart_each_task_group_is_played_by_one_policy_in_fair_shares(worlds: Callable[..., World]) -> None:
    world = worlds(policies=AB, rollout={"policies": "apart"})
    _, orders = await world.begin()
    assert Counter(order.policies for order in orders) == {("a",): 4, ("b",): 4}, "two batches of 8 each"
    assert [order.policies for order in orders[:2]] == [("a",), ("b",)]


async def test_together_the_slowest_policy_sets_the_pace_until_its_trainer_is_lost(
    worlds: Callable[..., World],
) -> None:
    world = worlds(policies=AB, max_staleness=0, late="drop")
    world.trainer_api.join("b", "t", 1, 0)
    replica, orders = await world.begin()
    assert len(orders) == 2
    for order in orders:
        await world.play(order)
    await world.pull(1, "a")
    await world.publish(1, policy="a")
    swapped(world, replica, a=1, b=0)
    assert await world.orders(replica) == [], "b has no room"
    world.lose_trainer("b")
    assert len(await world.orders(replica)) == 2, "a goes on alone"
    world.trainer_api.join("b", "t2", 1, 0)
    assert not world.core.experience.admission.absent


@pytest.mark.parametrize("lockstep", [True, False])
async def test_trainers_share_a_barrier_only_where_the_recipe_asks_for_it(
    worlds: Callable[..., World], lockstep: bool
) -> None:
    world = worlds(policies=AB, run={"lockstep": lockstep}, max_staleness=2)
    _, orders = await world.begin()
    for order in orders:
        await world.play(order)
    await world.pull(1, "a")
    await world.publish(1, policy="a")
    if lockstep:
        with pytest.raises(DeadlineError):
            await world.trainer_api.pull_batch("a", 2, timeout_s=0.05)
        await world.pull(1, "b")
        await world.publish(1, policy="b")
    await world.pull(2, "a")
