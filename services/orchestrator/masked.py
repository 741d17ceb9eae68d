"""Samples that machinery, not the policy, has left without a reward: counted by policy and cause, bounded by share.

A cause that a policy can provoke would be a second try for every answer that it expects to be wrong, so a share above
``rollout.max_masked_share`` is told; who is told pauses the run. Counted are the newest training rollouts of each policy.
Knows nothing of pausing, time or the journal; after a restart the window begins anew, the counters go on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from services.common.fates import TOO_OLD
from services.common.masked import MaskedCause, cause_of
from services.common.types import RolloutFailure
from services.orchestrator.groups import Outcome

MASKED, REDRAWN = "masked", "redrawn"
RETRY_PHASE = "retry"


class MaskedSamples:
    """``counters`` gets ``masked/<policy>/<cause>`` and ``redrawn/<policy>/<cause>``."""

    def __init__(self, counters: Counter[str], max_share: float, window: int) -> None:
        self._counters = counters
        self._max_share = max_share
        self._window = window
        self._newest: dict[str, deque[MaskedCause | None]] = {}

    def resolved(self, policies: Iterable[str], outcome: Outcome) -> None:
        """A training rollout of these policies has ended."""
        if isinstance(outcome, RolloutFailure) and outcome.reason == TOO_OLD:
            return  # cancelled: nothing failed
        cause = cause_of(outcome.reason) if isinstance(outcome, RolloutFailure) else None
        retried = {cause_of(phase.detail) for phase in outcome.timing.phases if phase.what == RETRY_PHASE}
        for policy in policies:
            for again in retried:
                self._counters[f"{REDRAWN}/{policy}/{again.value}"] += 1
            if cause is not None:
                self._counters[f"{MASKED}/{policy}/{cause.value}"] += 1
            newest = self._newest.setdefault(policy, deque(maxlen=self._window))
            newest.append(cause if cause is not None and cause.is_of_machinery else None)

    def share(self, policy: str) -> float:
        """Of the newest rollouts, 0 before the first."""
        newest = self._newest.get(policy, ())
        return sum(cause is not None for cause in newest) / len(newest) if newest else 0.0

    def too_many(self) -> str:
        """Whose share is too large, why, and what to do; empty when none is. Said when half of the window is there."""
        for policy, newest in self._newest.items():
            share = self.share(policy)
            if 2 * len(newest) < self._window or share <= self._max_share:
                continue
            causes = Counter(cause for cause in newest if cause is not None).most_common()
            told = ", ".join(f"{count} {cause.value}" for cause, count in causes)
            return (
                f"{share:.0%} of the newest {len(newest)} rollouts of {policy} have no reward ({told}), more than "
                f"rollout.max_masked_share {self._max_share:g}: {causes[0][0].advice}"
            )
        return ""

    def forget(self) -> None:
        """Count the share anew: what was is known to who resumes."""
        self._newest.clear()
