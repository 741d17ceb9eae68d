"""Reward functions by name: the built-in ones, and those that the recipe names by import path.

A caller names a function and never a module to import: else any client of rewards could run any code of this machine in
the gateway's own process.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from services.common.errors import InvalidRequestError, RollmillError
from services.common.importing import load_object
from services.common.reasoning_gym import COLUMN
from services.common.records.dataset_rows import BuiltInReward
from services.common.text.thoughts import after_thoughts
from services.common.user_code import check_call, told
from services.envgateway.calls import call_plain_or_async
from services.envgateway.queue.local import JobQueue
from services.envgateway.rewards.code import CodeReward
from services.envgateway.rewards.math.boxed import boxed_match, compare_plainly, final_answers
from services.envgateway.rewards.math.pool import MAX_COMPLETION_CHARS, MathPool
from services.envgateway.rewards.result import RewardFunction, RewardOutcome, RewardResult, grader_failed, truth_of

log = structlog.get_logger()


class ReasoningGymReward:
    """The score function of the row's own dataset, in a worker that can be killed.

    Score functions parse what a policy wrote, some with sympy: as for Math-Verify, an answer that takes too long is
    worth 0, and a worker that fails without its doing is no reward.
    """

    def __init__(self, pool: MathPool) -> None:
        self._pool = pool

    async def __call__(self, task: Mapping[str, Any], completion: str) -> RewardResult:
        reference = task.get(COLUMN)
        if not isinstance(reference, Mapping):
            raise InvalidRequestError(
                f"the task has no column {COLUMN}, and the reward reasoning_gym scores tasks of data.train.reasoning_gym only: "
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
    result = await call_plain_or_async(function, task, completion)
    return result if isinstance(result, RewardResult) else RewardResult.of(float(result))
