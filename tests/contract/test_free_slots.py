"""A replica that comes back smaller than its work, over real gRPC to a real orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.rpc.client import channel
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import WAIT_S, until

MOST = (1 << 31) - 1
NUM_SLOTS = 8


@pytest.fixture
async def orchestrator(tmp_path: Path) -> AsyncIterator[Orchestrator]:
    made = Orchestrator(
        tmp_path / "run",
        policies__model0__batch={"size": 16, "max_staleness": 15, "minibatches": 2},
        evaluation__at_start=False,
        evaluation__at_end=False,
        orchestrator__lease_s=30.0,
    )
    await made.start()
    yield made
    made.close()


class Keeping(ScriptedReplica):
    """Keeps its task groups."""

    def __init__(self, address: str, replica_id: str, num_slots: int = NUM_SLOTS) -> None:
        super().__init__(address, replica_id=replica_id, num_slots=num_slots, rollouts=Rollouts(latency_s=10_000.0))

    def num_given(self) -> int:
        return sum(len(order.indices) for order in self.orders)

    async def until_given(self, number: int) -> None:
        await until(lambda: self.num_given() >= number)


async def test_a_replica_that_comes_back_with_fewer_slots_gets_nothing_until_it_has_played(
    orchestrator: Orchestrator,
) -> None:
    trainer = ScriptedTrainer(orchestrator.address)
    shrunk, honest = Keeping(orchestrator.address, "shrunk"), ScriptedReplica(orchestrator.address, replica_id="honest")
    try:
        await trainer.join()
        await trainer.publish(0)
        shrunk.start()
        await shrunk.until_given(NUM_SLOTS)
        given = {order.task_group_id for order in shrunk.orders}
        await shrunk._tasks.close()
        async with channel(orchestrator.address) as connection:
            again = pool_pb2_grpc.PoolServiceStub(connection).JoinPool(
                pool_pb2.JoinPoolRequest(
                    replica_id=shrunk.replica_id,
                    incarnation=shrunk.incarnation,
                    held_versions=shrunk._held(),
                    num_slots=1,
                    running_task_group_ids=[*given, *(f"never-{number}" for number in range(1000))],
                )
            )
            honest.start()
            async with asyncio.timeout(WAIT_S):
                await trainer.train([1])
            for _ in range(1 + len(given)):  # the welcome, and what it plays already
                response = await again.read()
                assert response.run_task_group.task_group_id in {"", *given}
            progress = await orchestrator.progress()
            found = next(replica for replica in progress.replicas if replica.replica_id == "shrunk")
            assert (found.num_slots, found.num_running) == (1, NUM_SLOTS)
    finally:
        for peer in (honest, trainer):
            await peer.close()
        await shrunk._channel.close()
