"""JudgeService over real gRPC: single calls, batches, deadlines, repeated requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import grpc
import pytest

from services.common.pb import environment_pb2, judge_pb2_grpc
from services.common.pb import judge_pb2 as pb
from services.common.rpc.client import channel
from services.common.rpc.server import Server
from services.common.telemetry.metrics import Lane
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, JudgeResult, StdinCase, StdinTests
from services.envgateway.queue.local import Job, JobQueue
from services.envgateway.rpc import JudgeServicer
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.scheduler import Scheduler
from tests.integration.envgateway.conftest import SLEEP_LONG, long_programs
from tests.integration.envgateway.sandbox_state import assert_clean
from tests.waiting import WAIT_S, until

V = RunStatus
SQUARES = StdinTests(cases=tuple(StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(4)))


class _Recording:
    """A runner that records the lane of each request."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.lanes: list[Lane] = []

    async def __call__(self, job: Job, lane: Lane, wait_s: float | None) -> JudgeResult:
        assert isinstance(job, JudgeRequest)
        self.lanes.append(lane)
        return await self._judge.judge(job)


@pytest.fixture
async def stub(pool: SandboxPool) -> AsyncIterator[tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Recording]]:
    runner = _Recording(Judge(pool))
    queue = JobQueue(runner, Scheduler(num_slots=2, batch_slots=2, lane_size=100))
    server = Server(service="envgateway", instance_id="test", host="127.0.0.1", port=0, run_id="")
    server.add(judge_pb2_grpc.add_JudgeServiceServicer_to_server, JudgeServicer(queue), "rollmill.v1.JudgeService")
    port = await server.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        yield judge_pb2_grpc.JudgeServiceStub(connection), runner
    await server.stop()


def _squares(code: str, **more: object) -> pb.JudgeRequest:
    cases = [pb.StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(3)]
    return pb.JudgeRequest(code=code, stdin_tests=pb.StdinTests(cases=cases), **more)  # type: ignore[arg-type]


async def test_judging_over_grpc(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Recording], pool: SandboxPool
) -> None:
    client, runner = stub
    answer = await client.Judge(_squares("print(int(input()) ** 2)", lane=pb.JUDGE_LANE_INTERACTIVE), timeout=WAIT_S)
    assert (answer.verdict, answer.num_cases, answer.isolation_tier) == (pb.VERDICT_OK, 3, pool.tier)
    assert answer.cases[2].stdout == "4\n" and answer.cases[2].exit_code == 0 and not answer.cases[2].HasField("signal")
    assert runner.lanes == [Lane.INTERACTIVE]
    call = pb.JudgeRequest(
        code="def f(a, b): return [a, b]",
        call_tests=pb.CallTests(
            entry_point="f", cases=[pb.CallCase(args_json=b"[1]", kwargs_json=b'{"b": 2}', expected_json=json.dumps([1, 2]).encode())]
        ),
    )  # fmt: skip
    assert (await client.Judge(call, timeout=WAIT_S)).verdict == pb.VERDICT_OK
    asserts = pb.JudgeRequest(code="def f(a): return a", assert_tests=pb.AssertTests(tests="assert f(1) == 2"))
    assert (await client.Judge(asserts, timeout=WAIT_S)).verdict == pb.VERDICT_WRONG_ANSWER


@long_programs
async def test_a_deadline_and_a_client_that_leaves_end_the_run(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Recording], pool: SandboxPool
) -> None:
    client, _ = stub
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await client.Judge(_squares(SLEEP_LONG), timeout=0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    calls = [client.Judge(_squares(SLEEP_LONG), timeout=60) for _ in range(4)]
    await until(lambda: pool.gauges["sandbox_busy_slots"], "a case runs")
    for call in calls:
        call.cancel()
    await until(lambda: not (pool.gauges["sandbox_busy_slots"] or pool.gauges["sandbox_queued"]))
    await assert_clean(pool)


async def test_a_limit_that_cannot_be_kept_is_refused(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Recording],
) -> None:
    client, _ = stub
    request = _squares("print(1)", limits=environment_pb2.ExecutionLimits(memory_bytes=0))
    with pytest.raises(grpc.aio.AioRpcError, match="memory_bytes"):
        await client.Judge(request, timeout=WAIT_S)
