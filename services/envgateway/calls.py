"""Threads for user functions; joins calls that repeat a key, and waits for a place among calls that run."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.common.dataset_rows import TRUTH_FIELDS, truth_in
from services.common.errors import CapacityError, InvalidRequestError
from services.common.system.threads import DaemonThreads

THREADS = DaemonThreads(64)  # they run mostly Python, so more would only take turns


Result = TypeVar("Result")


async def take_place(places: asyncio.Semaphore | asyncio.Lock, limit_s: float | None, busy: str) -> None:
    """Acquire a semaphore or lock. Raises ``CapacityError`` with the text ``busy`` where that takes longer than ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            await places.acquire()
    except TimeoutError:
        raise CapacityError(busy, retry_after_s=1.0) from None


class SharedCalls(Generic[Result]):
    """One execution per key at a time: a call under the key of a running one joins it. Nothing is kept after the end.

    The execution is cancelled when its last waiter leaves.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Result]] = {}
        self._waiting: Counter[asyncio.Task[Result]] = Counter()

    async def run(self, key: str, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """``key`` may be empty: then the call is not shared."""
        if not key:
            return await call()
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(call())
            task.add_done_callback(lambda _: self._forget(key, task))
        self._waiting[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                self._forget(key, task)
                task.cancel()

    def __contains__(self, key: str) -> bool:
        """Whether a call with this key runs."""
        return key in self._running

    def _forget(self, key: str, task: asyncio.Task[Result]) -> None:
        if self._running.get(key) is task:
            del self._running[key]


# --- Interface and results of reward functions.


class RewardOutcome(enum.StrEnum):
    """Kind of a grade. GRADER_FAILED is no reward: retry, then drop the sample."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSED = "unparsed"  # no answer could be read from the completion
    GRADER_FAILED = "grader_failed"
    PARTIAL = "partial"  # between right and wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A score.

    >>> RewardResult.of(1.0).outcome
    <RewardOutcome.CORRECT: 'correct'>
    """

    outcome: RewardOutcome
    reward: float = 0.0
    detail: str = ""
    opaque: bool = False  # by test code that ran in the program's process: the program can forge it

    @classmethod
    def of(cls, reward: float) -> RewardResult:
        """A bare number: 1 or more is right, 0 or less is wrong."""
        if reward >= 1:
            return cls(outcome=RewardOutcome.CORRECT, reward=reward)
        outcome = RewardOutcome.WRONG if reward <= 0 else RewardOutcome.PARTIAL
        return cls(outcome=outcome, reward=reward)


CORRECT = RewardResult(outcome=RewardOutcome.CORRECT, reward=1.0)
WRONG = RewardResult(outcome=RewardOutcome.WRONG)


def unparsed(detail: str) -> RewardResult:
    return RewardResult(outcome=RewardOutcome.UNPARSED, detail=detail)


def grader_failed(detail: str) -> RewardResult:
    return RewardResult(outcome=RewardOutcome.GRADER_FAILED, detail=detail)


RewardFunction = Callable[[Mapping[str, Any], str], RewardResult | float | Awaitable[RewardResult | float]]


def truth_of(task: Mapping[str, Any]) -> str:
    """The reference answer of a dataset row, in either column layout.

    >>> truth_of({"answer": 12}), truth_of({"reward_model": {"ground_truth": "12"}})
    ('12', '12')
    """
    truth = truth_in(task)
    if truth is not None:
        return str(truth).strip()
    keys = ", ".join(sorted(task)) or "none"
    raise InvalidRequestError(
        f"the task has no reference answer: it needs one of {', '.join(TRUTH_FIELDS)} or reward_model.ground_truth; "
        f"it has {keys}"
    )
