"""Worlds that die and start again with damaged journals."""

from __future__ import annotations

from collections.abc import Callable

from services.common.records import SetAsideReason
from services.orchestrator.journal import entries
from tests.unit.orchestrator.damage import flip, loaded
from tests.unit.orchestrator.world import World

Make = Callable[..., World]


async def spoiled(world: World, kind: str, key: str, which: int = 0) -> None:
    """Kill the orchestrator, damage a record, start again."""
    await world.settle()
    await world.journal.close()
    flip(world.run_dir, kind, key, which)
    world.core.metrics.close()
    world.open()


def set_aside(world: World) -> list[tuple[str, str, SetAsideReason]]:
    return [(noted.kind, noted.key, noted.reason) for noted in world.core.aside]


def closed(world: World) -> dict[str, str]:
    return {record["task_group_id"]: record["reason"] for record in loaded(world.run_dir, entries.CLOSED)}


async def trains_on(world: World, step: int) -> None:
    """The next step is played, assembled and published."""
    world.clock.now += 31.0
    world.core.pool.expire()  # the replicas of before the restart do not come back
    world.train()
    replica = world.join("fresh", number=step - 1)
    for _ in range(4):
        for order in await world.orders(replica):
            await world.play(order, version=step - 1)
    batch = await world.pull(step)
    assert len(batch.record.entries) >= 8
    assert await world.publish(step) == step
