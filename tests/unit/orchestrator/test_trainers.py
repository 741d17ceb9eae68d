"""Trainers: the checkpoints that they keep, and turns on a shared device, one holder at a time, through crashes of any member."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from services.common.checkpoints import CheckpointGauge
from services.common.errors import DeadlineError
from services.common.records import DeviceTurn, TaskGroupOrder
from services.orchestrator.members import TrainerLeases
from services.orchestrator.progress import progress
from services.orchestrator.turns import REPLICAS
from tests.unit.orchestrator.world import World

# --- kept checkpoints


def test_batches_after_the_oldest_kept_checkpoint_are_kept() -> None:
    trainers = TrainerLeases(["p"], lease_s=30.0, clock=lambda: 0.0)
    trainer = trainers.join("p", "a", 1)
    for newest, step, kept, noted in ((6, 6, (6, 4), (6, 4)), (8, 8, (6, 8), (8, 6)), (8, 9, (9, -1, 8), (8, 8))):
        trainer.note_checkpoints(newest, step, kept)
        assert (trainer.checkpoint_step, trainer.oldest_checkpoint_step) == noted
    assert trainers.join("p", "b", 1).oldest_checkpoint_step == 0, "it went back to the initial model"


async def test_damaged_and_failed_checkpoints_are_among_the_counters_of_the_run(worlds: Callable[..., World]) -> None:
    world = worlds()
    assert not {gauge.value for gauge in CheckpointGauge} & progress(world.core).counters.keys()
    world.core.trainers.join("model0", "t", 1).gauges = {CheckpointGauge.DAMAGED: 2.0, CheckpointGauge.FAILED: 0.0}
    assert progress(world.core).counters[CheckpointGauge.DAMAGED] == 2
    assert CheckpointGauge.FAILED not in progress(world.core).counters


# --- turns


class Shared:
    """A world whose members carry out turns when they are told to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.replicas: dict[str, Any] = {}
        self.trainers: dict[str, Any] = {}
        self.orders: list[TaskGroupOrder] = []

    @property
    def holder(self) -> str | None:
        return self.world.core.turns.holder

    def join_trainer(self, policy: str = "model0", incarnation: str = "t") -> None:
        self.trainers[policy] = self.world.trainer_api.join(policy, incarnation, 1, 0)

    def join_replica(self, name: str = "a", incarnation: str = "1", number: int = 0) -> None:
        self.replicas[name] = self.world.join(name, number=number, incarnation=incarnation)

    async def carry_out(self, *members: Any) -> list[bool]:
        """These members, or all, report the turns that they have been sent; returns whose turns those were."""
        found = []
        for member in members or (*self.replicas.values(), *self.trainers.values()):
            turn = await self.told(member)
            if turn is not None:
                found.append(turn.yours)
                member.device_turn = turn.number
        self.world.core.turns.settle()
        return found

    async def told(self, member: Any) -> DeviceTurn | None:
        """The newest turn in the mailbox of a member."""
        turns = [c for c in await self.world.commands(member) if isinstance(c, DeviceTurn)]
        return turns[-1] if turns else None

    async def asks(self, step: int = 1, policy: str = "model0") -> bool:
        """Whether a trainer that asks for a batch gets it at once."""
        try:
            await self.world.trainer_api.pull_batch(policy, step, 0.05)
        except DeadlineError:
            return False
        return True

    async def fill_buffer(self, version: int = 0) -> None:
        """Play until a batch is ready, and no further."""
        ready = self.world.core.experience.buffers["model0"]
        while not ready.ready:
            for replica in self.replicas.values():
                self.orders += await self.world.orders(replica)
            assert self.orders, self.world.core.dispatcher.waits_for
            await self.world.play(self.orders.pop(0), version)

    async def begin(self, policies: Iterable[str] = ("model0",)) -> None:
        """All have joined, models are loaded, and the trainers wait for their first batches."""
        for policy in policies:
            self.join_trainer(policy)
        self.join_replica()
        for policy in policies:
            await self.carry_out()
            assert self.holder == policy
            assert not await self.asks(policy=policy)
        await self.carry_out()
        assert self.holder == REPLICAS


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    world = World(tmp_path, placement="shared")
    yield Shared(world)
    await world.close()


