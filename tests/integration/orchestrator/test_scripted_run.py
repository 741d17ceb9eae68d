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


async def test_two_policies_train_at_their_own_pace(orchestrators: Make, peers: Peers) -> None:
    def batch(size: int) -> dict[str, object]:
        ports = {"trainer": {"port": 0}, "weights": {"port": 0}}
        return {"model": {"path": "none"}, "batch": {"size": size, "max_staleness": 2, "late": "drop"}, **ports}

    orchestrator = orchestrators(
        policies={"actor": batch(16), "verifier": batch(8)},
        evaluation__at_start=False,
        evaluation__at_end=False,
        run__steps=4,
    )
    await orchestrator.start()
    replica = ScriptedReplica(orchestrator.address, policies=("actor", "verifier"), rollouts=Rollouts(latency_s=0.01))
    actor = ScriptedTrainer(orchestrator.address, policy="actor", train_s=0.05)
    verifier = ScriptedTrainer(orchestrator.address, policy="verifier")
    peers += [replica, actor, verifier]
    replica.start()
    async with asyncio.timeout(60):
        await asyncio.gather(actor.run(4), verifier.run(4))
        await asyncio.gather(actor.stopped.wait(), verifier.stopped.wait())
        assert await orchestrator.wait() == 0
    summary = orchestrator.summary()
    assert summary["steps"] == {"actor": 4, "verifier": 4}
    assert summary["max_staleness"] <= 2
    for trainer, size in ((actor, 16), (verifier, 8)):
        sequences = [s for pulled in trainer.pulled.values() for s in pulled.sequences]
        assert {s.sequence.policy for s in sequences} == {trainer.policy}
        assert len({s.sequence_id for s in sequences}) == len(sequences) == 4 * size
