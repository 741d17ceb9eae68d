"""Statuses and lanes on the wire: the statuses of runs and the verdicts are one enumeration, with the members that the protos have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import InvalidRequestError
from services.common.pb import environment_pb2, judge_pb2
from services.common.telemetry.metrics import Lane
from services.envgateway.judge.records import JudgeResult
from services.envgateway.rpc import JudgeServicer
from services.envgateway.sandbox.bare.statuses import RunStatus


def test_every_wire_value_is_a_status_and_every_status_a_wire_value() -> None:
    verdicts = {name.removeprefix("VERDICT_") for name in judge_pb2.Verdict.DESCRIPTOR.values_by_name}
    statuses = environment_pb2.ExecutionStatus.DESCRIPTOR.values_by_name
    assert verdicts == {*RunStatus, "UNSPECIFIED"}
    assert {name.removeprefix("EXECUTION_STATUS_") for name in statuses} == verdicts - {"WRONG_ANSWER", "INVALID_TESTS"}


async def test_the_lane_and_the_deadline_of_a_call_reach_the_queue() -> None:
    asked: list[tuple[Lane, float]] = []

    async def run(job: Any, *, lane: Lane, request_id: str, deadline_s: float) -> JudgeResult:
        asked.append((lane, deadline_s))
        return JudgeResult(verdict=RunStatus.OK)

    servicer = JudgeServicer(SimpleNamespace(run=run))  # type: ignore[arg-type]
    context: Any = SimpleNamespace(time_remaining=lambda: 5.0)
    request = judge_pb2.JudgeRequest(code="1", stdin_tests=judge_pb2.StdinTests(cases=[judge_pb2.StdinCase()]))
    for request.lane in (judge_pb2.JUDGE_LANE_INTERACTIVE, judge_pb2.JUDGE_LANE_BATCH):
        await servicer.Judge(request, context)
    assert asked == [(Lane.INTERACTIVE, 5.0), (Lane.BATCH, 5.0)]
    request.limits.memory_bytes = 0
    with pytest.raises(InvalidRequestError, match="memory_bytes"):
        await servicer.Judge(request, context)
