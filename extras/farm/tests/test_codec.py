"""Requests and results over Redis are the same ones."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extras.farm.codec import decode, encode
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    CaseResult,
    Comparison,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.judge.records import ComparisonMode as M
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult
from tests.unit.envgateway.test_judge_rules import VALUES


@given(VALUES, VALUES, st.text(), st.booleans())
def test_requests_survive_json(value: Any, other: Any, text: str, flag: bool) -> None:
    for tests in (
        StdinTests(cases=(StdinCase(stdin=text, expected=None if flag else text),)),
        CallTests(entry_point="f", cases=(CallCase(args=(value,), kwargs={"a": other}, expected=value),)),
        AssertTests(tests=text, entry_point="f", preamble=text),
    ):
        request = JudgeRequest(
            code=text, tests=tests, comparison=Comparison(mode=M.FLOAT if flag else None, tolerance=0.5),
            limits=ExecutionLimits(wall_s=1.5), stop_early=flag,
        )  # fmt: skip
        assert decode(encode(request)) == request


@given(st.binary(), st.text(), st.booleans())
def test_executions_survive_json(data: bytes, text: str, flag: bool) -> None:
    request = ExecutionRequest(code=text, stdin=data, limits=ExecutionLimits(memory_bytes=5), echo=flag, language="cpp")
    assert decode(encode(request)) == request
    result = ExecutionResult(status=RunStatus.RUNTIME_ERROR, exit_code=1, stdout=data, stderr=data, truncated=flag)
    assert decode(encode(result)) == result
    cases = (CaseResult(index=0, verdict=RunStatus.WRONG_ANSWER, detail=text, signal=9),)
    judged = JudgeResult(verdict=RunStatus.WRONG_ANSWER, cases=cases, num_cases=3, opaque=flag)
    assert decode(encode(judged)) == judged
