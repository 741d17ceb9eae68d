"""The updater: the newest version wins, the engine gets changes only against its own version, and failures are reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.common.errors import (
    CorruptDataError,
    InfrastructureError,
    ModelMismatchError,
    SupersededError,
)
from services.common.records import FetchPlan, WeightVersion
from services.common.weights.snapshot import BaseVersion
from services.inference.engine.base import WeightUpdate
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import Fetched, WeightUpdater
from tests.unit.inference.test_mirror import Version, changed, delta, full, make_version, manifest_of
from tests.waiting import until


class World:
    """Versions 0, 1, 2 …; a fetcher that has them all; an engine that remembers."""

    def __init__(self, count: int = 5) -> None:
        self.versions: list[Version] = [make_version(0)]
        for number in range(1, count):
            self.versions.append(changed(self.versions[-1], number))
        self.mirror = Mirror("p")
        self.mirror.write(self.mirror.verify(*full(self.versions[0], 0)))
        self.updates: list[WeightUpdate] = []
        self.asked: list[tuple[int, int | None, FetchPlan | None]] = []
        self.settlements: list[bool] = []
        self.damage = 0  # so many payloads come with other bytes
        self.fetch_errors: list[Exception] = []
        self.engine_errors: list[Exception] = []
        self.skipped: set[int] = set()  # versions whose delta the source never begins
        self.gate = asyncio.Event()
        self.gate.set()
        self.updater = WeightUpdater(self.mirror, self, self, Mirror.host_arrays)  # type: ignore[arg-type]

    def version(self, number: int) -> WeightVersion:
        digest = manifest_of(self.versions[number], number).digest
        return WeightVersion(policy="p", number=number, digest=digest, sources=("x:1",))

    # as a fetcher
    async def fetch(
        self,
        wanted: WeightVersion,
        base: BaseVersion | None,
        plan: FetchPlan | None,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> Fetched:
        self.asked.append((wanted.number, base.number if base else None, plan))
        await self.gate.wait()
        if wanted.number in self.skipped:
            await until(is_superseded)
            raise SupersededError(f"version {wanted.number} is skipped")
        if self.fetch_errors:
            raise self.fetch_errors.pop(0)
        if base is not None and base.number == wanted.number - 1:
            payload, data = delta(self.versions[base.number], self.versions[wanted.number], wanted.number)
        else:
            payload, data = full(self.versions[wanted.number], wanted.number)
        if self.damage:
            self.damage -= 1
            data = memoryview(bytes(data[:-1]) + b"\xff")
        return Fetched(payload=payload, data=data, transport="grpc", sources=("x:1",))

    def settled(self, fetched: Fetched, *, good: bool) -> None:
        self.settlements.append(good)

    # as an engine
    async def update(self, update: WeightUpdate) -> float:
        if self.engine_errors:
            raise self.engine_errors.pop(0)
        self.updates.append(update)
        return 0.001

    async def until_held(self, number: int) -> None:
        await until(lambda: self.updater.held().number == number)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.updater.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_engine_gets_what_changed_when_it_stands_on_the_base() -> None:
    async with running(World()) as world:
        world.updater.offer(world.version(1))
        await world.until_held(1)
        [update] = world.updates
        assert not update.complete and set(update.changes) == {"a", "c"} and update.dtype == "bfloat16"
        last = world.updater.last
        assert last is not None and (last.encoding, last.base_version, last.version) == ("delta", 0, 1)
        assert last.num_changes == sum(change.num_changes for each in update.changes.values() for change in each)
        assert last.pause_s == 0.001 and last.sources == ("x:1",)


async def test_older_versions_are_skipped_while_one_is_fetched() -> None:
    async with running(World()) as world:
        world.gate.clear()
        world.updater.offer(world.version(1))
        await until(lambda: bool(world.asked))
        for number in (2, 3, 4, 2):
            world.updater.offer(world.version(number))
        world.gate.set()
        await world.until_held(4)
        assert [wanted for wanted, _, _ in world.asked] == [1, 4]


async def test_a_version_that_its_source_skips_is_no_failure() -> None:
    async with running(World()) as world:
        world.skipped = {1}
        world.updater.offer(world.version(1))
        await until(lambda: bool(world.asked))
        world.updater.offer(world.version(2))
        await world.until_held(2)
        assert [(wanted, base) for wanted, base, _ in world.asked] == [(1, 0), (2, 0)], "no forced snapshot"
        assert world.updater.num_failures == 0
        assert [transfer.error for transfer in world.updater.take_transfers()] == [""]


async def test_a_failed_fetch_keeps_the_old_version_is_recorded_and_tried_again() -> None:
    async with running(World()) as world:
        world.fetch_errors = [InfrastructureError("gone"), CorruptDataError("damaged")]
        plan = FetchPlan(relays=("a:1", "b:1"), own_shard=0)
        world.updater.offer(world.version(1), plan)
        await world.until_held(1)
        assert world.asked == [(1, 0, plan), (1, 0, plan), (1, None, None)], (
            "only a damaged delta asks for a snapshot, and without peers"
        )
        failed, damaged, arrived = world.updater.take_transfers()
        assert "gone" in failed.error and "damaged" in damaged.error
        assert (arrived.error, arrived.encoding) == ("", "full")
        assert world.updater.num_failures == 2 and world.updater.take_transfers() == ()


@pytest.mark.parametrize("error", [MemoryError("no room for the payload"), OSError(24, "too many open files")])
async def test_a_machine_that_is_short_of_something_costs_an_attempt_not_the_replica(error: Exception) -> None:
    async with running(World()) as world:
        world.fetch_errors = [error]
        world.updater.offer(world.version(1))
        await world.until_held(1)
        assert world.updater.take_transfers()[0].error.startswith("INFRASTRUCTURE")


async def test_an_engine_that_failed_to_follow_gets_the_whole_mirror_and_nothing_is_fetched_again() -> None:
    async with running(World()) as world:
        world.engine_errors = [ModelMismatchError("not now")]
        world.updater.offer(world.version(1))
        await world.until_held(1)
        assert [wanted for wanted, _, _ in world.asked] == [1]
        [update] = world.updates
        assert update.complete and set(update.whole) == {"a", "b", "c"}


async def test_an_engine_behind_the_mirror_is_never_given_changes_alone() -> None:
    async with running(World()) as world:
        world.engine_errors = [ModelMismatchError("not now")]
        world.updater.offer(world.version(1))
        await until(lambda: world.updater.num_failures == 1)
        world.updater.offer(world.version(2))  # before the engine has version 1
        await world.until_held(2)
        assert world.updates[-1].complete
