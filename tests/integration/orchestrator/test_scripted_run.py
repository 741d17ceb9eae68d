"""Whole runs of the real process with scripted peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks._peers import ScriptedReplica, ScriptedTrainer
from tests.integration.orchestrator.conftest import Orchestrator

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]


async def test_a_run_evaluates_trains_evaluates_and_exits(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators()
    replica, trainer = await orchestrator.start_with(peers, latency_s=0.01, train_s=0.02)
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
    assert all(row["batch_reward_mean"] == 0.5 and row["num_sequences"] == 16 for row in steps)
    ids = [name for pulled in trainer.pulled.values() for name in pulled.ids]
    assert len(ids) == len(set(ids)) == 96
