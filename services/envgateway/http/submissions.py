"""Converts submissions to jobs and results to outcomes, without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from services.common.errors import CapacityError, DeadlineError, InvalidRequestError, RollmillError
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.http.schema import SHOWN_CHARACTERS, Reason, Submission, SubmissionOutcome
from services.envgateway.judge.compare import difference
from services.envgateway.judge.records import (
    Comparison,
    ComparisonMode,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.queue.local import JobQueue
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import RewardOutcome
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

_STRIPPED = Comparison(mode=ComparisonMode.STRIPPED)
_IN_FLIGHT = 256  # of one batch; the others wait here, so that one batch does not fill the queue
_RETRY_S = 1.0
_OUTPUT_MARGIN = 4096  # a program may print more than expected, and be seen to
_REASON = {
    RunStatus.TIME_LIMIT: Reason.WORKER_TIMEOUT,
    RunStatus.INFRA_ERROR: Reason.INTERNAL_ERROR,
    RunStatus.CANCELLED: Reason.INTERNAL_ERROR,
    RunStatus.INVALID_REQUEST: Reason.INVALID_INPUT,
}
_LIMITS = (RunStatus.TIME_LIMIT, RunStatus.MEMORY_LIMIT, RunStatus.OUTPUT_LIMIT)


class Submissions:
    """Runs submissions; every submission gets an outcome, and only a cancellation is raised."""

    def __init__(self, queue: JobQueue, grading: Rewards, *, run_s: float, compile_s: float, output_bytes: int) -> None:
        """``run_s``, ``compile_s``: bounds of these, on top of waiting. ``output_bytes``: kept of a program's output."""
        self._queue = queue
        self._grading = grading
        self._run_s = {"python": run_s, "cpp": run_s + compile_s}
        self._output_bytes = output_bytes

    async def run(self, submission: Submission, lane: Lane, wait_s: float) -> SubmissionOutcome:
        """Run one submission; ``wait_s`` bounds the wait for a slot."""
        began = time.monotonic()
        try:
            if submission.type == "math":
                outcome = await self._math(submission)
            else:
                outcome = await self._program(submission, lane, began + wait_s + self._run_s[submission.type])
        except (CapacityError, DeadlineError):
            outcome = SubmissionOutcome(reason=Reason.QUEUE_TIMEOUT, cost=time.monotonic() - began)
        except InvalidRequestError as error:
            outcome = SubmissionOutcome(reason=Reason.INVALID_INPUT, stderr=error.message)
        except RollmillError as error:
            outcome = SubmissionOutcome(reason=Reason.INTERNAL_ERROR, stderr=error.message)
        return outcome.model_copy(update={"sub_id": submission.sub_id or outcome.sub_id})

    async def run_all(self, submissions: Sequence[Submission], lane: Lane, wait_s: float) -> list[SubmissionOutcome]:
        """A batch, in its order."""
        outcomes: list[SubmissionOutcome | None] = [None] * len(submissions)
        waiting = iter(enumerate(submissions))

        async def run_some() -> None:
            for index, submission in waiting:
                outcomes[index] = await self.run(submission, lane, wait_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_IN_FLIGHT, len(submissions))):
                group.create_task(run_some())
        return [outcome for outcome in outcomes if outcome is not None]

    async def _program(self, submission: Submission, lane: Lane, end: float) -> SubmissionOutcome:
        expected = submission.expected_output
        stdin = submission.input or ""
        if expected is not None and len(expected.encode(errors="replace")) + _OUTPUT_MARGIN > self._output_bytes:
            request = JudgeRequest(
                code=submission.solution,
                language=submission.type,
                tests=StdinTests(cases=(StdinCase(stdin=stdin, expected=expected),)),
                comparison=_STRIPPED,
            )
            return _judged(await self._in_time(request, lane, end))
        job = ExecutionRequest(code=submission.solution, language=submission.type, stdin=stdin.encode(errors="replace"))
        return _executed(await self._in_time(job, lane, end), expected)

    async def _in_time(self, job: Any, lane: Lane, end: float) -> Any:
        """A full queue is waited for, as long as there is time."""
        while True:
            try:
                return await self._queue.run(job, lane=lane, request_id="", deadline_s=end - time.monotonic())
            except CapacityError as full:
                pause_s = full.retry_after_s or _RETRY_S
                if time.monotonic() + pause_s >= end:
                    raise
                await asyncio.sleep(pause_s)

    async def _math(self, submission: Submission) -> SubmissionOutcome:
        if submission.expected_output is None:
            raise InvalidRequestError("a math submission needs expected_output: the right answer")
        began = time.monotonic()
        result = await self._grading.compute("math", {"answer": submission.expected_output}, submission.solution)
        failed = result.outcome is RewardOutcome.GRADER_FAILED
        return SubmissionOutcome(
            success=result.outcome is RewardOutcome.CORRECT,
            run_success=not failed,
            cost=time.monotonic() - began,
            stdout="" if failed else result.outcome.value,
            stderr=result.detail,
            reason=Reason.INTERNAL_ERROR if failed else Reason.NONE,
        )


def _executed(result: ExecutionResult, expected: str | None) -> SubmissionOutcome:
    stdout = result.stdout.decode(errors="replace")
    ran = result.status is RunStatus.OK
    return SubmissionOutcome(
        success=ran and (expected is None or not difference(expected, result.stdout, _STRIPPED)),
        run_success=ran,
        cost=result.wall_s,
        stdout=stdout[:SHOWN_CHARACTERS],
        stderr=_with_why(result.stderr.decode(errors="replace"), result.status, result.detail),
        reason=_REASON.get(result.status, Reason.NONE),
    )


def _judged(result: JudgeResult) -> SubmissionOutcome:
    if not result.cases:
        invalid = result.verdict is RunStatus.INVALID_TESTS
        status = RunStatus.INVALID_REQUEST if invalid else result.verdict
        return SubmissionOutcome(stderr=result.detail, reason=_REASON.get(status, Reason.NONE))
    [case] = result.cases
    wrong = case.verdict is RunStatus.WRONG_ANSWER
    status = RunStatus.OK if wrong else case.verdict
    return SubmissionOutcome(
        success=case.verdict is RunStatus.OK,
        run_success=status is RunStatus.OK,
        cost=case.wall_s,
        stdout=case.stdout[:SHOWN_CHARACTERS],
        stderr=_with_why(case.stderr, status, "" if wrong else case.detail),
        reason=_REASON.get(status, Reason.NONE),
    )


def _with_why(stderr: str, status: RunStatus, detail: str) -> str:
    """The program's own output, then the limit that ended the program."""
    limit = status.value.replace("_", " ").lower() if status in _LIMITS else ""
    why = ": ".join(part for part in (limit, detail) if part)
    if not why:
        return stderr[:SHOWN_CHARACTERS]
    return f"{stderr[: max(0, SHOWN_CHARACTERS - len(why) - 1)]}\n{why}".strip()[:SHOWN_CHARACTERS]
