"""Any process may die at any moment: the real orchestrator killed with -9, scripted peers, real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._peers import ScriptedReplica, ScriptedTrainer
from services.common.pb import pool_pb2
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import until

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]
Slot = tuple[str, int]


def stored(run_dir: Path) -> dict[Slot, list[str]]:
    """Every intact record of a slot, by kind, in order."""
    reader = JournalReader(run_dir / "journal")
    found: dict[Slot, list[str]] = {}
    try:
        for row in reader.rows():
            if row.kind in (entries.TRAJECTORY, entries.FAILURE):
                record = reader.load(row)
                assert record is not None, f"{row} is not what was written"
                found.setdefault((record["task_group_id"], record["index"]), []).append(row.kind)
    finally:
        reader.close()
    return found


def accepted(replica: ScriptedReplica) -> set[Slot]:
    durable = (pool_pb2.RECORD_OUTCOME_ACCEPTED, pool_pb2.RECORD_OUTCOME_DUPLICATE)
    return {slot for slot, outcomes in replica.outcomes.items() if outcomes[0] in durable}


@pytest.mark.slow
async def test_killed_while_streaming_everything_acknowledged_is_there_and_nothing_twice(
    orchestrators: Make, peers: Peers
) -> None:
    orchestrator = orchestrators(run__steps=24)
    replica, trainer = await orchestrator.start_with(peers, latency_s=0.01, train_s=0.05)
    training = asyncio.ensure_future(trainer.run(18))  # the run cannot end before ``start`` has seen it
    rng = random.Random(5)
    async with asyncio.timeout(120):
        kills = 0
        while kills < 2 and not training.done():  # it may be done on a machine that let this loop wait
            enough = len(replica.outcomes) + 60
            await until(lambda enough=enough: len(replica.outcomes) >= enough or training.done(), every_s=0.005)
            await asyncio.sleep(rng.random() * 0.05)
            if training.done():
                break
            orchestrator.kill()
            kills += 1
            acknowledged = accepted(replica)
            on_disk = stored(orchestrator.run_dir)
            assert acknowledged <= set(on_disk)
            assert all(len(kinds) == 1 for kinds in on_disk.values())
            await orchestrator.start()
        assert kills
        await training
        await trainer.train(range(19, 25))
        await trainer.stopped.wait()
        assert await orchestrator.wait() == 0
    on_disk = stored(orchestrator.run_dir)
    assert accepted(replica) <= set(on_disk)
    assert all(len(kinds) == 1 for kinds in on_disk.values())
    trained = [name for pulled in trainer.pulled.values() for name in pulled.ids]
    assert len(trained) == len(set(trained))
    assert {(name.split("/")[0], int(name.split("/")[1])) for name in trained} <= set(on_disk)
    summary = orchestrator.summary()
    assert summary["state"] == "finished"
    assert summary["steps"] == {"model0": 24}
    assert summary["max_staleness"] <= 1


@pytest.mark.slow
async def test_a_finished_run_that_is_started_again_says_so_and_exits(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(run__steps=1, evaluation__at_start=False, evaluation__at_end=False)
    _, trainer = await orchestrator.start_with(peers)
    async with asyncio.timeout(60):
        await trainer.run(1)
        await trainer.stopped.wait()
        assert await orchestrator.wait() == 0
        before = orchestrator.summary()
        orchestrator.process = orchestrator.spawn()
        assert await orchestrator.wait() == 0
    assert orchestrator.summary() == before
