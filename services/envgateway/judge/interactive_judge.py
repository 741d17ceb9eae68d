"""Judges tests that must be executed: their code runs in one process, the program in another, and the judge relays.

    checker (companion slot) ──call──> here ──call──> program (slot)
            <──value──            <──value──

The checker never shares a process or a user with the program, so its report is true; the program is handed
arguments, one call at a time, and gives values back as plain data. A program that dies is started again for the next
case. The checker's last word carries a nonce: tests that did not reach their end are not passed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import replace
from typing import Any

from services.common.text.assert_tests import TestNames, completed
from services.envgateway.judge.frames import Frames, framed
from services.envgateway.judge.records import AssertTests, CaseResult, JudgeRequest
from services.envgateway.judge.results import case_result
from services.envgateway.sandbox.bare.statuses import STOOD_STILL_S, RunStatus
from services.envgateway.sandbox.bare.supervisor.places import COMPANION
from services.envgateway.sandbox.connection import SubmittedRun
from services.envgateway.sandbox.jobs import Job, profile_of
from services.envgateway.sandbox.lease import SlotLease
from services.envgateway.sandbox.records import ExecutionResult

_MOST_LIMITS = 20  # the whole request may take this many times the limit of one case
_MOST_ANSWERS = 8  # all values that go back and forth together, in largest values
_REPLY, _DIED = b"R", b"D"
_LOOK_S = 0.25  # a wait that takes much longer was stopped with the machine


class InteractiveJudge:
    """Judges one request. ``run`` returns its cases; at its return every process that the judge started has been told
    to end."""

    def __init__(
        self, slot: SlotLease, request: JudgeRequest, tests: AssertTests, names: TestNames, num_asserts: int
    ) -> None:
        self._slot = slot
        self._request = request
        self._tests = tests
        self._limits = request.limits.within(slot.config)
        self._names = names
        self._num_calls = 0
        self._unusable = ""
        self._factor = max(1, min(num_asserts, _MOST_LIMITS))
        self._program: SubmittedRun | None = None
        self._frames: Frames | None = None
        self._died: ExecutionResult | None = None  # the program's end, in the case that is being asked
        self._case_time_s = 0.0
        self._has_answered = False  # the program, in any way

    async def run(self) -> list[CaseResult] | str:
        """The cases, or why the tests cannot judge: the tests are at fault for an error before their first call of the
        program."""
        nonce = secrets.token_hex(16)
        source = json.dumps(
            {
                "tests": self._tests.tests,
                "preamble": completed(self._tests.preamble),
                "entry_point": self._names.entry_point,
                "remote": sorted(self._names.remote),
                "aliases": sorted(self._names.aliases),
                "supplied": self._names.supplied,
                "nonce": nonce,
                "prelude": self._names.has_prelude,
            }
        ).encode()
        job = Job(
            mode="tests",
            profile=profile_of(self._tests.tests.encode()),
            source=source,
            interactive=True,
            place=COMPANION,
            limits=self._all_limits(extra=2.0),
        )
        checker = await self._slot.start(job)
        try:
            cases, complete = await self._listen(checker, nonce)
        finally:
            runs = [run for run in (checker, self._program) if run is not None]
            for run in runs:
                run.cancel()
        for run in runs:  # an answer is given when both slots are empty
            await self._slot.wait(run, float(job.limits["wall_s"]))
        if self._unusable:
            return self._unusable
        return cases if complete else self._unfinished(cases, checker.result.result())

    async def _listen(self, checker: SubmittedRun, nonce: str) -> tuple[list[CaseResult], bool]:
        frames = Frames(checker, self._slot.config.answer_bytes)
        cases: list[CaseResult] = []
        while (frame := await frames.next()) is not None:
            message = _parsed(frame)
            if message is None:
                break
            if "unusable" in message:
                self._unusable = str(message["unusable"])
                return cases, True
            if "call" in message:
                self._num_calls += 1
                checker.write(framed(await self._call(message["call"])))
            elif "done" in message:
                return cases, bool(message["done"] == nonce and message["cases"] == len(cases))
            else:
                case = self._case(message)
                if case.index < len(cases):  # told again: the first failure counts
                    if cases[case.index].verdict is RunStatus.OK:
                        cases[case.index] = case
                else:
                    cases.append(case)
                if self._request.stop_early and case.verdict is not RunStatus.OK:
                    return cases, True
        return cases, False

    def _case(self, message: dict[str, Any]) -> CaseResult:
        died, self._died = self._died, None
        spent, self._case_time_s = self._case_time_s, 0.0
        index, detail = message["case"], message["detail"]
        if died is not None:
            verdict = died.status
            if died.status is RunStatus.OK:
                verdict, detail = RunStatus.WRONG_ANSWER, "the program ended before it answered"
            return case_result(index, died, verdict, died.detail or detail)
        verdicts = {"pass": RunStatus.OK, "raised": RunStatus.RUNTIME_ERROR}
        verdict = verdicts.get(message["outcome"], RunStatus.WRONG_ANSWER)
        return CaseResult(index=index, verdict=verdict, detail=detail, wall_s=spent)

    # -- the program ----------------------------------------------------------------------------------------------

    async def _call(self, call: dict[str, Any]) -> bytes:
        """The message for the checker: the program's reply, or that the program died."""
        try:
            if self._program is None:
                await self._start_program()
            assert self._program is not None and self._frames is not None
            self._program.write(framed(json.dumps(call).encode()))
            try:
                reply = await self._reply(self._frames)
            except TimeoutError:
                return await self._end_program(overdue=True)
            self._has_answered = True
            return _REPLY + reply if reply is not None else await self._end_program()
        except asyncio.CancelledError:
            if self._program is not None:
                self._program.cancel()
            raise

    async def _reply(self, frames: Frames) -> bytes | None:
        """The program's next frame. Raises ``TimeoutError`` when the time of the case is used up; a time in which this
        process did not go on is left out."""
        while (left_s := float(self._limits["wall_s"]) - self._case_time_s) > 0:
            began, look_s = time.monotonic(), min(left_s, _LOOK_S)
            try:
                async with asyncio.timeout(look_s):
                    return await frames.next()
            except TimeoutError:
                continue
            finally:
                spent_s = time.monotonic() - began
                self._case_time_s += spent_s if spent_s <= look_s + STOOD_STILL_S else look_s
        raise TimeoutError

    async def _start_program(self) -> None:
        source = self._request.code.encode()
        settings = json.dumps({"prelude": self._names.has_prelude}).encode()
        job = Job(
            mode="session",
            profile=profile_of(source),
            source=source,
            payload=framed(settings),
            interactive=True,
            limits=self._all_limits(),
        )
        self._program = await self._slot.start(job)
        self._frames = Frames(self._program, self._slot.config.answer_bytes)

    async def _end_program(self, overdue: bool = False) -> bytes:
        """Wait for the program to end; its end is the verdict of the case."""
        program, self._program, self._frames = self._program, None, None
        assert program is not None
        program.cancel()
        result = await self._slot.wait(program, float(self._all_limits()["wall_s"]))
        if overdue:
            result = _ended_by_us(result, RunStatus.TIME_LIMIT, "wall time")
        else:
            result = _ended_by_us(result, RunStatus.OUTPUT_LIMIT, "an answer that is too large, or no answer")
        self._died = result
        return _DIED + result.status.value.encode()

    # -- limits ---------------------------------------------------------------------------------------------------

    def _all_limits(self, extra: float = 1.0) -> dict[str, float | int]:
        limits = dict(self._limits)
        longest = max(self._slot.config.judging_time_s, float(limits["wall_s"]))
        for name in ("wall_s", "cpu_s"):
            limits[name] = min(limits[name] * self._factor * extra, longest)
        limits["answer_bytes"] = limits["answer_bytes"] * _MOST_ANSWERS
        return limits

    def _unfinished(self, cases: list[CaseResult], result: ExecutionResult) -> list[CaseResult] | str:
        """The checker ended before the tests did: too slow, too large, or the tests do not compile.

        The program is at fault for the effects of its values: else a program could cause a new sample by them.
        """
        if self._has_answered and (result.signal is not None or result.status is RunStatus.CANCELLED):
            result = _ended_by_us(result, RunStatus.OUTPUT_LIMIT, "too much came of the program's answers")
            return [*cases, case_result(len(cases), result, detail=f"in the tests: {result.detail}")]
        ended = result.status in (RunStatus.COMPILE_ERROR, RunStatus.RUNTIME_ERROR, RunStatus.OK)
        failed = result.status in (RunStatus.CANCELLED, RunStatus.INFRA_ERROR)
        if not self._num_calls and not failed:
            said = result.stderr.decode(errors="replace").strip().splitlines()
            why = (said[-1] if said else "they end by themselves") if ended else result.detail or result.status.value
            return f"the tests do not run: {why}"
        verdict = RunStatus.INFRA_ERROR if failed else RunStatus.WRONG_ANSWER if ended else None
        return [*cases, case_result(len(cases), result, verdict, f"in the tests: {result.detail}")]


def _parsed(frame: bytes) -> dict[str, Any] | None:
    """None for a frame that our harness never writes: the tests have written to its descriptor."""
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    known = isinstance(message, dict) and any(name in message for name in ("call", "case", "done", "unusable"))
    return message if known else None


def _ended_by_us(result: ExecutionResult, status: RunStatus, detail: str) -> ExecutionResult:
    """The program's end is ours, for this reason; an end of its own, a moment before, has precedence."""
    return replace(result, status=status, detail=detail) if result.status is RunStatus.CANCELLED else result
