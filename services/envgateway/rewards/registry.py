"""Reward functions by name: the built-in ones, and those that the recipe names by import path.

A caller names a function and never a module to import: whoever may ask for a reward could else run any code of this
machine in the gateway's own process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from services.common.errors import ConfigError, InvalidRequestError, MillraceError
from services.common.importing import load_object
from services.envgateway.calls import call_plain_or_async
from services.envgateway.rewards.boxed import boxed_match
from services.envgateway.rewards.code import CodeReward, JudgeQueue
from services.envgateway.rewards.math import MathReward
from services.envgateway.rewards.math_pool import MathPool
from services.envgateway.rewards.result import RewardFunction, RewardOutcome, RewardResult, grader_failed

log = structlog.get_logger()

FUNCTION_TIMEOUT_S = 60.0


class Rewards:
    """``compute`` scores a completion with a named function."""

    def __init__(
        self,
        math_pool: MathPool,
        queue: JudgeQueue | None = None,
        paths: Iterable[str] = (),
        *,
        case_time_s: float | None = None,
    ) -> None:
        """Without a queue there is no ``code`` reward; ``case_time_s`` is its time of one test case. ``paths`` are the import paths that callers may name
        (``envgateway.rewards``); ``ConfigError`` for one that cannot be loaded."""
        self._functions: dict[str, RewardFunction] = {"boxed": boxed_match, "math": MathReward(math_pool)}
        if queue is not None:
            self._functions["code"] = CodeReward(queue, case_time_s)
        self._functions |= {path: _load(path) for path in paths}
        self.counts: Counter[RewardOutcome] = Counter()

    async def compute(self, name: str, task: Mapping[str, Any], completion: str) -> RewardResult:
        """Score one completion.

        Raises:
            InvalidRequestError: an unknown name, or a task that the function cannot use.
            InfrastructureError: what the function needs has failed; never a reward.
        """
        function = self._find(name)
        timeout_s = float(getattr(function, "timeout_s", FUNCTION_TIMEOUT_S))
        try:
            async with asyncio.timeout(timeout_s):
                result = await _call(function, task, completion)
        except MillraceError:
            raise
        except TimeoutError:
            result = grader_failed(f"{name} took longer than {timeout_s:g} s")
        except Exception as error:  # a user's function may raise anything; it is told, counted and no reward
            log.warning("reward.failed", reward=name, exc_info=error)
            result = grader_failed(f"{name} raised {type(error).__name__}: {error}")
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
    if not callable(loaded):
        raise ConfigError(f"envgateway.rewards: {path} is a {type(loaded).__name__}, not a function")
    return loaded  # type: ignore[no-any-return]


async def _call(function: RewardFunction, task: Mapping[str, Any], completion: str) -> RewardResult:
    if function is boxed_match:
        return boxed_match(task, completion)  # a few microseconds: not worth a thread
    result = await call_plain_or_async(function, task, completion)
    return result if isinstance(result, RewardResult) else RewardResult.of(float(result))
