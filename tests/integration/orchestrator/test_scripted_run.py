"""Whole runs of the real process with scripted peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from tests.integration.orchestrator.conftest import Orchestrator

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]


async def test_a_run_evaluates_trains_evaluates_and_exits(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators()
    await orchestrator.start()
    replica = ScriptedReplica(orchestrator.address, rollouts=Rollouts(latency_s=0.01))
    trainer = ScriptedTrainer(orchestrator.address, train_s=0.02)
    peers += [replica, trainer]
    replica.start()
    async with asyncio.timeout(60):
        await trainer.run(6)
        await trainer.stopped.wait()
        await replica.drained.wait()
        assert await orchestrator.wait() == 0
    summary = orchestrator.summary()
    assert summary["state"] == "finished"
    assert summary["steps"] == {"model0": 6}
    assert summary["evaluations"]["start/greedy"]["versions"] == {"model0": 0}
    assert summary["evaluations"]["end/greedy"]["versions"] == {"model0": 6}
    assert summary["max_staleness"] <= 1
    steps = orchestrator.metrics("training_step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["reward_mean"] == 0.5 and row["num_sequences"] == 16 for row in steps)
    ids = [name for pulled in trainer.pulled.values() for name in pulled.ids]
    assert len(ids) == len(set(ids)) == 96
