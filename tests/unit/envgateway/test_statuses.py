"""The statuses of runs and the verdicts are one enumeration, with the members that the protos have."""

from __future__ import annotations

import pytest

from services.common.pb import environment_pb2, judge_pb2
from services.envgateway.sandbox.bare.statuses import STATUSES_OF_RUNS, RunStatus, status_of_run


@pytest.mark.parametrize(
    ("names", "prefix", "statuses"),
    [
        (environment_pb2.ExecutionStatus.keys(), "EXECUTION_STATUS_", STATUSES_OF_RUNS),
        (judge_pb2.Verdict.keys(), "VERDICT_", tuple(RunStatus)),
    ],
)
def test_every_wire_value_is_a_status_and_every_status_a_wire_value(
    names: list[str], prefix: str, statuses: tuple[RunStatus, ...]
) -> None:
    assert {name.removeprefix(prefix) for name in names} - {"UNSPECIFIED"} == {status.value for status in statuses}


@pytest.mark.parametrize("name", ["WRONG_ANSWER", "INVALID_TESTS", "ok", "", "DISK_LIMIT"])
def test_a_verdict_on_a_case_or_an_unknown_name_is_no_status_of_a_run(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        status_of_run(name)
