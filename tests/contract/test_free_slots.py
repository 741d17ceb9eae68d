"""A replica's report of free slots never decides its orders, over real gRPC to a real orchestrator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer, digest_of
from services.common.errors import InvalidRequestError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.rpc.client.channel import channel, translated_errors
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


class Liar(ScriptedReplica):
    """Keeps its task groups, and reports a given number of free slots."""

    def __init__(self, address: str, replica_id: str, num_slots: int = NUM_SLOTS) -> None:
        super().__init__(address, replica_id=replica_id, num_slots=num_slots, rollouts=Rollouts(latency_s=10_000.0))

    def num_given(self) -> int:
        return sum(len(order.indices) for order in self.orders)

    async def say(self, num_free_slots: int, running: tuple[str, ...] = ()) -> None:
        request = pool_pb2.ReportReplicaRequest(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            num_free_slots=num_free_slots,
            held_versions=self._held(),
            running_task_group_ids=running,
            gauges={"free": float("nan"), "slots": float("inf")},
        )
        with translated_errors("orchestrator"):
            await self._stub.ReportReplica(request, timeout=30.0)

    async def until_given(self, number: int) -> None:
        await until(lambda: self.num_given() >= number)


async def test_impossible_numbers_of_free_slots_are_counted_and_overfill_nobody(orchestrator: Orchestrator) -> None:
    """Negative, huge, more than its slots, another one with every report, and none at all though no rollout runs."""
    trainer = ScriptedTrainer(orchestrator.address)
    liar, modest = Liar(orchestrator.address, "liar"), Liar(orchestrator.address, "modest")
    honest = ScriptedReplica(orchestrator.address, replica_id="honest", num_slots=NUM_SLOTS)
    try:
        await trainer.join()
        await trainer.publish(0)
        for number in (0, -1, -MOST - 1, MOST):
            with pytest.raises(InvalidRequestError, match=f"num_slots is {number}"):
                await _join(orchestrator.address, number)
        liar.start()
        modest.start()
        await liar.until_given(NUM_SLOTS)
        impossible = [-1, -MOST - 1, MOST, NUM_SLOTS + 1]
        possible = [NUM_SLOTS, 0, 5, 1]
        for one, other in zip(impossible, possible, strict=True):
            await liar.say(one)
            await liar.say(other)
            await modest.say(0)
        await modest.until_given(NUM_SLOTS)  # says that nothing is free, and is given what its ledger has room for
        honest.start()
        async with asyncio.timeout(WAIT_S):
            await trainer.train([1, 2])  # dispatch goes on, to who plays
        progress = await orchestrator.progress()
        assert progress.counters["impossible_free_slots"] == len(impossible)
        assert (liar.num_given(), modest.num_given()) == (NUM_SLOTS, NUM_SLOTS)
        running = {replica.replica_id: replica.num_running for replica in progress.replicas}
        assert (running["liar"], running["modest"]) == (NUM_SLOTS, NUM_SLOTS)
    finally:
        for peer in (liar, modest, honest, trainer):
            await peer.close()


async def test_a_replica_that_comes_back_with_fewer_slots_gets_nothing_until_it_has_played(
    orchestrator: Orchestrator,
) -> None:
    trainer = ScriptedTrainer(orchestrator.address)
    shrunk, honest = Liar(orchestrator.address, "shrunk"), ScriptedReplica(orchestrator.address, replica_id="honest")
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


async def _join(address: str, num_slots: int) -> None:
    async with channel(address) as connection:
        call = pool_pb2_grpc.PoolServiceStub(connection).JoinPool(
            pool_pb2.JoinPoolRequest(
                replica_id="a",
                incarnation=uuid.uuid4().hex,
                held_versions=[pool_pb2.HeldVersion(policy="model0", number=0, digest=digest_of("model0", 0))],
                num_slots=num_slots,
            )
        )
        with translated_errors("orchestrator"):
            await call.read()
