"""Responses on the wire: statuses and verdicts are those of the protos, and each text can be sent, whatever a program wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import InvalidRequestError
from services.common.pb import account_pb2, environment_pb2, judge_pb2, trajectory_pb2
from services.common.records import RolloutFailure, RolloutPhase, RolloutTiming
from services.common.telemetry.accounts import GATEWAY, AccountState, ActivityName, ActivityTime, PeerState
from services.common.telemetry.metrics import Lane
from services.common.wire import write
from services.envgateway.judge.records import CaseResult, JudgeResult
from services.envgateway.rpc import JudgeServicer, execution_to_proto
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionResult


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


ODD = "a\ud800\udfff\x00b"
PHASE = RolloutPhase(what="turn", begin_s=0.0, seconds=1.0, detail=ODD)
ACTIVITY = ActivityTime(name=ActivityName.WAITING_FOR_CALLS, detail=ODD)
OF_REPLICA = {"task_group_id", "replica_id"}  # made by our own processes


def with_odd_texts(record: Any, but: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    texts = {
        field.name: ODD
        for field in dataclasses.fields(record)
        if type(getattr(record, field.name)) is str and field.name not in but
    }
    return dataclasses.replace(record, **texts)


RESPONSES: list[tuple[Callable[[Any], Any], Any]] = [
    (execution_to_proto, dataclasses.replace(ExecutionResult(status=RunStatus.OK), detail=ODD)),
    (
        lambda result: write(result, judge_pb2.JudgeResponse()),
        JudgeResult(
            verdict=RunStatus.OK, detail=ODD, cases=(with_odd_texts(CaseResult(index=0, verdict=RunStatus.OK)),)
        ),
    ),
    (
        lambda record: write(record, trajectory_pb2.RolloutFailure()),
        with_odd_texts(
            RolloutFailure(task_group_id="g", index=0, reason="r", timing=RolloutTiming(phases=(PHASE,))), OF_REPLICA
        ),
    ),
    (lambda record: write(record, account_pb2.TimeAccount()), AccountState(component=GATEWAY, activities=(ACTIVITY,))),
    (lambda record: write(record, account_pb2.PeerState()), PeerState(component=GATEWAY, detail=ODD)),
]


@pytest.mark.parametrize(("convert", "record"), RESPONSES)
def test_each_text_of_a_response_is_encodable(convert: Callable[[Any], Any], record: Any) -> None:
    assert b"a??" in convert(record).SerializeToString()
