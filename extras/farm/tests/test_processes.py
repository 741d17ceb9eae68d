"""kill -9 of workers, of Redis and of the gateway in mid-batch: no job lost, none answered twice, no verdict wrong."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from extras.farm.tests.processes import World, children
from extras.farm.tests.redis_server import RedisServer
from services.common.pb import environment_pb2, environment_pb2_grpc, judge_pb2_grpc
from services.common.pb import judge_pb2 as pb
from services.common.rpc.client import channel
from services.common.telemetry.logs import LogEvent
from tests.integration.envgateway.sandbox_state import programs
from tests.waiting import until

pytestmark = pytest.mark.slow


class BatchClient:
    """Sends a batch until every request has its verdict: interrupted requests and infrastructure failures are sent
    again."""

    def __init__(self, port: int, num_requests: int, seconds: float) -> None:
        self._port = port
        self.right = {f"r{n}": n % 3 != 0 for n in range(num_requests)}
        self._requests = {
            f"r{n}": pb.JudgeRequest(
                request_id=f"r{n}",
                code=f"import time; time.sleep({seconds}); print(int(input()) * 2 + {int(n % 3 == 0)})",
                stdin_tests=pb.StdinTests(cases=[pb.StdinCase(stdin=f"{n}", expected=f"{2 * n}")]),
            )
            for n in range(num_requests)
        }
        self.verdicts: dict[str, list[int]] = {request_id: [] for request_id in self._requests}

    @property
    def num_answered(self) -> int:
        return sum(map(len, self.verdicts.values()))

    async def run(self) -> None:
        while missing := [self._requests[request_id] for request_id, got in self.verdicts.items() if not got]:
            async with channel(f"127.0.0.1:{self._port}") as connection:
                stub = judge_pb2_grpc.JudgeServiceStub(connection)
                await asyncio.gather(*(self._ask(stub, request) for request in missing))

    async def _ask(self, stub: judge_pb2_grpc.JudgeServiceStub, request: pb.JudgeRequest) -> None:
        try:
            answer = await stub.Judge(request, timeout=120, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
            await asyncio.sleep(0.2)
            return
        if answer.verdict not in (pb.VERDICT_INFRA_ERROR, pb.VERDICT_CANCELLED):
            self.verdicts[request.request_id].append(answer.verdict)

    def check(self) -> None:
        assert Counter(map(len, self.verdicts.values())) == {1: len(self.verdicts)}
        wrong = {
            request_id: got
            for request_id, got in self.verdicts.items()
            if got != [pb.VERDICT_OK if self.right[request_id] else pb.VERDICT_WRONG_ANSWER]
        }
        assert not wrong


async def _answers(client: BatchClient, more: int) -> None:
    before = client.num_answered
    await until(lambda: client.num_answered >= before + more, f"{more} more answers")


async def test_no_job_is_lost_or_answered_twice_after_any_kill(world: World, redis_server: RedisServer) -> None:
    gateway = await world.start_gateway()
    workers = [world.start_worker(), world.start_worker()]
    client = BatchClient(world.port, num_requests=160, seconds=0.05)
    async with asyncio.timeout(150):
        batch = asyncio.create_task(client.run())
        await _answers(client, 20)
        await asyncio.to_thread(workers[0].kill)
        workers[0] = world.start_worker()
        await _answers(client, 30)
        await asyncio.to_thread(redis_server.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(redis_server.start)
        await _answers(client, 30)
        await asyncio.to_thread(gateway.kill)
        gateway = await world.start_gateway()
        await _answers(client, 30)
        await asyncio.to_thread(workers[1].kill)
        await asyncio.to_thread(redis_server.kill)
        await asyncio.to_thread(redis_server.start)
        await batch
    client.check()
    assert (await world.gauges())["queue_unanswered"] == 0


async def test_a_worker_that_gets_sigterm_ends_its_running_jobs(world: World) -> None:
    await world.start_gateway()
    leaving = world.start_worker()
    async with channel(f"127.0.0.1:{world.port}") as connection:
        stub = environment_pb2_grpc.CodeExecutionServiceStub(connection)
        request = environment_pb2.ExecuteCodeRequest(code="import time; time.sleep(2); print('done')")
        call = asyncio.ensure_future(stub.ExecuteCode(request, timeout=60))
        await until(lambda: LogEvent.WORKER_READY in leaving.log.read_text())
        await until(lambda: any(programs(child) for child in children(leaving.pid)), "its program runs")
        assert await asyncio.to_thread(leaving.stop) == 0
        answer = await call
        assert answer.status == environment_pb2.EXECUTION_STATUS_OK and answer.stdout == "done\n"
        assert "given_back=0" in leaving.log.read_text()
