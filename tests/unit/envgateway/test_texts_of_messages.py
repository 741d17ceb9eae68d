"""Each text of each response can be sent, whatever a program, a policy or a tool has written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from services.common.pb import account_pb2, judge_pb2, trajectory_pb2
from services.common.records import RolloutFailure, RolloutPhase, RolloutTiming
from services.common.telemetry.accounts import GATEWAY, AccountState, ActivityName, ActivityTime, PeerState
from services.common.wire import write
from services.envgateway.judge.records import CaseResult, JudgeResult
from services.envgateway.rpc import execution_to_proto
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionResult

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
