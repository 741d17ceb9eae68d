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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from services.common.records import encodable
from services.common.telemetry.metrics import Lane
from services.common.text.asserted_calls import AssertedCall
from services.common.text.literals import to_tree
from services.common.text.programs import UnusableTestsError
from services.envgateway.judge import test_code
from services.envgateway.judge.checks import Check, TextCheck, ValueCheck, failure, packed
from services.envgateway.judge.compare import VALUE_MODES, value_rule
from services.envgateway.judge.records import (
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
    whole_result,
)
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import Job, profile_of, why_unusable
from services.envgateway.sandbox.pool import SandboxPool, SlotLease, compile_cpp, cpp_job
from services.envgateway.sandbox.records import ANSWER_BYTES, ExecutionResult

MAX_CASES = 10_000
_SLOW_TO_COMPARE = 1 << 12  # bytes from which comparing leaves the event loop, for a process that can be killed


class Judge:
    """Judges over a sandbox. A request takes one slot at a time, so its cost in slots is that of one execution."""

    def __init__(
        self, sandbox: SandboxPool, compare_apart: Callable[[bytes, bytes], Awaitable[str]] | None = None
    ) -> None:
        """``compare_apart``: compares a large answer, by its packed check, in a process that can be killed; left out, a
        thread does, for programs that are trusted."""
        self._sandbox = sandbox
        self._compare_apart = compare_apart

    async def judge(
        self, request: JudgeRequest, lane: Lane = Lane.INTERACTIVE, wait_s: float | None = None
    ) -> JudgeResult:
        """Every case's verdict. Cancelling the caller kills the running programs.

        Raises:
            CapacityError: no slot came free within ``wait_s``; says when to come back.
        """
        if wrong := _why_refused(request):
            return JudgeResult(verdict=RunStatus.INVALID_REQUEST, detail=wrong, tier=self._sandbox.tier)
        direct: tuple[AssertedCall, ...] | None = None
        broken = _why_unusable_tests(request.tests)
        if isinstance(request.tests, AssertTests):
            try:
                direct = await asyncio.to_thread(request.tests.calls)
            except UnusableTestsError as error:
                broken = str(error)
        if broken:
            return JudgeResult(verdict=RunStatus.INVALID_TESTS, detail=broken, tier=self._sandbox.tier)
        async with self._sandbox.lease(lane, wait_s) as slot:
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
                artefact: bytes | None = None
                if self._request.language == "cpp":
                    made = await compile_cpp(self._slot, self._request.code)
                    if isinstance(made, ExecutionResult):
                        return self._not_made(made, len(cases))
                    artefact = made
                return await self._all((self._program(case, artefact) for case in cases), len(cases))
            case CallTests() as tests:
                rule = value_rule(self._request.comparison)
                calls = (
                    self._call(tests.entry_point, to_tree(case.args), to_tree(case.kwargs),
                               ValueCheck(to_tree(case.expected), rule, [*map(to_tree, case.also)]))
                    for case in tests.cases
                )  # fmt: skip
                return await self._all(calls, len(tests.cases))
            case AssertTests() as tests:
                if direct is None:
                    return await self._opaque(tests)
                calls = (self._call(one.entry_point, one.args, one.kwargs, one, one.applied) for one in direct)
                return await self._all(calls, len(direct))

    async def _all(self, cases: Iterable[tuple[Job, Check | None]], num_cases: int) -> JudgeResult:
        """The result of each case, until their total time is used up; a program that does not compile is not tried
        again."""
        results: list[CaseResult] = []
        longest_s = self._slot.config.judging_time_s
        for index, (job, check) in enumerate(cases):
            if self._request.stop_early and results and results[-1].verdict is not RunStatus.OK:
                break
            if self._spent_s >= longest_s:
                detail = f"the cases before it took {longest_s:g} s (envgateway.sandbox.judging_time_s)"
                results.append(CaseResult(index=index, verdict=RunStatus.TIME_LIMIT, detail=detail))
            elif results and results[-1].verdict is RunStatus.COMPILE_ERROR:
                results.append(dataclasses.replace(results[-1], index=index))
            else:
                results.append(await self._judged(index, await self._run(job), check))
        return whole_result(results, num_cases, self._tier)

    async def _run(self, job: Job) -> ExecutionResult:
        """Run a case, and repeat the run once after a failure of the machinery: the program is not at fault."""
        result = await self._slot.run(job)
        if result.status is RunStatus.INFRA_ERROR:
            result = await self._slot.run(job)
        self._spent_s += result.slot_s
        return result

    async def _judged(self, index: int, result: ExecutionResult, check: Check | None) -> CaseResult:
        if result.status is not RunStatus.OK or check is None:
            return case_result(index, result)
        answer = result.stdout if isinstance(check, TextCheck) else one_frame(result.answer)
        wrong = "the program ended before the call returned"
        if answer is not None:
            wrong = await self._compare(check, answer)
        return case_result(index, result, RunStatus.WRONG_ANSWER if wrong else RunStatus.OK, wrong)

    def _program(self, case: StdinCase, artefact: bytes | None) -> tuple[Job, Check | None]:
        limits, stdin = dict(self._limits), case.stdin.encode()
        check: Check | None = None
        if case.expected is not None:  # room for an answer as long as the right one, and a wrong one to be seen
            check = TextCheck(case.expected, self._request.comparison)
            limits["output_bytes"] = max(limits["output_bytes"], min(2 * len(case.expected) + 4096, ANSWER_BYTES))
        if artefact is not None:
            return cpp_job(artefact, stdin, limits), check
        return Job(mode="judged", profile=self._profile, source=self._source, stdin=stdin, limits=limits), check

    def _not_made(self, made: ExecutionResult, num_cases: int) -> JudgeResult:
        if made.status is RunStatus.INVALID_REQUEST:
            return JudgeResult(verdict=made.status, detail=made.detail, tier=self._tier)
        first = case_result(0, made)
        count = 1 if self._request.stop_early else num_cases
        return whole_result([dataclasses.replace(first, index=i) for i in range(count)], num_cases, self._tier)

    def _call(
        self, entry_point: str, args: Any, kwargs: Any, check: Check, applied: Sequence[str] = ()
    ) -> tuple[Job, Check]:
        call = {"entry_point": entry_point, "args": args, "kwargs": kwargs, "applied": applied}
        payload = json.dumps(call).encode()
        return Job(mode="call", profile=self._profile, source=self._source, payload=payload, limits=self._limits), check

    async def _opaque(self, tests: AssertTests) -> JudgeResult:
        """One run of the program with its tests. Whatever fails there is wrong, because the program may be the cause."""
        nonce = secrets.token_hex(16)
        result = await self._run(
            Job(
                mode="tests",
                profile=profile_of(b"\n".join([self._source, tests.tests.encode(), tests.preamble.encode()])),
                source=self._source,
                payload=test_code.payload_of(tests, nonce),
                limits=test_code.longest(tests, self._limits, self._slot.config.judging_time_s),
            )
        )
        case = case_result(0, result)
        if result.status is RunStatus.OK and one_frame(result.answer) != nonce.encode():
            why = last_line(result) or "the program ended before its tests"
            case = case_result(0, result, RunStatus.WRONG_ANSWER, why)
        return dataclasses.replace(whole_result([case], 1, self._tier), opaque=True)


def _why_refused(request: JudgeRequest) -> str:
    if wrong := why_unusable(request.code, request.language):
        return wrong
    tests, mode = request.tests, request.comparison.mode
    if request.language == "cpp" and not isinstance(tests, StdinTests):
        return "C++ programs are judged by stdin and stdout only"
    if mode is None or isinstance(tests, AssertTests) or (mode in VALUE_MODES) is isinstance(tests, CallTests):
        return ""
    return f"comparison {mode.value!r} does not suit these tests"


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
