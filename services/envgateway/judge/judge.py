"""The judge: a request's cases through the sandbox, one after the other in one slot's turn.

    programs        stdin in, stdout compared here
    function calls  arguments in, one call a process; the returned value comes out as plain data, compared here
    asserts         read as calls and values where their text allows it; else an interview (see ``interview``)

Expected values, test code and the rules of comparison never enter the process of the program. What completes a call is
the value that its harness wrote to a descriptor of its own after the last step; an exit code of 0 without it is a
wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from services.common.assert_tests import UnusableTestsError
from services.envgateway.judge.asserts import DirectAssert, names, num_asserts, read
from services.envgateway.judge.compare import VALUE_MODES, difference, value_rule
from services.envgateway.judge.interview import Interview
from services.envgateway.judge.records import (
    AssertTests,
    CallTests,
    CaseResult,
    JudgeRequest,
    JudgeResult,
    Lane,
    StdinCase,
    StdinTests,
    Verdict,
)
from services.envgateway.judge.results import RETRYABLE, case_result, refused, unusable, whole_result
from services.envgateway.judge.values import equal, shown
from services.envgateway.sandbox.bare import plain
from services.envgateway.sandbox.connection import SubmittedRun
from services.envgateway.sandbox.cpp import compile_cpp, cpp_job
from services.envgateway.sandbox.jobs import Job, profile_of, why_unusable
from services.envgateway.sandbox.lease import SlotLease
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionResult, ExecutionStatus

MAX_CASES = 10_000
_FRAME = struct.Struct("!I")
_SLOW_TO_COMPARE = 1 << 16  # bytes from which comparing leaves the event loop

# What a program can make of the frame that its harness should write: nothing of it is a failure of ours.
_NO_DATA = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

Wrong = Callable[[Any], str]  # what is wrong with the tree of a returned value; empty when nothing is


class Judge:
    """Judges over a sandbox. A request takes one slot at a time, so its cost in slots is that of one execution."""

    def __init__(self, sandbox: SandboxPool) -> None:
        self._sandbox = sandbox

    async def judge(self, request: JudgeRequest, queue_timeout_s: float = 60.0) -> JudgeResult:
        """Every case's verdict. Cancelling the caller kills what runs.

        Raises:
            CapacityError: no slot came free in time; says when to come back.
        """
        direct: tuple[DirectAssert, ...] | None = None
        wrong = _why_refused(request)
        if not wrong and (broken := _why_unusable_tests(request)):
            return unusable(request, broken, self._sandbox.tier)
        if not wrong and isinstance(request.tests, AssertTests):
            try:
                direct = await asyncio.to_thread(read, request.tests)
            except UnusableTestsError as error:
                return unusable(request, str(error), self._sandbox.tier)
        if wrong:
            return refused(request, wrong, self._sandbox.tier)
        async with self._sandbox.lease(queue_timeout_s, patient=request.lane is Lane.BATCH) as slot:
            return await _Judgement(slot, request, self._sandbox.tier).run(direct)


class _Judgement:
    """One request in one slot's turn."""

    def __init__(self, slot: SlotLease, request: JudgeRequest, tier: str) -> None:
        self._slot = slot
        self._request = request
        self._tier = tier
        self._limits = request.limits.within(slot.config)
        self._source = request.code.encode()
        self._profile = profile_of(self._source)
        self._spent_s = 0.0  # of the slot's time, by the program

    async def run(self, direct: tuple[DirectAssert, ...] | None) -> JudgeResult:
        match self._request.tests:
            case StdinTests(cases=cases):
                return await self._stdin(cases)
            case CallTests() as tests:
                rule = value_rule(self._request.comparison)

                def compare(expected: Any) -> Wrong:
                    return lambda actual: (
                        "" if equal(expected, actual, rule) else f"expected {shown(expected)}, got {shown(actual)}"
                    )

                calls = [
                    self._call(tests.entry_point, plain.to_tree(case.args), plain.to_tree(case.kwargs),
                               compare(plain.to_tree(case.expected)))
                    for case in tests.cases
                ]  # fmt: skip
                return await self._all(calls)
            case AssertTests() as tests:
                if direct is None:
                    return await self._interview(tests)
                return await self._all([self._call(d.entry_point, d.args, d.kwargs, d.failure) for d in direct])

    async def _all(self, cases: list[Callable[[int], Awaitable[CaseResult]]]) -> JudgeResult:
        """Each case on its own, until they have taken too long together; what does not even compile is not tried again."""
        results: list[CaseResult] = []
        longest_s = self._slot.config.judging_time_s
        for index, judge_case in enumerate(cases):
            if self._spent_s >= longest_s:
                detail = f"the cases before it took {longest_s:g} s (envgateway.sandbox.judging_time_s)"
                results.append(CaseResult(index=index, verdict=Verdict.TIME_LIMIT, detail=detail))
            elif results and results[-1].verdict is Verdict.COMPILE_ERROR:
                results.append(_again(results[-1], index))
            else:
                results.append(await judge_case(index))
            if self._request.stop_early and results[-1].verdict is not Verdict.OK:
                break
        return whole_result(self._request, results, len(cases), self._tier)

    async def _run(self, job: Job) -> SubmittedRun:
        """Once more when the machinery failed: the program has no part in it."""
        run = await self._slot.run(job)
        if run.result.result().status in RETRYABLE:
            run = await self._slot.run(job)
        self._spent_s += run.result.result().slot_s
        return run

    # -- programs -------------------------------------------------------------------------------------------------

    async def _stdin(self, cases: tuple[StdinCase, ...]) -> JudgeResult:
        artefact: bytes | None = None
        if self._request.language == "cpp":
            made = await compile_cpp(self._slot, self._request.code)
            if isinstance(made, ExecutionResult):
                return self._not_made(made, len(cases))
            artefact = made
        return await self._all([self._program(case, artefact) for case in cases])

    def _not_made(self, made: ExecutionResult, num_cases: int) -> JudgeResult:
        if made.status is ExecutionStatus.INVALID_REQUEST:
            return refused(self._request, made.detail, self._tier)
        first = case_result(0, made)
        count = 1 if self._request.stop_early else num_cases
        return whole_result(self._request, [_again(first, i) for i in range(count)], num_cases, self._tier)

    def _program(self, case: StdinCase, artefact: bytes | None) -> Callable[[int], Awaitable[CaseResult]]:
        async def judge_case(index: int) -> CaseResult:
            limits = dict(self._limits)
            if case.expected is not None:  # room for an answer as long as the right one, and a wrong one to be seen
                room = min(2 * len(case.expected) + 4096, self._slot.config.answer_bytes)
                limits["output_bytes"] = max(limits["output_bytes"], room)
            stdin = case.stdin.encode()
            if artefact is not None:
                job = cpp_job(artefact, stdin, limits)
            else:
                job = Job(mode="program", profile=self._profile, source=self._source, stdin=stdin, limits=limits)
            result = (await self._run(job)).result.result()
            if result.status is not ExecutionStatus.OK or case.expected is None:
                return case_result(index, result)
            size = len(case.expected) + len(result.stdout)
            wrong = await _aside(size, difference, case.expected, result.stdout, self._request.comparison)
            return case_result(index, result, Verdict.WRONG_ANSWER if wrong else Verdict.OK, wrong)

        return judge_case

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, entry_point: str, args: Any, kwargs: Any, wrong: Wrong) -> Callable[[int], Awaitable[CaseResult]]:
        has_prelude = entry_point.startswith("Solution") or b"class Solution" in self._source
        payload = {"entry_point": entry_point, "args": args, "kwargs": kwargs, "prelude": has_prelude}
        job = Job(
            mode="call",
            profile=self._profile,
            source=self._source,
            payload=json.dumps(payload).encode(),
            limits=self._limits,
        )

        async def judge_case(index: int) -> CaseResult:
            run = await self._run(job)
            result = run.result.result()
            if result.status is not ExecutionStatus.OK:
                return case_result(index, result)
            value = _framed_value(run.answer)
            if value is None:
                return case_result(index, result, Verdict.WRONG_ANSWER, "the program ended before the call returned")
            failure = await _aside(len(value), _judged_value, value, wrong)
            return case_result(index, result, Verdict.WRONG_ANSWER if failure else Verdict.OK, failure)

        return judge_case

    # -- tests that have to be run ----------------------------------------------------------------------------------

    async def _interview(self, tests: AssertTests) -> JudgeResult:
        meant = names(tests)
        expected = max(1, num_asserts(tests))
        cases = await Interview(self._slot, self._request, tests, meant, expected).run()
        if isinstance(cases, str):
            return unusable(self._request, cases, self._tier)
        if not cases:
            return unusable(
                self._request, f"the tests of {meant.entry_point or 'the program'} test nothing", self._tier
            )
        stopped = self._request.stop_early and cases[-1].verdict is not Verdict.OK
        return whole_result(self._request, cases, max(expected, len(cases)) if stopped else len(cases), self._tier)


