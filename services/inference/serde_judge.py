"""Between the cases that a workflow has judged and the messages of JudgeService."""

from __future__ import annotations

import json  # not orjson: integers of any size
from collections.abc import Sequence

from services.common.errors import GraderFailedError, InvalidRequestError
from services.common.pb import environment_pb2
from services.common.pb import judge_pb2 as pb
from services.common.serde import duration_to_proto
from services.inference.workflows.base import CaseOutcome, CaseVerdict, JudgeCase

_VERDICT = {pb.Verdict.Value(f"VERDICT_{verdict.name}"): verdict for verdict in CaseVerdict}


def judge_request(
    code: str, cases: Sequence[JudgeCase], *, entry_point: str, case_time_s: float, request_id: str
) -> pb.JudgeRequest:
    """Every case is run, whatever became of those before it. ``InvalidRequestError`` names a case that is no case."""
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
    """One outcome per case; a program that was refused as a whole was refused on each.

    Raises:
        GraderFailedError: a verdict that says nothing about the program.
    """
    if (
        response.verdict == pb.VERDICT_INVALID_TESTS
    ):  # a policy's own cases, or a row's that the data set should not have
        return (CaseOutcome(verdict=CaseVerdict.INVALID_REQUEST, detail=response.detail),) * num_cases
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
        return (CaseOutcome(verdict=CaseVerdict.INVALID_REQUEST, detail=response.detail),) * num_cases
    raise GraderFailedError(f"{len(response.cases)} of {num_cases} cases were judged: {response.detail}")
