"""A rollout that takes several training steps, through the real orchestrator: trained with its siblings, or cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from benchmarks._peers import Pulled, Rollouts, ScriptedReplica, ScriptedTrainer
from services.common.pb import pool_pb2
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import WAIT_S, until

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]


class StragglingReplica(ScriptedReplica):
    """The last slot of its first task group ends when the replica holds version 3."""

    straggler: pool_pb2.RunTaskGroup | None = None

    def _take(self, order: pool_pb2.RunTaskGroup) -> None:
        if self.straggler is None:
            self.straggler = pool_pb2.RunTaskGroup()
            self.straggler.CopyFrom(order)
            self._tasks.start(self._end_late(order), "replica.straggler")
            del order.indices[-1]
            self._finish(order, list(order.indices), 0.0)
            self._running[order.task_group_id] = 1
        elif order.task_group_id != self.straggler.task_group_id:
            super()._take(order)

    async def _end_late(self, order: pool_pb2.RunTaskGroup) -> None:
        await until(lambda: self.held["model0"].number >= 3)
        index = len(order.indices)
        if order.task_group_id not in self.cancelled:
            self._finish(order, [index], 0.0)


async def _run(orchestrator: Orchestrator, peers: Peers, num_steps: int) -> tuple[StragglingReplica, dict[int, Pulled]]:
    await orchestrator.start()
    replica = StragglingReplica(orchestrator.address, rollouts=Rollouts(latency_s=0.01))
    trainer = ScriptedTrainer(orchestrator.address, train_s=0.05)
    peers += [replica, trainer]
    replica.start()
    async with asyncio.timeout(60):
        await trainer.run(num_steps)
    return replica, trainer.pulled


@pytest.mark.parametrize("late", ["keep", "drop"])
async def test_a_straggler_does_not_keep_its_siblings_from_training(
    orchestrators: Make, peers: Peers, late: str
) -> None:
    """Defect 3 of the review: a group expired by the oldest token of any of its members."""
    batch = {"size": 16, "max_staleness": 1, "late": late, "dynamic_sampling": False}
    policies = {"model0": {"model": {"path": "none"}, "batch": batch}}
    orchestrator = orchestrators(policies=policies, evaluation__at_start=False, evaluation__at_end=False, run__steps=8)
    replica, pulled = await _run(orchestrator, peers, 8)
    assert replica.straggler is not None
    name = replica.straggler.task_group_id
    found = {
        sequence.sequence_id: (step, sequence.group_size)
        for step, of_step in pulled.items()
        for sequence in of_step.sequences
        if sequence.sequence_id.startswith(f"{name}/")
    }
    whole = [f"{name}/{index}/0" for index in range(4)]
    if late == "keep":
        assert sorted(found) == whole
        assert {size for _, size in found.values()} == {4}
        assert min(step for step, _ in found.values()) >= 4, "it ended on version 3"
        assert not replica.cancelled
    else:
        assert sorted(found) == whole[:3]
        assert {step for step, _ in found.values()} == {2}, "the last step that may train version 0"
        assert replica.cancelled == [name]
        async with asyncio.timeout(WAIT_S):
            await orchestrator.wait()
        assert orchestrator.summary()["counters"]["slots_cancelled"] == 1
