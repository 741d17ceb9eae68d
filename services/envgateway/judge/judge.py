"""The judge: a request's cases through the sandbox, one after the other in one slot's turn.

    programs        stdin in, stdout compared here
    function calls  arguments in, one call a process; the returned value comes out as plain data, compared here
    asserts         read as calls and values where their text allows it; else opaque: run with the program (``test_code``)

Each case is a run of its own, so no case sees another's effects or inputs.

Expected values and the rules of comparison never enter the process of the program, except for opaque tests, whose
verdict is marked. A call is complete when its harness has written the value to a descriptor of its own, after the last
step; an exit code of 0 without the value is a wrong answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.telemetry.metrics import Lane
from services.common.text.asserted_calls import AssertedCall
from services.common.text.encodable import encodable
from services.common.text.literals import to_tree
from services.common.text.programs import UnusableTestsError
from services.envgateway.judge import test_code
from services.envgateway.judge.checks import Check, TextCheck, ValueCheck, failure, packed
from services.envgateway.judge.compare import VALUE_MODES, value_rule
from services.envgateway.judge.records import (
    RETRYABLE,
    AssertTests,
    CallTests,
    CaseResult,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
    Tests,
    case_result,
    last_line,
    one_frame,
    refused,
    unusable,
    whole_result,
)
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import Job, SlotLease, SubmittedRun, profile_of, why_unusable
from services.envgateway.sandbox.pool import SandboxPool, compile_cpp, cpp_job
from services.envgateway.sandbox.records import ANSWER_BYTES, ExecutionResult

MAX_CASES = 10_000
_SLOW_TO_COMPARE = 1 << 12  # bytes from which comparing leaves the event loop, for a process that can be killed


@dataclass(frozen=True, slots=True)
class _Case:
    """Input of a case; ``judged`` gets the case's index, its result and its answer."""

    job: Callable[[], Job]
    judged: Callable[[int, ExecutionResult, bytes], Awaitable[CaseResult]]


class Judge:
    """Judges over a sandbox. A request takes one slot at a time, so its cost in slots is that of one execution."""

    def __init__(
        self, sandbox: SandboxPool, compare_apart: Callable[[bytes, bytes], Awaitable[str]] | None = None
    ) -> None:
        """``compare_apart``: compares a large answer, by its packed check, in a process that can be killed; left out, a
        thread does, for programs that are trusted."""
        self._sandbox = sandbox
        self._compare_apart = compare_apart

    async def judge(self, request: JudgeRequest, lane: Lane = Lane.BATCH, queue_timeout_s: float = 60.0) -> JudgeResult:
        """Every case's verdict. Cancelling the caller kills the running programs.

        Raises:
            CapacityError: no slot came free in time; says when to come back.
        """
        if wrong := _why_refused(request):
            return refused(wrong, self._sandbox.tier)
        direct: tuple[AssertedCall, ...] | None = None
        broken = _why_unusable_tests(request.tests)
        if isinstance(request.tests, AssertTests):
            try:
                direct = await asyncio.to_thread(request.tests.calls)
            except UnusableTestsError as error:
                broken = str(error)
        if broken:
            return unusable(broken, self._sandbox.tier)
        async with self._sandbox.lease(lane, queue_timeout_s) as slot:
            return await _Judgement(slot, request, self._sandbox.tier, self._compare).run(direct)

    async def _compare(self, check: Check, answer: bytes) -> str:
        size = len(answer) + (len(check.expected) if isinstance(check, TextCheck) else 0)
        if size <= _SLOW_TO_COMPARE:
            return failure(check, answer)
        if self._compare_apart is None:
            return await asyncio.to_thread(failure, check, answer)
        return await self._compare_apart(packed(check), answer)


