"""Any process may die at any moment: the real orchestrator killed with -9, scripted peers, real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
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
    orchestrator = orchestrators(run__steps=40)
    replica, trainer = await orchestrator.start_with(peers, latency_s=0.01, train_s=0.05)
    training = asyncio.ensure_future(trainer.run(34))  # the run cannot end before ``start`` has seen it
    rng = random.Random(5)
    async with asyncio.timeout(120):
        kills = 0
        while kills < 3 and not training.done():  # it may be done on a machine that let this loop wait
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
        await trainer.train(range(35, 41))
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
    assert summary["steps"] == {"model0": 40}
    assert summary["max_staleness"] <= 1


@pytest.mark.slow
async def test_a_recorded_batch_is_served_identically_after_a_kill_and_to_any_number_of_ranks(
    orchestrators: Make, peers: Peers
) -> None:
    orchestrator = orchestrators(evaluation__at_start=False, evaluation__at_end=False)
    _, trainer = await orchestrator.start_with(peers)
    async with asyncio.timeout(60):
        await trainer.join()
        await trainer.publish(0)
        before = [await trainer.pull(1, rank, 2) for rank in range(2)]
        await orchestrator.restart()
        after = [await trainer.pull(1, rank, 2) for rank in range(2)]
        whole = await trainer.pull(1)
    assert whole.header.replayed
    for left, right in zip(before, after, strict=True):
        assert [s.SerializeToString(deterministic=True) for s in left.sequences] == [
            s.SerializeToString(deterministic=True) for s in right.sequences
        ]
    by_place = sorted((s for part in after for s in part.sequences), key=lambda s: (s.minibatch, s.position))
    assert [s.sequence_id for s in by_place] == whole.ids


@pytest.mark.slow
async def test_only_unresolved_indices_are_reissued_when_a_replica_is_lost(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(evaluation__at_start=False, evaluation__at_end=False)
    slow, trainer = await orchestrator.start_with(peers, latency_s=1000.0, replica_id="slow")
    async with asyncio.timeout(60):
        await trainer.join()
        await trainer.publish(0)
        await until(lambda: len(slow.orders) >= 8)
        resolved: dict[str, int] = {}
        for number, order in enumerate(slow.orders):
            resolved[order.task_group_id] = number % 4
            trajectory = slow.rollouts.trajectory(order, number % 4, slow.held, 0.0)
            slow.put(pool_pb2.NumberedRecord(trajectory=trajectory))
        await until(lambda: len(slow.outcomes) >= 8)
        await slow.close()  # it never comes back: its lease runs out
        quick = ScriptedReplica(orchestrator.address, replica_id="quick")
        peers.append(quick)
        quick.start()
        assert len((await trainer.pull(1)).sequences) == 16
    reissued = {order.task_group_id: set(order.indices) for order in quick.orders if order.task_group_id in resolved}
    assert len(reissued) == 8
    for name, index in resolved.items():
        assert reissued[name] == {0, 1, 2, 3} - {index}
    progress = await orchestrator.progress()
    assert progress.counters["replica_leases_lost"] == 1
    assert progress.counters["slots_reissued"] == 24


@pytest.mark.slow
async def test_a_replica_that_reconnects_within_its_lease_goes_on_with_its_work(
    orchestrators: Make, peers: Peers
) -> None:
    orchestrator = orchestrators(evaluation__at_start=False, evaluation__at_end=False, orchestrator__lease_s=20.0)
    replica, trainer = await orchestrator.start_with(peers, latency_s=2.0)
    async with asyncio.timeout(60):
        await trainer.join()
        await trainer.publish(0)
        await until(lambda: len(replica.orders) >= 8)
        await orchestrator.restart()
        assert len((await trainer.pull(1)).sequences) == 16
    progress = await orchestrator.progress()
    assert progress.counters["slots_reissued"] == 0
    assert progress.counters["records_duplicate"] == 0


@pytest.mark.slow
async def test_killed_in_the_first_evaluation_it_ends_with_the_same_denominator(
    orchestrators: Make, peers: Peers
) -> None:
    orchestrator = orchestrators(run__steps=1, evaluation__samples_per_task=3)
    await orchestrator.start()
    replica = ScriptedReplica(
        orchestrator.address,
        num_slots=3,
        rollouts=Rollouts(latency_s=0.3, reward=lambda order, index: 1.0 if index else 0.0),
    )
    trainer = ScriptedTrainer(orchestrator.address)
    peers += [replica, trainer]
    replica.start()
    async with asyncio.timeout(60):
        await trainer.join()
        await trainer.publish(0)
        await until(lambda: len(replica.outcomes) >= 6)
        await orchestrator.restart()
        progress = await orchestrator.until(lambda now: len(now.evaluations) > 0)
    (result,) = progress.evaluations
    assert (result.name, result.num_trajectories, result.num_failed) == ("start/greedy", 15, 0)
    assert result.mean_reward == pytest.approx(10 / 15)
    assert len([o for o in replica.orders if len(o.indices) == 3]) >= 5


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
