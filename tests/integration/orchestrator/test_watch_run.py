"""``WatchRun``: complete for dashboards, and bounded for slow readers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from services.common.pb import run_pb2, run_pb2_grpc
from services.common.rpc.server import Server
from services.common.wire import timestamp_to_proto
from services.orchestrator.rpc import servicer_run
from services.orchestrator.rpc.servicer_run import RunServicer
from tests.integration.orchestrator.test_scripted_run import Make, Peers
from tests.waiting import until

WAIT = "somebody waits " + "x" * 50_000


async def test_a_watcher_that_does_not_read_costs_a_window_and_then_hears_what_is_true(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[float] = []

    def progress(core: Any) -> run_pb2.RunProgress:
        made.append(time.time())
        at = timestamp_to_proto(made[-1])
        return run_pb2.RunProgress(at=at, state=run_pb2.RUN_STATE_TRAINING, waits=[WAIT])

    monkeypatch.setattr(servicer_run, "WATCH_EVERY_S", 0.0005)
    monkeypatch.setattr(servicer_run, "progress", progress)
    unused = cast(Any, SimpleNamespace(model_dump=lambda mode: {}))
    core = cast(Any, SimpleNamespace(run_id="unit", run_dir=tmp_path, recipe=unused))
    servicer = RunServicer(core)
    server = Server(service="orchestrator", instance_id="o", host="127.0.0.1", port=0)
    server.add(run_pb2_grpc.add_RunServiceServicer_to_server, servicer, "rollmill.v1.RunService")
    server.on_stop(servicer.closing.set)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as connection:
            call = run_pb2_grpc.RunServiceStub(connection).WatchRun(run_pb2.WatchRunRequest())
            await call.read()
            while True:  # until no more are made
                before = len(made)
                await asyncio.sleep(0.3)
                if len(made) == before:
                    break
                assert len(made) * len(WAIT) < 32 << 20, "states pile up for a watcher that does not read"
            stopped_at, held = made[-1], len(made)
            for _ in range(held + 1):  # what was on its way, and then the truth
                last = await call.read()
            assert last.progress.at.ToMicroseconds() / 1e6 > stopped_at
            call.cancel()
    finally:
        await server.stop(grace_s=1.0)


async def test_a_watcher_sees_states_waits_versions_replicas_and_the_end(orchestrators: Make, peers: Peers) -> None:
    orchestrator = orchestrators(run__steps=3, evaluation__at_start=False, evaluation__at_end=False)
    await orchestrator.start()
    seen: list[run_pb2.RunProgress] = []

    async def watch() -> None:
        async with grpc.aio.insecure_channel(orchestrator.address) as connection:
            async for response in run_pb2_grpc.RunServiceStub(connection).WatchRun(run_pb2.WatchRunRequest()):
                seen.append(response.progress)

    async with asyncio.timeout(60):
        watching = asyncio.create_task(watch())
        await until(lambda: seen)
        replica = ScriptedReplica(orchestrator.address, rollouts=Rollouts(latency_s=0.3))
        trainer = ScriptedTrainer(orchestrator.address, train_s=0.3)
        peers += [replica, trainer]
        replica.start()
        await trainer.run(3)
        await watching
    assert seen[0].state == run_pb2.RUN_STATE_STARTING and any("no trainer" in wait for wait in seen[0].waits)
    assert seen[-1].state == run_pb2.RUN_STATE_FINISHED and seen[-1].policies[0].version == 3
    assert any(now.replicas and now.replicas[0].num_slots for now in seen)
    training = [now for now in seen if now.state == run_pb2.RUN_STATE_TRAINING]
    assert training and all(now.started_at == seen[0].started_at for now in seen)
    assert any(now.policies[0].quota >= 16 for now in training)
    assert [now.at.ToMicroseconds() for now in seen] == sorted(now.at.ToMicroseconds() for now in seen)
