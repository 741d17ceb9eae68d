"""Hostile requests to real processes: none crashes, none answers INTERNAL, and healthy calls still get the right answer."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from benchmarks._fuzzing import Line, fuzz  # type: ignore[import-not-found]
from benchmarks._hostile import Hostile, all_rpcs  # type: ignore[import-not-found]
from benchmarks._secure_services import Services  # type: ignore[import-not-found]
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.telemetry.logs import LogEvent
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules import each other by their bare names


STOP = "/rollmill.v1.RunService/StopRun"
SERVED = {
    "orchestrator": ("PoolService", "TrainingService", "RunService", "StatusService"),
    "envgateway": ("EnvironmentService", "CodeExecutionService", "JudgeService", "RewardService", "StatusService"),
    "publisher": ("WeightService", "StatusService"),
    "inference": ("WeightService", "StatusService"),
}
COUNT = 400  # each; the benchmark sends 100,000 in all


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    found = Services(tmp_path)
    try:
        await found.start()
        yield found
    finally:
        found.close()


@pytest.mark.slow
async def test_hostile_requests_are_the_callers_mistake_and_nothing_else(services: Services) -> None:
    for name in SERVED:
        await attack(services, name)
        assert await is_well(services, name)


async def attack(services: Services, name: str) -> None:
    rpcs = [rpc for rpc in all_rpcs() if rpc.path.split("/")[1].rpartition(".")[2] in SERVED[name]]
    assert rpcs
    known = {
        "policy": ["model0"],
        "replica_id": ["r1"],
        "incarnation": ["i1"],
        "environment": ["household_toy", "tool"],
    }
    hostile = Hostile(7, known, most_bytes=300_000, spared=frozenset({STOP}))
    made = 0

    def connect() -> Line:
        nonlocal made
        made += 1
        options = [("grpc.use_local_subchannel_pool", 1), ("number", made)]
        return Line(grpc.aio.insecure_channel(services.addresses[name], options=options))

    outcome = await fuzz(connect, rpcs, hostile, COUNT, seed=7)
    assert outcome.sent >= COUNT
    assert outcome.bugs == []
    assert LogEvent.RPC_FAILED not in services.log(name)
    assert services.processes[name].poll() is None, services.log(name)[-2000:]


async def is_well(services: Services, name: str) -> bool:
    async with grpc.aio.insecure_channel(services.addresses[name]) as connection:
        stub = status_pb2_grpc.StatusServiceStub(connection)
        status = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)
    return (status.service, status.state) == (name, "ready")


def test_the_generator_is_seeded_and_reaches_past_the_parser() -> None:
    rpcs = all_rpcs()
    first, again, other = ([Hostile(seed).request(rpc) for rpc in rpcs] for seed in (1, 1, 2))
    assert first == again != other
    assert len({rpc.path for rpc in rpcs}) == 21
