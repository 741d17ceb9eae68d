"""A version reaches every replica, a part of a large pool at a time, the sources of other replicas first."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.orchestrator.members import AnnounceVersion, Replica
from services.orchestrator.versions import AT_ONCE, NEXT_S
from tests.unit.orchestrator.world import World
from tests.waiting import WAIT_S


async def test_a_large_pool_hears_of_a_version_a_part_at_a_time_and_of_the_newest_only(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        await world.publish(0)
        replicas = [world.join(f"r{number:03d}", slots=1) for number in range(3 * AT_ONCE)]
        await world.publish(1)
        told = [replica for replica in replicas if replica.moving]
        assert len(told) < len(replicas), "not all at one moment"
        world.core.pool.expect(replicas[-1].replica_id, "another life")  # replicas that left hear of no version
        await world.publish(2)
        async with asyncio.timeout(WAIT_S):
            while not all(replica.announced == {"model0": (2, world.clock.now)} for replica in replicas[:-1]):
                await asyncio.sleep(NEXT_S)
        for replica in (replicas[0], replicas[-2]):
            heard = [c.version.number for c in await world.commands(replica) if isinstance(c, AnnounceVersion)]
            assert heard in ([2], [1, 2])
        assert replicas[-1].announced.get("model0", (0, 0.0))[0] < 2
    finally:
        await world.close()


async def test_relays_hear_of_a_version_before_those_that_fetch_from_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        await world.publish(0)
        # Relays are the first by address, here those that joined last.
        replicas = [
            world.join(f"r{number:03d}", slots=1, weights_address=f"h{1000 - number:04d}:1")
            for number in range(2 * AT_ONCE)
        ]
        told: list[str] = []
        tell = world.core.pool.tell

        def noted(replica: Replica, version: AnnounceVersion) -> None:
            told.append(replica.replica_id)
            tell(replica, version)

        world.core.pool.tell = noted  # type: ignore[method-assign]
        await world.publish(1)
        async with asyncio.timeout(WAIT_S):
            while len(told) < len(replicas):
                await asyncio.sleep(NEXT_S)
        plans = {
            r.replica_id: c.plan for r in replicas for c in await world.commands(r) if isinstance(c, AnnounceVersion)
        }
        relays = {name for name, plan in plans.items() if plan is not None and plan.own_shard is not None}
        assert len(relays) > 1 and relays <= {r.replica_id for r in replicas[-AT_ONCE:]}
        assert set(told[: len(relays)]) == relays
    finally:
        await world.close()
