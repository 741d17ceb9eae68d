"""Counts samples without a reward because of machinery, by policy and cause, and bounds their share.

A cause that a policy can provoke would be a second try for every answer that the policy expects to be wrong, so a share
above ``rollout.max_masked_share`` is reported to the caller, which pauses the run. The window holds the newest training
rollouts of each policy. Independent of pausing, time and the journal; after a restart the window is empty, the counters
continue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from services.common.records.fates import TOO_OLD
from services.common.records.masked import MaskedCause, MaskedCount, cause_of
from services.common.records.phases import PhaseKind
from services.common.records.types import RolloutFailure
from services.orchestrator.state.groups import Outcome


class MaskedSamples:
    """``counters`` gets ``masked/<policy>/<cause>`` and ``redrawn/<policy>/<cause>``."""

    def __init__(self, counters: Counter[str], max_share: float, window: int) -> None:
        self._counters = counters
        self._max_share = max_share
        self._window = window
        self._newest: dict[str, deque[MaskedCause | None]] = {}

    def resolved(self, policies: Iterable[str], outcome: Outcome) -> None:
        """Count the end of a training rollout of these policies."""
        if isinstance(outcome, RolloutFailure) and outcome.reason == TOO_OLD:
            return  # cancelled, not failed
        cause = cause_of(outcome.reason) if isinstance(outcome, RolloutFailure) else None
        retried = {cause_of(phase.detail) for phase in outcome.timing.phases if phase.what == PhaseKind.RETRY}
        for policy in policies:
            for again in retried:
                self._counters[MaskedCount.REDRAWN.of(policy, again)] += 1
            if cause is not None:
                self._counters[MaskedCount.MASKED.of(policy, cause)] += 1
            newest = self._newest.setdefault(policy, deque(maxlen=self._window))
            newest.append(cause if cause is not None and cause.is_of_machinery else None)

    def share(self, policy: str) -> float:
        """Share of masked samples in the newest rollouts, 0 before the first."""
        newest = self._newest.get(policy, ())
        return sum(cause is not None for cause in newest) / len(newest) if newest else 0.0

    def too_many(self) -> str:
        """The policy with too large a share, the causes and the advice; empty without one. Needs half of the window."""
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
        """Empty the window: the user has seen the earlier share before resuming the run."""
        self._newest.clear()
