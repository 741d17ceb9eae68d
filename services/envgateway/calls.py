"""Threads for user functions; joins calls that repeat a key, and waits for a place among calls that run."""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
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


@dataclass(slots=True, eq=False)
class _Running(Generic[Result]):
    task: asyncio.Task[Result]
    num_waiting: int = 0


class SharedCalls(Generic[Result]):
    """One execution per key: a repeated key joins the running call or gets the stored result.

    The call is cancelled when its last waiter leaves. Errors, and results that ``keep`` refuses, are not stored: the
    next caller runs the call again. The oldest results go when there are more than ``max_stored``, or when together
    they weigh more than ``max_weight``.
    """

    def __init__(
        self,
        max_stored: int,
        keep: Callable[[Result], bool] = lambda _: True,
        weigh: Callable[[Result], int] = lambda _: 0,
        max_weight: int = 0,
    ) -> None:
        self._running: dict[str, _Running[Result]] = {}
        self._stored: OrderedDict[str, Result] = OrderedDict()
        self._max_stored = max_stored
        self._keep = keep
        self._weigh = weigh
        self._weight = 0
        self._max_weight = max_weight

    async def run(self, key: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """``key`` may be empty: then the call is not shared."""
        if not key:
            return await call()
        if key in self._stored:
            return self._stored[key]
        if key not in self._running:
            self._running[key] = _Running(asyncio.create_task(self._carry_out(key, call)))
        running = self._running[key]
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting and not running.task.done():
                if self._running.get(key) is running:
                    del self._running[key]
                running.task.cancel()

    def __contains__(self, key: str) -> bool:
        """Whether a call with this key runs."""
        return key in self._running

    def __len__(self) -> int:
        """Running calls and stored results."""
        return len(self._running) + len(self._stored)

    async def _carry_out(self, key: str, call: Callable[[], Awaitable[Result]]) -> Result:
        try:
            result = await call()
        finally:
            running = self._running.get(key)
            is_waited_for = running is not None and running.task is asyncio.current_task()
            if is_waited_for:
                del self._running[key]
        if is_waited_for and self._keep(result):
            self._store(key, result)
        return result

    def _store(self, key: str, result: Result) -> None:
        self._stored[key] = result
        self._weight += self._weigh(result)
        while len(self._stored) > self._max_stored or self._weight > self._max_weight:
            _, oldest = self._stored.popitem(last=False)
            self._weight -= self._weigh(oldest)


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
