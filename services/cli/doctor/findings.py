"""Records of a diagnosis: the learning of each policy, and the failures that were found. Compares the beginning of a series
with its end."""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_POINTS = 10  # with fewer there is no telling a change from noise
FIRST_MOST = 16  # a long run may learn within its first steps, and they are the beginning that counts
_LEAST_WINDOW = 4
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Change:
    """Means of the first and the last points, and the 95% interval of their difference."""

    first: float
    last: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g}, change {self.last - self.first:+.3f} ({self.low:+.3f}..{self.high:+.3f})"


def windows(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first eighth of the points (4 to 16) and the last quarter (at least 4)."""
    first = min(FIRST_MOST, max(_LEAST_WINDOW, len(values) // 8))
    return values[:first], values[-max(_LEAST_WINDOW, len(values) // 4) :]


def change(values: Sequence[float]) -> Change | None:
    """The change of a series; None with fewer than ``LEAST_POINTS`` points.

    The noise of a point is estimated from successive differences (von Neumann, 1941), which a trend does not enlarge.
    """
    if len(values) < LEAST_POINTS:
        return None
    first, last = windows(values)
    differences = [after - before for before, after in itertools.pairwise(values)]
    variance = statistics.fmean(d * d for d in differences) / 2
    half = _Z * math.sqrt(variance * (1 / len(first) + 1 / len(last)))
    begin, end = statistics.fmean(first), statistics.fmean(last)
    return Change(begin, end, end - begin - half, end - begin + half)


def medians(values: Sequence[float]) -> tuple[float, float] | None:
    """Medians of the first and the last points, which one odd step does not move; None with too few points."""
    if len(values) < LEAST_POINTS:
        return None
    first, last = windows(values)
    return statistics.median(first), statistics.median(last)


class Failure(enum.StrEnum):
    """The failures that the doctor names. A cause comes before its consequences, and reports list them in this order."""

    WEIGHTS_NOT_ARRIVING = "weights do not reach the replicas"
    SAMPLES_MASKED = "samples are masked"
    REWARD_CONSTANT = "the reward is constant"
    GROUPS_EQUAL = "all rewards of a group are equal"
    MISMATCH = "engine and trainer disagree"
    ENTROPY_GONE = "the entropy is gone"
    LENGTHS_RUN_AWAY = "responses grow without a better reward"
    NOTHING_LEARNED = "nothing was learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A failure of one policy.

    Example: ``Finding(failure=Failure.GROUPS_EQUAL, policy="model0", evidence="98% of the tokens …",
    remedy="batch.dynamic_sampling …")``.
    """

    failure: Failure
    policy: str
    evidence: str
    """The numbers of the run, in one sentence."""
    remedy: str
    """The setting to try first, by its key in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether a policy has learned: the change of its reward from the first steps to the last ones."""

    policy: str
    num_steps: int
    measured: str
    """The reward that was compared: an evaluation such as ``greedy``, or ``training rollouts``. Empty when nothing was."""
    change: Change | None = None
    evaluated: Change | None = None
    """The largest gain of any evaluation; None where none is repeated."""
    trained: Change | None = None
    """The gain of training rollouts."""

    @property
    def pays_for_something_else(self) -> bool:
        """Whether the reward of training rises while every evaluation falls."""
        falls = self.evaluated is not None and self.evaluated.high < 0
        return falls and self.trained is not None and self.trained.low > 0

    @property
    def better_answers(self) -> bool:
        """Whether evaluations, or without any the training rollouts, show a gain: a policy can learn a reward that
        does not measure the same as the evaluation."""
        judged = self.evaluated or self.change
        return judged is not None and judged.low > 0

    @property
    def learned(self) -> bool | None:
        """None when there is too little to tell."""
        return None if self.change is None else self.change.low > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The diagnosis of one run."""

    learning: tuple[Learning, ...]
    findings: tuple[Finding, ...]

    @property
    def nothing_learned(self) -> bool:
        """Whether any trained policy is known to have learned nothing."""
        return any(finding.failure is Failure.NOTHING_LEARNED for finding in self.findings)