async def test_a_ready_batch_gives_the_device_to_the_trainer_and_an_empty_buffer_back(shared: Shared) -> None:
    await shared.begin()
    await shared.world.publish(0)
    shared.world.train()
    assert not await shared.asks(), "no batch"
    assert shared.holder == REPLICAS
    await shared.fill_buffer()
    assert not await shared.asks(), "the replicas hold the device"
    assert shared.holder is None
    await shared.carry_out(shared.trainers["model0"])
    assert shared.holder is None, "the replica has not freed it"
    await shared.carry_out()
    assert shared.holder == "model0"
    assert await shared.asks()
    await shared.world.publish(1)
    assert shared.holder == "model0", "it computes until it asks again"
    assert not await shared.asks(2)
    await shared.carry_out()
    assert shared.holder == REPLICAS


async def test_nobody_gets_the_device_before_all_members_are_there(shared: Shared) -> None:
    """After a restart of the orchestrator any of them may hold it."""
    shared.join_replica()
    await shared.carry_out()
    assert shared.holder is None
    shared.join_trainer()
    await shared.carry_out()
    assert shared.holder == "model0", "it loads its model first"


async def test_a_member_that_never_joins_is_waited_for_one_lease(shared: Shared) -> None:
    shared.join_replica()
    await shared.carry_out()
    shared.world.clock.now += shared.world.core.trainers.lease_s - 1
    shared.replicas["a"].lease_until = shared.world.clock.now + 100
    shared.world.core.check_leases()
    assert shared.holder is None
    shared.world.clock.now += 2
    shared.world.core.check_leases()
    assert shared.holder == REPLICAS


@pytest.mark.parametrize("dies", ["trainer", "replica"])
async def test_the_lease_of_a_dead_holder_ends_its_turn(shared: Shared, dies: str) -> None:
    await shared.begin()
    await shared.world.publish(0)
    shared.world.train()
    await shared.fill_buffer()
    await shared.asks()
    if dies == "trainer":
        await shared.carry_out()
        assert await shared.asks()
        shared.trainers.pop("model0").lease_until = 0.0
    else:
        await shared.carry_out(shared.trainers["model0"])
        shared.replicas.pop("a").lease_until = 0.0
    shared.world.core.check_leases()
    await shared.carry_out()
    assert shared.holder == (REPLICAS if dies == "trainer" else "model0")


async def test_a_trainer_that_is_started_again_gets_a_turn_to_load_its_model(shared: Shared) -> None:
    await shared.begin()
    shared.join_trainer(incarnation="second")
    assert shared.holder is None
    await shared.carry_out()
    assert shared.holder == "model0"


async def test_a_broken_stream_is_told_the_turn_again(shared: Shared) -> None:
    await shared.begin()
    await shared.carry_out()
    shared.join_replica()  # the same incarnation
    turn = await shared.told(shared.replicas["a"])
    assert turn == DeviceTurn(shared.replicas["a"].device_turn, yours=True)
    shared.join_trainer()
    assert shared.holder == REPLICAS, "a trainer that had its model keeps waiting"


async def test_trainers_of_two_policies_take_turns(tmp_path: Path) -> None:
    world = World(tmp_path, policies=("a", "b"), placement="shared")
    shared = Shared(world)
    await shared.begin(("a", "b"))
    for policy in ("a", "b"):
        assert not await shared.asks(policy=policy)
    world.core.turns.trainers_need_it()
    await shared.carry_out()
    assert shared.holder == "a", "for a checkpoint"
    assert not await shared.asks(policy="a")
    await shared.carry_out()
    assert shared.holder == "b"
    world.core.turns.trainer_finished("b")
    world.core.turns.settle()
    await shared.carry_out()
    assert shared.holder == REPLICAS
    await world.close()


async def test_the_time_of_another_turn_does_not_count_against_a_task_group(shared: Shared) -> None:
    await shared.begin()
    await shared.world.publish(0)
    shared.world.train()
    await shared.fill_buffer()
    replica = shared.replicas["a"]
    began = {name: assignment.since for name, assignment in replica.assignments.items()}
    assert began
    await shared.asks()
    await shared.carry_out()
    shared.world.clock.now += 500.0
    replica.lease_until = shared.trainers["model0"].lease_until = shared.world.clock.now + 100
    assert await shared.asks()
    assert not await shared.asks(2)
    await shared.carry_out()
    assert shared.holder == REPLICAS
    assert all(replica.assignments[name].since == since + 500.0 for name, since in began.items())
