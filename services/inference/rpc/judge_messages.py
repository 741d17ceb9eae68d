"""Converts a workflow's cases and outcomes to and from the messages of JudgeService."""

from __future__ import annotations

import json  # not orjson: integers of any size
from collections.abc import Sequence

from services.common.errors import GraderFailedError, InvalidRequestError
from services.common.pb import environment_pb2
from services.common.pb import judge_pb2 as pb
from services.common.wire.records import duration_to_proto
from services.inference.workflows.base import CaseOutcome, JudgeCase, RunStatus

_VERDICT = {pb.Verdict.Value(f"VERDICT_{verdict.name}"): verdict for verdict in RunStatus}


def judge_request(
    code: str, cases: Sequence[JudgeCase], *, entry_point: str, case_time_s: float, request_id: str
) -> pb.JudgeRequest:
    """A request that runs every case, also after a failed one. ``InvalidRequestError`` names a malformed case."""
    request = pb.JudgeRequest(
        request_id=request_id,
        language="python",
        code=code,
        limits=environment_pb2.ExecutionLimits(wall_time=duration_to_proto(case_time_s)),
        lane=pb.JUDGE_LANE_BATCH,
    )
    for number, case in enumerate(cases, start=1):
        if entry_point:
            request.call_tests.entry_point = entry_point
            request.call_tests.cases.add(
                args_json=json.dumps(case.given).encode(), expected_json=json.dumps(case.expected).encode()
            )
        elif isinstance(case.given, str) and isinstance(case.expected, str):
            request.stdin_tests.cases.add(stdin=case.given, expected=case.expected)
        else:
            raise InvalidRequestError(f"case {number}: a program reads and prints text")
    return request


def outcomes_from_proto(response: pb.JudgeResponse, num_cases: int) -> tuple[CaseOutcome, ...]:
    """One outcome per case; a program that was refused as a whole is refused on each case.

    Raises:
        GraderFailedError: a verdict that does not depend on the program.
    """
    if (
        response.verdict == pb.VERDICT_INVALID_TESTS
    ):  # a policy's own cases, or a row's that the data set should not have
        return (CaseOutcome(verdict=RunStatus.INVALID_REQUEST, detail=response.detail),) * num_cases
    verdicts = [response.verdict, *(case.verdict for case in response.cases)]
    broken = next((verdict for verdict in verdicts if verdict not in _VERDICT), None)
    if broken is not None:
        raise GraderFailedError(f"judging ended with {pb.Verdict.Name(broken)}: {response.detail}")
    if len(response.cases) == num_cases:
        return tuple(
            CaseOutcome(verdict=_VERDICT[case.verdict], detail=case.detail, stdout=case.stdout, stderr=case.stderr)
            for case in response.cases
        )
    if response.verdict == pb.VERDICT_INVALID_REQUEST:
        return (CaseOutcome(verdict=RunStatus.INVALID_REQUEST, detail=response.detail),) * num_cases
    raise GraderFailedError(f"{len(response.cases)} of {num_cases} cases were judged: {response.detail}")