def _why_refused(request: JudgeRequest) -> str:
    unusable = why_unusable(request.code)
    if unusable:
        return unusable
    if request.language not in ("python", "cpp"):
        return f"no language {request.language!r}; there are python and cpp"
    tests = request.tests
    if request.language == "cpp" and not isinstance(tests, StdinTests):
        return "C++ programs are judged by stdin and stdout only"
    mode = request.comparison.mode
    if (
        not isinstance(tests, AssertTests)
        and mode is not None
        and (mode in VALUE_MODES) is not isinstance(tests, CallTests)
    ):
        return f"comparison {mode.value!r} does not suit these tests"
    return ""


def _why_unusable_tests(request: JudgeRequest) -> str:
    """Why no program can be judged by these tests; for asserts their text has to be read."""
    tests = request.tests
    if isinstance(tests, AssertTests):
        return ""
    if not tests.cases:
        return "there are no cases"
    if len(tests.cases) > MAX_CASES:
        return f"{len(tests.cases)} cases are more than {MAX_CASES}"
    if isinstance(tests, StdinTests):
        return _why_no_text([text for case in tests.cases for text in (case.stdin, case.expected or "")])
    if not all(part.removesuffix("()").isidentifier() for part in tests.entry_point.split(".")):
        return f"entry_point {tests.entry_point!r} is no function and no Class().method"
    return ""


def _why_no_text(texts: list[str]) -> str:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        return f"a text of the tests cannot be encoded: {error}"
    return ""


def _framed_value(answer: bytes) -> bytes | None:
    """The one frame that a call's harness writes when the function has returned."""
    if len(answer) < _FRAME.size or len(answer) != _FRAME.size + _FRAME.unpack_from(answer)[0]:
        return None
    return answer[_FRAME.size :]


def _judged_value(value: bytes, wrong: Wrong) -> str:
    try:
        return wrong(plain.parse(value))
    except _NO_DATA as error:
        return f"the returned value is no data: {error!r}"


async def _aside(size: int, function: Callable[..., str], *arguments: Any) -> str:
    """A comparison; a long one in a thread, so that it holds nobody up."""
    return await asyncio.to_thread(function, *arguments) if size > _SLOW_TO_COMPARE else function(*arguments)


def _again(result: CaseResult, index: int) -> CaseResult:
    return CaseResult(**{**{name: getattr(result, name) for name in CaseResult.__slots__}, "index": index})
