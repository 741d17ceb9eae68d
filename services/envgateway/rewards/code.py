"""``code``: a completion is right when its program passes every test of the task.

``program_of`` finds the program in a completion. A task's row has its tests in one of the forms

    {"kind": "stdin",  "cases": [{"stdin": text, "expected": text}, ...]}
    {"kind": "call",   "entry_point": name, "cases": [{"args": [...], "expected": value, "also": [value, ...]}, ...],
     "integer_keys": bool}
    {"kind": "assert", "tests": code, "entry_point": name, "preamble": code, "names": [name, ...]}

``also``: other values that are right. ``integer_keys``: each dictionary in the arguments gets integer keys where all its
keys are integers written as text.

Cases are run until one fails, and the first failure decides the details. A rollout waits for the reward, as for a tool:
the lane is the interactive one. The time of a program counts from its start (``sandbox.judging_time_s``); a judgement that
gets no slot in time is to be asked for again. The programs of one task leave a slot to others, however slow they are.
Machinery that failed, and tests that can judge no program, are no reward.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from services.common.errors import CapacityError, DeadlineError, InvalidRequestError
from services.common.telemetry.gateway_queue import Lane
from services.common.text.programs import program_of, with_preamble
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
    Tests,
)
from services.envgateway.queue.local import JobQueue
from services.envgateway.rewards.result import CORRECT, RewardOutcome, RewardResult, grader_failed
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits

JUDGING_TIMEOUT_S = 600.0  # of a call: a judgement of 500 s at most (sandbox.judging_time_s), and two waits
WAIT_S = 45.0  # for a place among the task's programs, and as long for a slot
_JUDGED_S = 595.0  # of a judgement with its waits: ends before the call does, so that a wait at workers is told as one
_INTEGER = re.compile(r"-?\d{1,18}")


class CodeReward:
    """A reward function over the judge."""

    timeout_s = JUDGING_TIMEOUT_S

    def __init__(self, queue: JobQueue, case_time_s: float | None = None) -> None:
        """``case_time_s``: of a program on one case; None is the sandbox's limit."""
        self._queue = queue
        self._limits = ExecutionLimits(wall_s=case_time_s)
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by task

    async def __call__(self, task: Mapping[str, Any], completion: str) -> RewardResult:
        """Raises ``InvalidRequestError`` for a task with tests of unknown form, and ``CapacityError`` when no slot came free
        in time."""
        tests = read_tests(task)
        code = program_of(completion)
        if not code.strip():
            return RewardResult(outcome=RewardOutcome.UNPARSED, detail="there is no program in the completion")
        # the completion may go on where the prompt of asserts ended
        begun = (tests.preamble, tests.entry_point) if isinstance(tests, AssertTests) else ("", "")
        code = with_preamble(code, *begun)
        request = JudgeRequest(code=code, tests=tests, limits=self._limits, stop_early=True)
        try:
            result = await self._queue.run(
                request,
                lane=Lane.INTERACTIVE,
                request_id="",
                deadline_s=_JUDGED_S,
                wait_s=WAIT_S,
                places=self._places_of(tests),
            )
        except DeadlineError as error:  # it waited, at workers: no program runs for so long
            raise CapacityError(error.message, retry_after_s=1.0) from None
        return _reward(result)

    def _places_of(self, tests: Tests) -> asyncio.Semaphore:
        """The places of a task's programs: all slots but one, where there are several."""
        key = tests.tests if isinstance(tests, AssertTests) else repr(tests.cases[:1])
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = asyncio.Semaphore(max(1, self._queue.num_slots - 1))
        return places


def read_tests(task: Mapping[str, Any]) -> Tests:
    """The tests of a row; ``InvalidRequestError`` names the fault."""
    tests = task.get("tests")
    if not isinstance(tests, Mapping):
        raise InvalidRequestError("the task has no tests: a row needs `tests` with a `kind`")
    try:
        if tests["kind"] == "stdin":
            cases = tuple(StdinCase(stdin=case["stdin"], expected=case.get("expected")) for case in tests["cases"])
            return StdinTests(cases=cases)
        if tests["kind"] == "call":
            as_meant = _with_integer_keys if tests.get("integer_keys") else lambda value: value
            return CallTests(
                entry_point=tests["entry_point"],
                cases=tuple(
                    CallCase(
                        args=tuple(map(as_meant, case["args"])),
                        expected=case["expected"],
                        also=tuple(case.get("also", ())),
                    )
                    for case in tests["cases"]
                ),
            )
        if tests["kind"] == "assert":
            return AssertTests(
                tests=tests["tests"],
                entry_point=tests.get("entry_point", ""),
                preamble=tests.get("preamble", ""),
                names=tuple(tests.get("names", ())),
            )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"the task's tests have the wrong form: {error!r}") from None
    raise InvalidRequestError(f"the task's tests are of kind {tests['kind']!r}; there are stdin, call and assert")


def _with_integer_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_integer_keys(held) for held in value]
    if isinstance(value, dict):
        as_key = int if all(_INTEGER.fullmatch(key) for key in value) else str
        return {as_key(key): _with_integer_keys(held) for key, held in value.items()}
    return value


def _reward(result: JudgeResult) -> RewardResult:
    if result.verdict is RunStatus.OK:
        return replace(CORRECT, opaque=result.opaque)
    passed = f"{result.num_passed} of {result.num_cases} cases passed before"
    detail = "; ".join(part for part in (f"{result.verdict}", passed, result.detail) if part)
    if not result.verdict.is_about_the_program:
        return grader_failed(detail)
    return RewardResult(outcome=RewardOutcome.WRONG, detail=detail, opaque=result.opaque)
