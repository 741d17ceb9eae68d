"""The judge: a request's cases through the sandbox, one after the other in one slot's turn.

    programs        stdin in, stdout compared here
    function calls  arguments in, one call a process; the returned value comes out as plain data, compared here
    asserts         read as calls and values where their text allows it; else opaque: run with the program (``test_code``)

The cases of a Python program are run by one host while they leave no trace (see ``together``); others are run alone.

Expected values and the rules of comparison never enter the process of the program, except for opaque tests, whose
verdict is marked. A call is complete when its harness has written the value to a descriptor of its own, after the last
step; an exit code of 0 without the value is a wrong answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
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
    Frames,
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
from services.envgateway.sandbox.bare import endings, messages
from services.envgateway.sandbox.bare.endings import CaseRecord
from services.envgateway.sandbox.bare.harness.calls import framed
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import Job, SlotLease, SubmittedRun, profile_of, why_unusable
from services.envgateway.sandbox.pool import SandboxPool, compile_cpp, cpp_job
from services.envgateway.sandbox.records import ANSWER_BYTES, ExecutionResult

# --- Cases of one program that are run by one host: confined once, each case in a process of its own.


MOST_CASES = messages.MOST_INPUTS  # of one host
# that wait here and in the supervisor; a host with more ends, and its cases are run by themselves
_MOST_SAID_BYTES = 32 << 20
_HOST_S = 10.0  # beside the time of its cases: its start, and the messages between them


@dataclass(frozen=True, slots=True)
class HostedCase:
    """Input of a case for a host: its ``stdin``, or the ``call`` (entry_point, args, kwargs)."""

    limits: dict[str, float | int]
    stdin: bytes = b""
    call: dict[str, Any] | None = None

    def as_message(self, number: int) -> dict[str, Any]:
        needed = self.call if self.call is not None else {"input": number}
        return {"number": number, "output_bytes": self.limits["output_bytes"], **needed}


class CaseHost:
    """One host for cases of one program: ``start``, ``ask`` for more, ``end``. All are calls, or none is."""

    def __init__(
        self, slot: SlotLease, profile: str, source: bytes, cases: Sequence[HostedCase], budget_s: float, apart: bool
    ) -> None:
        """``budget_s``: no case is begun when the cases before have taken this long together. ``apart``: each case runs
        in a process of its own, for any text."""
        self._slot = slot
        self._num_cases, self._num_found = len(cases), 0
        limits = cases[0].limits
        self._wall_s = budget_s + float(limits["wall_s"]) + _HOST_S
        said = [2 * int(case.limits["output_bytes"]) + int(case.limits["answer_bytes"]) + 4096 for case in cases]
        self._said_bytes = min(sum(said), max(_MOST_SAID_BYTES, *said))
        settings = {name: limits[name] for name in ("cpu_s", "memory_bytes", "wall_s", "answer_bytes")} | {
            "budget_s": budget_s,
            "apart": apart,
            "cases": [case.as_message(number) for number, case in enumerate(cases)],
        }
        self._job = Job(
            mode="cases",
            profile=profile,
            source=source,
            payload=framed(json.dumps(settings).encode()),
            stdin=b"".join(case.stdin for case in cases),
            inputs=tuple(len(case.stdin) for case in cases) if cases[0].call is None else (),
            limits={**limits, "wall_s": self._wall_s, "answer_bytes": self._said_bytes},
            interactive=True,
        )
        self._run: SubmittedRun | None = None
        self._frames: Frames | None = None

    async def start(self, num_cases: int) -> list[CaseRecord]:
        """The records of the first cases, as ``ask``."""
        self._run = await self._slot.start(replace(self._job, payload=self._job.payload + _asking(num_cases)))
        self._frames = Frames(self._run, self._said_bytes)
        return await self._records()

    async def ask(self, num_cases: int) -> list[CaseRecord]:
        """The records of the next cases; fewer than asked for when the host has no record of a case, or no time left;
        more where further cases cost almost no time."""
        assert self._run is not None
        self._run.write(_asking(num_cases))
        return await self._records()

    async def _records(self) -> list[CaseRecord]:
        assert self._run is not None and self._frames is not None
        found: list[CaseRecord] = []
        try:
            async with asyncio.timeout(self._wall_s):
                while frame := await self._frames.next():
                    for record in endings.records(frame):
                        if record.number != self._num_found:
                            raise ValueError(f"a record of case {record.number} instead of {self._num_found}")
                        self._num_found += 1
                        found.append(record)
        except ValueError:  # no host writes this: its cases are run by themselves
            self._run.cancel()
        except TimeoutError:  # the supervisor does not answer, which the wait for the host's end says
            pass
        except asyncio.CancelledError:
            self._run.cancel()
            raise
        return found

    async def end(self) -> ExecutionResult:
        """End the host. Returns its result: COMPILE_ERROR for a source that does not compile; ``is_unfinished`` for
        cases to be run apart."""
        assert self._run is not None
        if self._num_found < self._num_cases:
            self._run.write(framed(b""))
        return await self._slot.wait(self._run, self._wall_s)


def _asking(num_cases: int) -> bytes:
    return framed(json.dumps({"cases": num_cases}).encode())


def is_unfinished(ended: ExecutionResult) -> bool:
    """Whether the cases without a record may still be run by one host, each in a process of its own: those before them were
    run in one, until one was not simply done."""
    return ended.exit_code == messages.UNFINISHED_EXIT or ended.signal == signal.SIGALRM


def result_of(record: CaseRecord, case: HostedCase, tier: str) -> ExecutionResult:
    """A case's record in the form of the supervisor's result."""
    end = record.ending(float(case.limits["cpu_s"]))
    return ExecutionResult(
        status=end.status,
        exit_code=end.exit_code,
        signal=end.signal,
        stdout=record.stdout,
        stderr=record.stderr,
        truncated=record.truncated,
        wall_s=record.wall_s,
        cpu_s=record.cpu_s,
        peak_memory_bytes=record.peak_memory_bytes,
        tier=tier,
        detail=end.detail,
        slot_s=record.wall_s,
    )


MAX_CASES = 10_000
_MORE_WHEN_PASSED = 8
_SLOW_TO_COMPARE = 1 << 12  # bytes from which comparing leaves the event loop, for a process that can be killed


@dataclass(frozen=True, slots=True)
class _Case:
    """Input of a case, for a host or ``alone``; ``judged`` gets the case's index, its result and its answer."""

    hosted: HostedCase
    alone: Callable[[], Job]
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
        results = await self._together(cases) if len(cases) > 1 and self._request.language == "python" else []
        longest_s = self._slot.config.judging_time_s
        for index, case in enumerate(cases[len(results) :], start=len(results)):
            if self._is_decided(results):
                break
            if self._spent_s >= longest_s:
                detail = f"the cases before it took {longest_s:g} s (envgateway.sandbox.judging_time_s)"
                results.append(CaseResult(index=index, verdict=RunStatus.TIME_LIMIT, detail=detail))
            elif results and results[-1].verdict is RunStatus.COMPILE_ERROR:
                results.append(dataclasses.replace(results[-1], index=index))
            else:
                run = await self._run(case.alone())
                results.append(await case.judged(index, run.result.result(), run.answer))
        return whole_result(results, len(cases), self._tier)

    def _is_decided(self, results: list[CaseResult]) -> bool:
        return self._request.stop_early and bool(results) and results[-1].verdict is not RunStatus.OK

    async def _together(self, cases: list[_Case]) -> list[CaseResult]:
        """The results of the first cases, by hosts. Those that are missing are run by themselves."""
        results: list[CaseResult] = []
        apart = False
        while len(results) < len(cases) and not self._is_decided(results):
            some = cases[len(results) : len(results) + MOST_CASES]
            found, ended = await self._by_host(some, len(results), apart)
            results += found
            if len(found) == len(some):
                continue
            if self._request.stop_early or apart or not is_unfinished(ended):
                break  # the next is likely to be the one that fails, or one that hosts do not suit
            apart = True
        return results

    async def _by_host(self, cases: list[_Case], first: int, apart: bool) -> tuple[list[CaseResult], ExecutionResult]:
        """The results of some of these cases, of which the first is number ``first``; and how the host ended."""
        budget_s = self._slot.config.judging_time_s - self._spent_s
        hosted = [case.hosted for case in cases]
        host = CaseHost(self._slot, self._profile, self._source, hosted, budget_s, apart)
        results: list[CaseResult] = []
        # all at once, or, where the first failure is the last case, more the more have passed
        num_asked = 1 if self._request.stop_early else len(cases)
        while len(results) < len(cases) and not self._is_decided(results):
            found = await (host.ask(num_asked) if results else host.start(num_asked))
            for record, case in zip(found, cases[len(results) :], strict=False):
                self._spent_s += record.wall_s
                result = result_of(record, case.hosted, self._tier)
                results.append(await case.judged(first + len(results), result, record.answer))
                if self._is_decided(results):
                    break
            if len(found) < num_asked:
                break
            num_asked = min(_MORE_WHEN_PASSED * num_asked, len(cases) - len(results))
        ended = await host.end()
        if not results and ended.status is RunStatus.COMPILE_ERROR:
            results.append(case_result(first, ended))
        return results, ended

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

        def alone() -> Job:
            if artefact is not None:
                return cpp_job(artefact, stdin, limits)
            return Job(mode="judged", profile=self._profile, source=self._source, stdin=stdin, limits=limits)

        async def judged(index: int, result: ExecutionResult, answer: bytes) -> CaseResult:
            if result.status is not RunStatus.OK or case.expected is None:
                return case_result(index, result)
            wrong = await self._compare(TextCheck(case.expected, self._request.comparison), result.stdout)
            return case_result(index, result, RunStatus.WRONG_ANSWER if wrong else RunStatus.OK, wrong)

        return _Case(HostedCase(limits, stdin), alone, judged)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, entry_point: str, args: Any, kwargs: Any, check: Check, applied: Sequence[str] = ()) -> _Case:
        call = {"entry_point": entry_point, "args": args, "kwargs": kwargs, "applied": applied}

        def alone() -> Job:
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

        return _Case(HostedCase(self._limits, call=call), alone, judged)

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