class _Judgement:
    """One request in one slot's turn."""

    def __init__(
        self, slot: SlotLease, request: JudgeRequest, tier: str, compare: Callable[[Check, bytes], Awaitable[str]]
    ) -> None:
        self._compare = compare
        self._slot = slot
        self._request = request
        self._tier = tier
        self._limits = request.limits.within(slot.config)
        self._source = request.code.encode()
        self._profile = profile_of(self._source)
        self._spent_s = 0.0  # of the slot's time, by the program

    async def run(self, direct: tuple[AssertedCall, ...] | None) -> JudgeResult:
        match self._request.tests:
            case StdinTests(cases=cases):
                return await self._stdin(cases)
            case CallTests() as tests:
                rule = value_rule(self._request.comparison)

                calls = [
                    self._call(tests.entry_point, to_tree(case.args), to_tree(case.kwargs),
                               ValueCheck(to_tree(case.expected), rule, [*map(to_tree, case.also)]))
                    for case in tests.cases
                ]  # fmt: skip
                return await self._all(calls)
            case AssertTests() as tests:
                if direct is None:
                    return await self._opaque(tests)
                return await self._all([self._call(d.entry_point, d.args, d.kwargs, d, d.applied) for d in direct])

    async def _all(self, cases: list[_Case]) -> JudgeResult:
        """The result of each case, until their total time is used up; a program that does not compile is not tried
        again."""
        results: list[CaseResult] = []
        longest_s = self._slot.config.judging_time_s
        for index, case in enumerate(cases):
            if self._request.stop_early and results and results[-1].verdict is not RunStatus.OK:
                break
            if self._spent_s >= longest_s:
                detail = f"the cases before it took {longest_s:g} s (envgateway.sandbox.judging_time_s)"
                results.append(CaseResult(index=index, verdict=RunStatus.TIME_LIMIT, detail=detail))
            elif results and results[-1].verdict is RunStatus.COMPILE_ERROR:
                results.append(dataclasses.replace(results[-1], index=index))
            else:
                run = await self._run(case.job())
                results.append(await case.judged(index, run.result.result(), run.answer))
        return whole_result(results, len(cases), self._tier)

    async def _run(self, job: Job) -> SubmittedRun:
        """Run a case, and repeat the run once after a failure of the machinery: the program is not at fault."""
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
        if made.status is RunStatus.INVALID_REQUEST:
            return refused(made.detail, self._tier)
        first = case_result(0, made)
        count = 1 if self._request.stop_early else num_cases
        return whole_result([dataclasses.replace(first, index=i) for i in range(count)], num_cases, self._tier)

    def _program(self, case: StdinCase, artefact: bytes | None) -> _Case:
        limits = dict(self._limits)
        if case.expected is not None:  # room for an answer as long as the right one, and a wrong one to be seen
            room = min(2 * len(case.expected) + 4096, ANSWER_BYTES)
            limits["output_bytes"] = max(limits["output_bytes"], room)
        stdin = case.stdin.encode()

        def job() -> Job:
            if artefact is not None:
                return cpp_job(artefact, stdin, limits)
            return Job(mode="judged", profile=self._profile, source=self._source, stdin=stdin, limits=limits)

        async def judged(index: int, result: ExecutionResult, answer: bytes) -> CaseResult:
            if result.status is not RunStatus.OK or case.expected is None:
                return case_result(index, result)
            wrong = await self._compare(TextCheck(case.expected, self._request.comparison), result.stdout)
            return case_result(index, result, RunStatus.WRONG_ANSWER if wrong else RunStatus.OK, wrong)

        return _Case(job, judged)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, entry_point: str, args: Any, kwargs: Any, check: Check, applied: Sequence[str] = ()) -> _Case:
        call = {"entry_point": entry_point, "args": args, "kwargs": kwargs, "applied": applied}

        def job() -> Job:
            payload = json.dumps(call).encode()
            return Job(mode="call", profile=self._profile, source=self._source, payload=payload, limits=self._limits)

        async def judged(index: int, result: ExecutionResult, answer: bytes) -> CaseResult:
            if result.status is not RunStatus.OK:
                return case_result(index, result)
            value = one_frame(answer)
            if value is None:
                return case_result(index, result, RunStatus.WRONG_ANSWER, "the program ended before the call returned")
            wrong = await self._compare(check, value)
            return case_result(index, result, RunStatus.WRONG_ANSWER if wrong else RunStatus.OK, wrong)

        return _Case(job, judged)

    # -- opaque tests ---------------------------------------------------------------------------------------------

    async def _opaque(self, tests: AssertTests) -> JudgeResult:
        """One run of the program with its tests. Whatever fails there is wrong, because the program may be the cause."""
        nonce = secrets.token_hex(16)
        run = await self._run(
            Job(
                mode="tests",
                profile=profile_of(b"\n".join([self._source, tests.tests.encode(), tests.preamble.encode()])),
                source=self._source,
                payload=test_code.payload_of(tests, nonce),
                limits=test_code.longest(tests, self._limits, self._slot.config.judging_time_s),
            )
        )
        result = run.result.result()
        case = case_result(0, result)
        if result.status is RunStatus.OK and one_frame(run.answer) != nonce.encode():
            case = case_result(
                0, result, RunStatus.WRONG_ANSWER, last_line(result) or "the program ended before its tests"
            )
        return dataclasses.replace(whole_result([case], 1, self._tier), opaque=True)


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


def _why_unusable_tests(tests: Tests) -> str:
    """Why no program can be judged by these tests; for asserts their text has to be read."""
    if isinstance(tests, AssertTests):
        return ""
    if not tests.cases:
        return "there are no cases"
    if len(tests.cases) > MAX_CASES:
        return f"{len(tests.cases)} cases are more than {MAX_CASES}"
    if isinstance(tests, StdinTests):
        texts = (text for case in tests.cases for text in (case.stdin, case.expected or ""))
        return "a text of the tests has a lone surrogate" if any(encodable(text) != text for text in texts) else ""
    if not all(part.removesuffix("()").isidentifier() for part in tests.entry_point.split(".")):
        return f"entry_point {tests.entry_point!r} is no function and no Class().method"
    return ""
