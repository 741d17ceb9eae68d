"""The membrane of the judge: convert, call the queue, convert. Behind it nothing sees grpc or protobuf."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import CapacityError, InvalidRequestError
from services.common.pb import environment_pb2, judge_pb2_grpc
from services.common.pb import judge_pb2 as pb
from services.common.serde import duration_from_proto, duration_to_proto
from services.envgateway.deadlines import time_left_s
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    CaseResult,
    Comparison,
    ComparisonMode,
    JudgeRequest,
    JudgeResult,
    Lane,
    StdinCase,
    StdinTests,
    Tests,
    Verdict,
)
from services.envgateway.queue.base import JobQueue
from services.envgateway.sandbox.records import ExecutionLimits

Context = grpc.aio.ServicerContext[Any, Any]

_IN_FLIGHT = 256  # of one batch; the others wait here, so that one batch does not fill the queue
_VERDICT = {verdict: pb.Verdict.Value(f"VERDICT_{verdict.name}") for verdict in Verdict}
_MODE = {pb.ComparisonMode.Value(f"COMPARISON_MODE_{mode.name}"): mode for mode in ComparisonMode}
_LANE = {pb.JUDGE_LANE_INTERACTIVE: Lane.INTERACTIVE}


class JudgeServicer(judge_pb2_grpc.JudgeServiceServicer):
    """A call that is cancelled, or whose deadline passes, is cancelled in the queue and killed in the sandbox."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def Judge(self, request: pb.JudgeRequest, context: Context) -> pb.JudgeResponse:
        return result_to_proto(await self._judge(request_from_proto(request), time_left_s(context)))

    async def JudgeBatch(self, request: pb.JudgeBatchRequest, context: Context) -> AsyncIterator[pb.JudgeBatchResponse]:
        end = asyncio.get_running_loop().time() + time_left_s(context)
        waiting = iter(enumerate(request.requests))
        running: dict[asyncio.Task[JudgeResult], int] = {}
        try:
            while True:
                while len(running) < _IN_FLIGHT and (following := next(waiting, None)) is not None:
                    index, one = following
                    task = asyncio.create_task(self._judge_of_batch(one, end), name=f"judge {index} of a batch")
                    running[task] = index
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = running.pop(task)
                    yield pb.JudgeBatchResponse(
                        index=index,
                        request_id=request.requests[index].request_id,
                        result=result_to_proto(task.result()),
                    )
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _judge(self, request: JudgeRequest, deadline_s: float) -> JudgeResult:
        return await self._queue.run(request, lane=request.lane, request_id=request.request_id, deadline_s=deadline_s)

    async def _judge_of_batch(self, proto: pb.JudgeRequest, end: float) -> JudgeResult:
        """A full queue is waited for, as long as the caller's deadline allows."""
        loop = asyncio.get_running_loop()
        try:
            request = request_from_proto(proto)
        except InvalidRequestError as error:
            return JudgeResult(verdict=Verdict.INVALID_REQUEST, detail=error.message, request_id=proto.request_id)
        while True:
            try:
                return await self._judge(request, end - loop.time())
            except CapacityError as full:
                pause_s = full.retry_after_s or 1.0
                if loop.time() + pause_s >= end:
                    return JudgeResult(verdict=Verdict.INFRA_ERROR, detail=full.message, request_id=request.request_id)
                await asyncio.sleep(pause_s)


def request_from_proto(proto: pb.JudgeRequest) -> JudgeRequest:
    """Raises ``InvalidRequestError``, which names the field."""
    return JudgeRequest(
        code=proto.code,
        tests=_tests_from_proto(proto),
        language=proto.language or "python",
        comparison=Comparison(
            mode=_MODE.get(proto.comparison), tolerance=_not_negative("tolerance", proto.tolerance) or 1e-6
        ),
        limits=limits_from_proto(proto.limits),
        stop_early=proto.stop_early,
        lane=_LANE.get(proto.lane, Lane.BATCH),
        request_id=proto.request_id,
    )


def limits_from_proto(limits: environment_pb2.ExecutionLimits) -> ExecutionLimits:
    """Raises ``InvalidRequestError`` for a limit that nothing could keep."""
    parsed = ExecutionLimits(
        wall_s=duration_from_proto(limits.wall_time) if limits.HasField("wall_time") else None,
        cpu_s=duration_from_proto(limits.cpu_time) if limits.HasField("cpu_time") else None,
        memory_bytes=limits.memory_bytes if limits.HasField("memory_bytes") else None,
        processes=limits.num_processes if limits.HasField("num_processes") else None,
        output_bytes=limits.output_bytes if limits.HasField("output_bytes") else None,
    )
    for name, value in parsed.to_json().items():
        if value is not None and not value > 0:
            raise InvalidRequestError(f"limits.{name} is {value:g}; it must be more than 0")
    return parsed


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:
        raise InvalidRequestError(f"{name} is {value:g}; it must not be negative")
    return value


def _tests_from_proto(proto: pb.JudgeRequest) -> Tests:
    match proto.WhichOneof("tests"):
        case "stdin_tests":
            return StdinTests(
                cases=tuple(
                    StdinCase(stdin=case.stdin, expected=case.expected if case.HasField("expected") else None)
                    for case in proto.stdin_tests.cases
                )
            )
        case "call_tests":
            cases = enumerate(proto.call_tests.cases)
            return CallTests(
                entry_point=proto.call_tests.entry_point,
                cases=tuple(_call_from_proto(index, case) for index, case in cases),
            )
        case "assert_tests":
            tests = proto.assert_tests
            return AssertTests(
                tests=tests.tests, entry_point=tests.entry_point, preamble=tests.preamble, names=tuple(tests.names)
            )
    raise InvalidRequestError("a request without tests: set stdin_tests, call_tests or assert_tests")


def _call_from_proto(index: int, case: pb.CallCase) -> CallCase:
    args = _json(f"cases[{index}].args_json", case.args_json or b"[]")
    kwargs = _json(f"cases[{index}].kwargs_json", case.kwargs_json or b"{}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InvalidRequestError(f"cases[{index}]: args_json is a JSON array, kwargs_json an object")
    expected = _json(f"cases[{index}].expected_json", case.expected_json or b"null")
    return CallCase(args=tuple(args), kwargs=kwargs, expected=expected)


def _json(name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}") from None


def result_to_proto(result: JudgeResult) -> pb.JudgeResponse:
    return pb.JudgeResponse(
        verdict=_VERDICT[result.verdict],
        cases=[_case_to_proto(case) for case in result.cases],
        num_cases=result.num_cases,
        isolation_tier=result.tier,
        detail=_encodable(result.detail),
    )


def _case_to_proto(case: CaseResult) -> pb.CaseResult:
    return pb.CaseResult(
        index=case.index,
        verdict=_VERDICT[case.verdict],
        detail=_encodable(case.detail),
        stdout=_encodable(case.stdout),
        stderr=_encodable(case.stderr),
        truncated=case.truncated,
        exit_code=case.exit_code,
        signal=case.signal,
        wall_time=duration_to_proto(case.wall_s),
        cpu_time=duration_to_proto(case.cpu_s),
        peak_memory_bytes=case.peak_memory_bytes,
    )


def _encodable(text: str) -> str:
    """A returned value may hold lone surrogates, and a detail shows it."""
    return text.encode(errors="replace").decode()
