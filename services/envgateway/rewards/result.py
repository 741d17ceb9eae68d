"""Interface and results of reward functions.

A reward function takes the task's dataset row and the completion, and may be ``async``:

    def reward(task: Mapping[str, Any], completion: str) -> RewardResult | float: ...

The function raises ``InvalidRequestError`` for an unusable row and ``InfrastructureError`` for machinery that failed;
neither is a reward. Any other exception is a grader failure, which is no reward either.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequestError
from services.common.records.dataset_rows import TRUTH_FIELDS, truth_in


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
