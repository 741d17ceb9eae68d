"""Reward functions by name: the built-in ones, and those that the recipe names by import path.

A caller names a function and never a module to import: else any client of rewards could run any code of this machine in
the gateway's own process.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import structlog

from services.common.dataset_rows import BuiltInReward
from services.common.errors import CapacityError, DeadlineError, InvalidRequestError, RollmillError
from services.common.importing import check_call, load_object, told
from services.common.telemetry.metrics import Lane
from services.common.text.programs import program_of, with_preamble
from services.common.text.thoughts import after_thoughts
from services.envgateway.calls import (
    CORRECT,
    THREADS,
    RewardFunction,
    RewardOutcome,
    RewardResult,
    grader_failed,
    truth_of,
)
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
from services.envgateway.queue import JobQueue
from services.envgateway.rewards.math import boxed_match, compare_plainly, final_answers
from services.envgateway.rewards.pool import MAX_COMPLETION_CHARS, MathPool
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits

# --- ``code``: a completion is right when its program passes every test of the task.


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


log = structlog.get_logger()


class ReasoningGymReward:
    """The score function of the row's own dataset, in a worker that can be killed.

    Score functions parse what a policy wrote, some with sympy: as for Math-Verify, an answer that takes too long is
    worth 0, and a worker that fails without its doing is no reward.
    """

    def __init__(self, pool: MathPool) -> None:
        self._pool = pool

    async def __call__(self, task: Mapping[str, Any], completion: str) -> RewardResult:
        reference = task.get(BuiltInReward.REASONING_GYM)
        if not isinstance(reference, Mapping):
            raise InvalidRequestError(
                "the task has no column reasoning_gym, and the reward reasoning_gym scores tasks of data.train.reasoning_gym only: "
                "name another reward"
            )
        asked = {**reference, "question": task.get("question")}
        return await self._pool.grade(json.dumps(asked), completion)


class MathReward:
    """Right when Math-Verify accepts the answer, or when that is clear without algebra.

    The last box after the thought decides; without a box, LaTeX and plain expressions in the text. No numeric tolerance.
    """

    def __init__(self, pool: MathPool) -> None:
        self._pool = pool

    async def __call__(self, task: Mapping[str, Any], completion: str) -> RewardResult:
        truth = truth_of(task)
        answers = final_answers(after_thoughts(completion)[-MAX_COMPLETION_CHARS:])
        plain = compare_plainly(answers[0], truth) if len(answers) == 1 else None
        return plain or await self._pool.grade(truth, completion)


FUNCTION_TIMEOUT_S = 60.0


class Rewards:
    """``compute`` scores a completion with a named function."""

    def __init__(
        self,
        math_pool: MathPool,
        queue: JobQueue | None = None,
        paths: Iterable[str] = (),
        *,
        case_time_s: float | None = None,
        reasoning_pool: MathPool | None = None,
    ) -> None:
        """Without a queue there is no ``code`` reward; ``case_time_s`` bounds one test case. ``paths`` are the import
        paths that callers may name (``envgateway.rewards``); ``ConfigError`` for one that cannot be loaded."""
        self._functions: dict[str, RewardFunction] = {
            BuiltInReward.BOXED: boxed_match,
            BuiltInReward.MATH: MathReward(math_pool),
        }
        if queue is not None:
            self._functions[BuiltInReward.CODE] = CodeReward(queue, case_time_s)
        if reasoning_pool is not None:
            self._functions[BuiltInReward.REASONING_GYM] = ReasoningGymReward(reasoning_pool)
        self._functions |= {path: _load(path) for path in paths}
        self.counts: Counter[RewardOutcome] = Counter()

    async def compute(self, name: str, task: Mapping[str, Any], completion: str) -> RewardResult:
        """Score one completion.

        Raises:
            InvalidRequestError: an unknown name, or a task that the function cannot use.
            InfrastructureError: a service that the function needs has failed; never a reward.
        """
        function = self._find(name)
        timeout_s = float(getattr(function, "timeout_s", FUNCTION_TIMEOUT_S))
        try:
            async with asyncio.timeout(timeout_s):
                result = await _call(function, task, completion)
        except RollmillError:
            raise
        except TimeoutError:
            result = grader_failed(f"{name} took longer than {timeout_s:g} s")
        except Exception as error:  # user code may raise any error; an error is counted and is no reward
            log.warning("reward.failed", reward=name, exc_info=error)
            result = grader_failed(f"{name} raised {told(error)}")
        self.counts[result.outcome] += 1
        return result

    def _find(self, name: str) -> RewardFunction:
        function = self._functions.get(name)
        if function is not None:
            return function
        known = ", ".join(sorted(self._functions))
        if ":" in name:
            raise InvalidRequestError(
                f"the reward {name!r} is not one that this gateway offers: name its import path in envgateway.rewards of "
                f"the recipe, or write one of {known}"
            )
        raise InvalidRequestError(f"unknown reward {name!r}; write one of {known}")


def _load(path: str) -> RewardFunction:
    loaded = load_object(path)
    check_call(loaded, f"envgateway.rewards: {path}", "def reward(task, completion) -> float", "task", "completion")
    return loaded  # type: ignore[no-any-return]


async def _call(function: RewardFunction, task: Mapping[str, Any], completion: str) -> RewardResult:
    if function is boxed_match:
        return boxed_match(task, completion)  # a few microseconds: not worth a thread
    result = await THREADS.call(function, task, completion)
    return result if isinstance(result, RewardResult) else RewardResult.of(float(result))
