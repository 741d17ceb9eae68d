"""What a diagnosis says: whether each policy has learned, and the failures that were found. Types only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.cli.doctor.windows import Change


class Failure(enum.StrEnum):
    """The failures that the doctor names. A cause comes before its consequences, and reports list them in this order."""

    WEIGHTS_NOT_ARRIVING = "weights do not reach the replicas"
    SAMPLES_MASKED = "samples are masked"
    REWARD_CONSTANT = "the reward is constant"
    GROUPS_EQUAL = "all rewards of a group are equal"
    MISMATCH_RISING = "engine and trainer disagree"
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
