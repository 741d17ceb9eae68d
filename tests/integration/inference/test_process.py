"""``python -m services.inference`` as a process: joins, plays, drains, stops, and reports errors."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import RollmillError
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.telemetry.logs import LogEvent
from services.inference import app
from tests.integration.inference.peers import END_S, FakeOrchestrator, end_of, indices_of, scripted_recipe
from tests.unit.inference.fakes import make_order
from tests.waiting import WAIT_S, until


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.inference",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
async def replica(orchestrator: FakeOrchestrator) -> AsyncIterator[asyncio.subprocess.Process]:
    orchestrator.recipe = scripted_recipe()
    process = await start("--orchestrator", orchestrator.address, "--name", "a")
    await until(lambda: orchestrator.reports, "the first report")
    yield process
    if process.returncode is None:
        process.kill()
        await process.communicate()


async def play(orchestrator: FakeOrchestrator, indices: tuple[int, ...]) -> None:
    orchestrator.announce("model0", 0)
    await until(lambda: any(v.number == 0 for v in orchestrator.reports[-1].held_versions), "version 0")
    orchestrator.order(make_order(indices=indices))
    await until(lambda: len(orchestrator.records) >= len(indices), "the records")


async def test_a_replica_is_healthy_plays_and_leaves_when_drained(
    orchestrator: FakeOrchestrator, replica: asyncio.subprocess.Process
) -> None:
    assert replica.stderr is not None
    port = ""
    async with asyncio.timeout(END_S):
        while not port:
            line = (await replica.stderr.readline()).decode()
            if LogEvent.SERVER_LISTENING in line:
                port = line.split("address=")[1].split()[0]
    async with grpc.aio.insecure_channel(port) as connection:
        health = health_pb2_grpc.HealthStub(connection)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        status = await status_pb2_grpc.StatusServiceStub(connection).GetStatus(
            status_pb2.GetStatusRequest(), timeout=WAIT_S
        )
    assert (status.service, status.instance_id, status.run_id, status.state) == ("inference", "a", "run-1", "ready")
    assert status.gauges["free_slots"] == 8
    assert status.labels["engine"] == "scripted"
    await play(orchestrator, (0, 1, 2))
    orchestrator.drain()
    code, output = await end_of(replica)
    assert code == 0, output
    assert sorted(indices_of(orchestrator.slots)) == [0, 1, 2]


AGENT = "tests.integration.inference.test_external_agent:blocking"


async def test_an_agent_plays_through_the_endpoint_of_a_replica(orchestrator: FakeOrchestrator) -> None:
    orchestrator.recipe = scripted_recipe(
        workflow={"name": "external_agent", "settings": {"agent": AGENT}},
        inference={"a": {"engine": "scripted", "port": 0, "endpoint": {"port": 0}}},
    )
    process = await start("--orchestrator", orchestrator.address, "--name", "joins-later")
    await until(lambda: orchestrator.reports, "the first report")
    await play(orchestrator, (0, 1))
    orchestrator.drain()
    code, output = await end_of(process)
    assert code == 0, output
    assert LogEvent.ROLLOUT_FAILED not in output
    assert {record.trajectory.reward for record in orchestrator.records} == {0.5}


async def test_a_signal_ends_what_is_being_played_without_a_record(orchestrator: FakeOrchestrator) -> None:
    orchestrator.recipe = scripted_recipe(
        inference={"a": {"engine": "scripted", "port": 0, "scripted": {"latency_s": 600.0}}}
    )
    process = await start("--orchestrator", orchestrator.address)
    await until(lambda: orchestrator.reports, "the first report")
    orchestrator.announce("model0", 0)
    orchestrator.order(make_order(timeout_s=600.0))
    await until(lambda: orchestrator.reports[-1].running_task_group_ids, "a report of running rollouts")
    process.terminate()
    code, output = await end_of(process)
    assert code == 0, output
    assert "Traceback" not in output
    assert orchestrator.records == []  # its lease runs out, and another replica plays the slots


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workflow": {"name": "tool_use", "settings": {"max_turn": 1}}}, "did you mean 'max_turns'"),
        ({"workflow": {"name": "external_agent", "settings": {"agent": AGENT}}}, "inference.a.endpoint.port is null"),
        ({"inference": {"a": {"engine": "scripted", "port": 0, "host": "0.0.0.0"}}}, "rollmill keys"),
        ({"inference": {"a": {"engine": "scripted", "port": 0, "scripted": {"script": "no:script"}}}}, "no:script"),
        (
            {"inference": {"a": {"port": 0}}, "policies": {"model0": {"model": {"path": "/no/such/model"}}}},
            "/no/such/model: no such directory",
        ),
    ],
    ids=["setting", "no endpoint", "bind", "script", "model"],
)
async def test_a_recipe_that_cannot_be_served_is_refused_with_the_remedy(
    orchestrator: FakeOrchestrator, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "configure", lambda *where: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    orchestrator.recipe = scripted_recipe(**changes)
    with pytest.raises(RollmillError) as caught:
        await app.run_replica(orchestrator=orchestrator.address, name="a", replica_id="a", port=None, num_slots=None)
    assert message in caught.value.message


async def test_help_answers_before_anything_heavy_is_imported() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['services.inference', '--help']\n"
        "try:\n    runpy.run_module('services.inference', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'grpc', 'numpy') if name in sys.modules])\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    code, output = await end_of(process)
    assert code == 0
    assert "--orchestrator" in output
    assert output.splitlines()[-1] == "[]"
