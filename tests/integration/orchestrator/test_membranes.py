"""Answers to peers and people over real gRPC: bad input, run control, locks, reflection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import grpc
import pytest

from benchmarks._peers import ScriptedReplica, ScriptedTrainer, report_once
from services.common.errors import (
    InvalidRequestError,
    LeaseLostError,
    UnknownPolicyError,
    VersionConflictError,
)
from services.common.pb import (
    pool_pb2,
    pool_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    trajectory_pb2,
)
from services.common.rpc.client import channel, translated_errors
from services.common.telemetry.logs import LogEvent
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import WAIT_S, until

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]
QUIET = {"evaluation__at_start": False, "evaluation__at_end": False}


async def test_wrong_calls_get_structured_errors(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(**QUIET)
    await orchestrator.start()
    trainer = ScriptedTrainer(orchestrator.address)
    stranger = ScriptedTrainer(orchestrator.address, policy="nobody")
    peers += [trainer, stranger]
    await trainer.join()
    await trainer.publish(0)
    with pytest.raises(VersionConflictError, match="version 0 of model0 has digest"):
        await trainer.publish(0, digest="other")
    with pytest.raises(InvalidRequestError, match="cannot follow"):
        await trainer.publish(5)
    with pytest.raises(UnknownPolicyError, match="it has model0"):
        await stranger.publish(0)
    with translated_errors("orchestrator"), pytest.raises(grpc.aio.AioRpcError):
        await trainer.pull_once(1, rank=2, num_ranks=2)
    async with channel(orchestrator.address) as connection:
        pool = pool_pb2_grpc.PoolServiceStub(connection)
        with pytest.raises(LeaseLostError, match="join again"), translated_errors("orchestrator"):
            await report_once(pool, pool_pb2.StreamReportsRequest(replica_id="x", incarnation="1"), WAIT_S)


async def test_pause_resume_and_stop(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(run__steps=1000, **QUIET)
    await orchestrator.start()
    replica, other = ScriptedReplica(orchestrator.address), ScriptedReplica(orchestrator.address, replica_id="other")
    trainer = ScriptedTrainer(orchestrator.address, train_s=0.01)
    peers += [replica, other, trainer]
    replica.start()
    other.start()
    training = asyncio.ensure_future(trainer.run(1000))
    async with asyncio.timeout(60), channel(orchestrator.address) as connection:
        runs = run_pb2_grpc.RunServiceStub(connection)
        await orchestrator.until(lambda now: now.policies[0].version >= 2)
        for _ in range(2):
            await runs.PauseRun(run_pb2.PauseRunRequest(), timeout=WAIT_S)
        await asyncio.sleep(0.5)
        # A batch that was recorded before the pause, and may be on its way to the trainer, is still trained.
        log = orchestrator.run_dir / "stderr.txt"
        paused = await orchestrator.until(
            lambda now: now.policies[0].version == log.read_text().count(LogEvent.BATCH_PULLED)
        )
        await asyncio.sleep(0.5)
        still = await orchestrator.progress()
        assert paused.state == run_pb2.RUN_STATE_PAUSED
        assert still.policies[0].version == paused.policies[0].version
        assert "dispatcher waits: the run is paused: `rollmill resume` goes on" in still.waits
        await runs.ResumeRun(run_pb2.ResumeRunRequest(), timeout=WAIT_S)
        await orchestrator.until(lambda now: now.policies[0].version > paused.policies[0].version + 2)
        await runs.StopRun(run_pb2.StopRunRequest(reason="test"), timeout=WAIT_S)
        await trainer.stopped.wait()
        await replica.drained.wait()
        await other.drained.wait()
        assert await orchestrator.wait() == 0
    training.cancel()
    assert trainer.commands == ["pause", "resume", "stop"]
    assert orchestrator.summary()["state"] == "stopped"


async def test_a_second_orchestrator_on_the_same_run_directory_is_refused(orchestrators: Make) -> None:
    orchestrator = orchestrators()
    await orchestrator.start()
    second = orchestrator.spawn()
    assert await asyncio.to_thread(second.wait, 30) == 2
    assert "is in use by another orchestrator (pid" in (orchestrator.run_dir / "stderr.txt").read_text()


async def test_a_port_in_use_is_named(orchestrators: Make) -> None:
    first, second = orchestrators(), orchestrators()
    await first.start()
    tree = json.loads((second.run_dir / "recipe.json").read_text())
    tree["orchestrator"]["port"] = first.port
    (second.run_dir / "recipe.json").write_text(json.dumps(tree))
    assert await asyncio.to_thread(second.spawn().wait, 30) == 2
    assert f"127.0.0.1:{first.port}: the port is in use" in (second.run_dir / "stderr.txt").read_text()


async def test_a_gateway_is_told_of_the_end_of_the_run_after_replicas_have_left_and_of_nothing_else(
    orchestrators: Make, peers: Peers
) -> None:
    orchestrator = orchestrators(**QUIET, run__steps=1, envgateway={"node": 1})
    replica, trainer = await orchestrator.start_with(peers)
    async with asyncio.timeout(60), channel(orchestrator.address) as connection:
        stub = pool_pb2_grpc.PoolServiceStub(connection)
        training = asyncio.ensure_future(trainer.run(1))
        waiting = await orchestrator.until(lambda now: any("envgateway.node" in wait for wait in now.waits))
        assert not replica.orders and waiting.counters.get("task_groups_issued", 0) == 0
        call = stub.JoinGateway(pool_pb2.JoinGatewayRequest(address="127.0.0.1:1"))
        words = [word async for word in call]
        await training
    assert [word.WhichOneof("command") for word in words] == ["welcome", "leave"]
    assert words[0].welcome.run_id == "scripted-test" and words[1].leave.reason == "the run has finished"
    assert replica.orders and await orchestrator.wait() == 0


async def test_a_gateway_is_not_told_to_leave_when_only_the_orchestrator_stops(orchestrators: Make) -> None:
    orchestrator = orchestrators(**QUIET, envgateway={})
    await orchestrator.start()
    assert orchestrator.process is not None
    async with asyncio.timeout(WAIT_S), channel(orchestrator.address) as connection:
        call = pool_pb2_grpc.PoolServiceStub(connection).JoinGateway(pool_pb2.JoinGatewayRequest(address="127.0.0.1:1"))
        assert (await call.read()).WhichOneof("command") == "welcome"
        orchestrator.process.terminate()
        assert await call.read() == grpc.aio.EOF
        assert await orchestrator.wait() == 0


async def test_records_of_one_message_are_judged_one_by_one(orchestrators: Make, peers: Peers) -> None:
    """Alone and with others, twice in one message, of no slot; and one that is no record ends the stream after the others'
    acknowledgements."""
    orchestrator = orchestrators(**QUIET)
    replica, trainer = await orchestrator.start_with(peers, latency_s=1000.0)
    async with asyncio.timeout(WAIT_S), channel(orchestrator.address) as connection:
        await trainer.join()
        await trainer.publish(0)
        await until(lambda: len(replica.orders) >= 2)
        order = replica.orders[0]
        good = [replica.rollouts.trajectory(order, index, replica.held, 0.0) for index in range(3)]
        both = pool_pb2.StreamTrajectoriesRequest(
            replica_id=replica.replica_id,
            incarnation=replica.incarnation,
            record_number=1,
            trajectory=good[0],
            records=[
                pool_pb2.NumberedRecord(record_number=2, trajectory=good[1]),
                pool_pb2.NumberedRecord(record_number=3, trajectory=good[1]),
                pool_pb2.NumberedRecord(
                    record_number=4, failure=trajectory_pb2.RolloutFailure(task_group_id="nothing-1", index=0)
                ),
                pool_pb2.NumberedRecord(record_number=5, trajectory=good[2]),
                pool_pb2.NumberedRecord(record_number=6),
                pool_pb2.NumberedRecord(record_number=7, trajectory=good[2]),
            ],
        )
        call = pool_pb2_grpc.PoolServiceStub(connection).StreamTrajectories()
        await call.write(both)
        acks: list[pool_pb2.RecordAck] = []

        async def read_to_the_end() -> None:
            with translated_errors("orchestrator"):
                async for response in call:
                    acks.extend(response.acks)

        with pytest.raises(InvalidRequestError, match="record 6 holds neither"):
            await read_to_the_end()
    accepted, duplicate = pool_pb2.RECORD_OUTCOME_ACCEPTED, pool_pb2.RECORD_OUTCOME_DUPLICATE
    assert sorted((ack.record_number, ack.outcome) for ack in acks) == [
        (1, accepted),
        (2, accepted),
        (3, duplicate),
        (4, pool_pb2.RECORD_OUTCOME_UNKNOWN),
        (5, accepted),
    ]
