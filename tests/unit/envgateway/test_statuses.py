"""The statuses of runs and the verdicts are one enumeration, with the members that the protos have."""

from __future__ import annotations

from services.common.pb import environment_pb2, judge_pb2
from services.envgateway.sandbox.bare.statuses import RunStatus


def test_every_wire_value_is_a_status_and_every_status_a_wire_value() -> None:
    verdicts = {name.removeprefix("VERDICT_") for name in judge_pb2.Verdict.DESCRIPTOR.values_by_name}
    statuses = environment_pb2.ExecutionStatus.DESCRIPTOR.values_by_name
    assert verdicts == {*RunStatus, "UNSPECIFIED"}
    assert {name.removeprefix("EXECUTION_STATUS_") for name in statuses} == verdicts - {"WRONG_ANSWER", "INVALID_TESTS"}
