"""Redis, the gateways' side, and workers with a runner of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from extras.farm.queue import Keys, RedisQueue, connect
from extras.farm.tests.processes import World
from extras.farm.tests.redis_server import RedisServer
from extras.farm.worker import Worker
from services.common.config.envgateway import QueueConfig
from services.common.telemetry.metrics import Lane
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue import Job, JobResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult
from tests import needs


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    needs.check("redis-server")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def world(redis_server: RedisServer, tmp_path: Path) -> Iterator[World]:
    started = World(tmp_path, redis_server.uri)
    yield started
    started.close()


class Programs:
    """A runner: ``sleep N`` takes time, ``hang`` until ``release``, other programs answer their text; counts running ones."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []
        self.ended: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, job: Job, lane: Lane, wait_s: float | None) -> JobResult:
        self.started.append(job.code)
        words = job.code.split()
        try:
            if words[0] == "sleep":
                await asyncio.sleep(float(words[1]))
            elif words[0] == "hang":
                await self.release.wait()
        except asyncio.CancelledError:
            self.killed.append(job.code)
            raise
        self.ended.append(job.code)
        if words[0] == "broken":
            return ExecutionResult(status=RunStatus.INFRA_ERROR, detail="the machine broke")
        if isinstance(job, JudgeRequest):
            return JudgeResult(verdict=RunStatus.OK, detail=job.code)
        return ExecutionResult(status=RunStatus.OK, stdout=job.code.encode())


class Farm:
    """A Redis, one gateway's queue and as many workers as a test wants, all in this process."""

    def __init__(self, server: RedisServer, lease_s: float = 1.5) -> None:
        self.server = server
        self.lease_s = lease_s
        self.queue = RedisQueue(QueueConfig(), server.uri)
        self.programs = Programs()
        self.workers: list[Worker] = []
        self._running: dict[Worker, asyncio.Task[None]] = {}
        self._clients: list[Any] = []

    def add_worker(self, runner: Any = None, num_slots: int = 3, max_attempts: int = 3, drain_s: float = 2.0) -> Worker:
        client = connect(self.server.uri, allow_plain=False)
        worker = Worker(
            client, Keys("rollmill"), runner or self.programs, num_slots=num_slots, lease_s=self.lease_s,
            max_attempts=max_attempts, name=f"w{len(self.workers)}",
        )  # fmt: skip
        self.workers.append(worker)
        self._clients.append(client)
        self._running[worker] = asyncio.create_task(worker.run(drain_s))
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill as kill -9 would: the worker gives back no job and sends no message."""
        self._running[worker].cancel()
        for _, task in worker.held.values():
            task.cancel()

    async def stop(self, worker: Worker) -> None:
        worker.stop()
        await self._running[worker]

    async def execute(
        self, code: str, lane: Lane = Lane.BATCH, deadline_s: float = 30.0, key: str = ""
    ) -> ExecutionResult:
        return await self.queue.run(ExecutionRequest(code=code), lane=lane, request_id=key, deadline_s=deadline_s)

    async def close(self) -> None:
        for worker in self.workers:
            self.kill(worker)
        ended = await asyncio.gather(*self._running.values(), return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError | None) for end in ended), ended
        await self.queue.close()
        for client in self._clients:
            await client.aclose()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Any]:
    """A client that reads and changes Redis directly."""
    client = connect(redis_server.uri, allow_plain=False)
    yield client
    await client.aclose()


@pytest.fixture
async def farm(redis_server: RedisServer) -> AsyncIterator[Farm]:
    started = Farm(redis_server)
    started.queue.start()
    yield started
    await started.close()
