"""Converts programs, judgements and their results to and from the messages of the protos."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from services.common.errors import InvalidRequestError
from services.common.pb import environment_pb2
from services.common.pb import judge_pb2 as pb
from services.common.text.encodable import encodable
from services.common.wire import duration_from_proto, duration_to_proto
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    CaseResult,
    Comparison,
    ComparisonMode,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
    Tests,
)
from services.envgateway.sandbox.bare.statuses import STATUSES_OF_RUNS, RunStatus
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult

_STATUS = {
    status: environment_pb2.ExecutionStatus.Value(f"EXECUTION_STATUS_{status.name}") for status in STATUSES_OF_RUNS
}
_VERDICT = {verdict: pb.Verdict.Value(f"VERDICT_{verdict.name}") for verdict in RunStatus}
_MODE = {pb.ComparisonMode.Value(f"COMPARISON_MODE_{mode.name}"): mode for mode in ComparisonMode}


def execution_from_proto(request: environment_pb2.ExecuteCodeRequest) -> ExecutionRequest:
    return ExecutionRequest(
        code=request.code,
        stdin=request.stdin,
        limits=_limits_from_proto(request.limits),
        echo=request.print_trailing_expression,
        language=request.language or "python",
    )


def execution_to_proto(result: ExecutionResult) -> environment_pb2.ExecuteCodeResponse:
    return environment_pb2.ExecuteCodeResponse(
        status=_STATUS[result.status],
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        truncated=result.truncated,
        wall_time=duration_to_proto(result.wall_s),
        cpu_time=duration_to_proto(result.cpu_s),
        peak_memory_bytes=result.peak_memory_bytes,
        isolation_tier=result.tier,
        detail=encodable(result.detail),
    )


def judge_request_from_proto(proto: pb.JudgeRequest) -> JudgeRequest:
    """Raises ``InvalidRequestError``, which names the field."""
    return JudgeRequest(
        code=proto.code,
        tests=_tests_from_proto(proto),
        language=proto.language or "python",
        comparison=Comparison(
            mode=_MODE.get(proto.comparison), tolerance=_not_negative("tolerance", proto.tolerance) or 1e-6
        ),
        limits=_limits_from_proto(proto.limits),
        stop_early=proto.stop_early,
    )


def _limits_from_proto(limits: environment_pb2.ExecutionLimits) -> ExecutionLimits:
    """Raises ``InvalidRequestError`` for a limit that cannot be kept."""
    parsed = ExecutionLimits(
        wall_s=duration_from_proto(limits.wall_time) if limits.HasField("wall_time") else None,
        cpu_s=duration_from_proto(limits.cpu_time) if limits.HasField("cpu_time") else None,
        memory_bytes=limits.memory_bytes if limits.HasField("memory_bytes") else None,
        processes=limits.num_processes if limits.HasField("num_processes") else None,
        output_bytes=limits.output_bytes if limits.HasField("output_bytes") else None,
    )
    for name, value in asdict(parsed).items():
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


def judge_result_to_proto(result: JudgeResult) -> pb.JudgeResponse:
    return pb.JudgeResponse(
        verdict=_VERDICT[result.verdict],
        cases=[_case_to_proto(case) for case in result.cases],
        num_cases=result.num_cases,
        isolation_tier=result.tier,
        detail=encodable(result.detail),
        opaque=result.opaque,
    )


def _case_to_proto(case: CaseResult) -> pb.CaseResult:
    return pb.CaseResult(
        index=case.index,
        verdict=_VERDICT[case.verdict],
        detail=encodable(case.detail),
        stdout=encodable(case.stdout),
        stderr=encodable(case.stderr),
        truncated=case.truncated,
        exit_code=case.exit_code,
        signal=case.signal,
        wall_time=duration_to_proto(case.wall_s),
        cpu_time=duration_to_proto(case.cpu_s),
        peak_memory_bytes=case.peak_memory_bytes,
    )
