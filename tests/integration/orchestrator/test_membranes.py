"""What peers and people see over real gRPC: bad input, run control, locks, reflection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import grpc
import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from services.common.errors import (
    InvalidRequestError,
    LeaseLostError,
    NotFoundError,
    StateError,
    UnknownPolicyError,
    VersionConflictError,
)
from services.common.pb import (
    pool_pb2,
    pool_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    trajectory_pb2,
)
from services.common.rpc.channel import channel, translated_errors
from tests.integration.orchestrator.conftest import Orchestrator

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]
QUIET = {"evaluation__at_start": False, "evaluation__at_end": False}


async def test_bad_records_are_answered_and_counted_and_disturb_nobody(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(**QUIET)
    await orchestrator.start()
    replica = ScriptedReplica(orchestrator.address, rollouts=Rollouts(latency_s=1000.0))
    trainer = ScriptedTrainer(orchestrator.address)
    peers += [replica, trainer]
    replica.start()
    async with asyncio.timeout(30):
        await trainer.join()
        await trainer.publish(0)
        while len(replica.orders) < 8:
            await asyncio.sleep(0.02)
        good = [replica.rollouts.trajectory(replica.orders[0], index, replica.held, 0.0) for index in range(4)]
        good[1].sequences[0].policy = "nobody"
        good[2].sequences[0].segments[1].weight_version = 9
        good[3].sequences[0].segments[1].logprobs = b"\0\0"
        unknown = trajectory_pb2.Trajectory(task_group_id="nothing-1", index=0)
        for trajectory in (*good, unknown):
            replica.put(pool_pb2.StreamTrajectoriesRequest(trajectory=trajectory))
        while len(replica.outcomes) < 5:
            await asyncio.sleep(0.02)
        name = replica.orders[0].task_group_id
        replica.put(pool_pb2.StreamTrajectoriesRequest(trajectory=good[0]))
        while len(replica.outcomes[name, 0]) < 2:
            await asyncio.sleep(0.02)
        progress = await orchestrator.progress()
    assert replica.outcomes[name, 0] == [pool_pb2.RECORD_OUTCOME_ACCEPTED, pool_pb2.RECORD_OUTCOME_DUPLICATE]
    assert replica.outcomes[name, 1] == replica.outcomes[name, 2] == [pool_pb2.RECORD_OUTCOME_INVALID]
    assert replica.outcomes["nothing-1", 0] == [pool_pb2.RECORD_OUTCOME_UNKNOWN]
    assert replica.outcomes[name, 3] == [pool_pb2.RECORD_OUTCOME_INVALID]
    assert progress.counters["records_invalid"] == 3
    refused = {name: n for name, n in progress.counters.items() if name.startswith("refused_")}
    assert refused == {"refused_policy": 1, "refused_version": 1, "refused_unreadable": 1}
    assert progress.counters["failures_invalid_record"] == 3
    assert progress.counters["records_unknown"] == 1
    assert progress.counters["records_duplicate"] == 1


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
        runs, pool = run_pb2_grpc.RunServiceStub(connection), pool_pb2_grpc.PoolServiceStub(connection)
        with pytest.raises(NotFoundError, match="no replica 'x'"), translated_errors("orchestrator"):
            await runs.DrainReplica(run_pb2.DrainReplicaRequest(replica_id="x"), timeout=5)
        with pytest.raises(InvalidRequestError, match="request_id"), translated_errors("orchestrator"):
            await runs.StartEvaluation(run_pb2.StartEvaluationRequest(), timeout=5)
        with pytest.raises(LeaseLostError, match="join again"), translated_errors("orchestrator"):
            await pool.ReportReplica(pool_pb2.ReportReplicaRequest(replica_id="x", incarnation="1"), timeout=5)


async def test_an_evaluation_can_be_asked_for_at_any_time_and_only_once(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(**QUIET)
    await orchestrator.start()
    replica, trainer = ScriptedReplica(orchestrator.address), ScriptedTrainer(orchestrator.address)
    peers += [replica, trainer]
    async with asyncio.timeout(30), channel(orchestrator.address) as connection:
        runs = run_pb2_grpc.RunServiceStub(connection)
        request = run_pb2.StartEvaluationRequest(request_id="one")
        with pytest.raises(StateError, match="no weight version"), translated_errors("orchestrator"):
            await runs.StartEvaluation(request, timeout=5)
        await trainer.join()
        await trainer.publish(0)
        for _ in range(2):
            assert (await runs.StartEvaluation(request, timeout=5)).evaluation_id == "asked-one"
        replica.start()
        progress = await orchestrator.until(lambda now: len(now.evaluations) > 0)
    (result,) = progress.evaluations
    assert (result.name, result.num_trajectories, dict(result.versions)) == ("asked-one/greedy", 5, {"model0": 0})


async def test_pause_resume_drain_and_stop(orchestrators: Make, peers: Peers) -> None:
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
            await runs.PauseRun(run_pb2.PauseRunRequest(), timeout=5)
        await asyncio.sleep(0.3)  # what the trainer holds is still published
        paused = await orchestrator.progress()
        await asyncio.sleep(0.5)
        still = await orchestrator.progress()
        assert paused.state == run_pb2.RUN_STATE_PAUSED
        assert still.policies[0].version == paused.policies[0].version
        assert "dispatcher waits: the run is paused" in still.waits
        await runs.ResumeRun(run_pb2.ResumeRunRequest(), timeout=5)
        await orchestrator.until(lambda now: now.policies[0].version > paused.policies[0].version + 2)
        await runs.DrainReplica(run_pb2.DrainReplicaRequest(replica_id="other"), timeout=5)
        await other.drained.wait()
        await orchestrator.until(lambda now: [r.replica_id for r in now.replicas] == ["a"])
        watching = runs.WatchRun(run_pb2.WatchRunRequest())
        states = [(await watching.read()).progress.state]
        await runs.StopRun(run_pb2.StopRunRequest(reason="test"), timeout=5)
        while (response := await watching.read()) is not grpc.aio.EOF:
            states.append(response.progress.state)
        assert (states[0], states[-1]) == (run_pb2.RUN_STATE_TRAINING, run_pb2.RUN_STATE_STOPPED)
        await trainer.stopped.wait()
        await replica.drained.wait()
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


async def test_rows_that_cannot_be_used_are_logged_and_counted_in_the_status(orchestrators: Make) -> None:
    orchestrator = orchestrators()
    (orchestrator.run_dir / "tasks.jsonl").write_text('{"question": "a"}\n{"question": \n{"text": "b"}\n')
    await orchestrator.start()
    async with channel(orchestrator.address) as connection:
        asked = status_pb2.GetStatusRequest()
        status = await status_pb2_grpc.StatusServiceStub(connection).GetStatus(asked, timeout=10)
    gauges = dict(status.gauges)
    assert (gauges["tasks"], gauges["rows_left_out/data.train"], gauges["rows_left_out/data.evaluation.held_out"]) == (
        1.0, 2.0, 0.0,
    )  # fmt: skip
    told = (orchestrator.run_dir / "stderr.txt").read_text()
    assert "row 2: not valid JSON" in told and "row 3 has no prompt" in told


async def test_a_dataset_without_a_usable_row_ends_the_start_with_the_first_reasons(orchestrators: Make) -> None:
    orchestrator = orchestrators()
    (orchestrator.run_dir / "tasks.jsonl").write_text('{"text": "a"}\n{"question": \n')
    assert await asyncio.to_thread(orchestrator.spawn().wait, 30) == 2
    told = (orchestrator.run_dir / "stderr.txt").read_text()
    assert "tasks.jsonl holds no row that can be used (2 looked at): row 1 has no prompt" in told
    assert "row 2: not valid JSON" in told


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
    await orchestrator.start()
    replica, trainer = ScriptedReplica(orchestrator.address), ScriptedTrainer(orchestrator.address)
    peers += [replica, trainer]
    replica.start()
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
    async with asyncio.timeout(30), channel(orchestrator.address) as connection:
        call = pool_pb2_grpc.PoolServiceStub(connection).JoinGateway(pool_pb2.JoinGatewayRequest(address="127.0.0.1:1"))
        assert (await call.read()).WhichOneof("command") == "welcome"
        orchestrator.process.terminate()
        assert await call.read() == grpc.aio.EOF
        assert await orchestrator.wait() == 0
