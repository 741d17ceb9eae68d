"""Rules about the run as a whole: nothing worth training, nothing worth playing, and the last resort: nothing goes on.

Each rule is ``(facts, patience) -> findings``.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.orchestrator.stalls.causes import Cause
from services.orchestrator.stalls.facts import ORCHESTRATOR, Facts, Finding
from services.orchestrator.stalls.graph import WaitGraph
from services.orchestrator.stalls.patience import LEAST_S, Patience

FILTERED_BATCHES = 2  # so many batches' sequences were dropped and none was kept
LAST_RESORT_TIMES = 2.0  # the other rules know better, and get their time
FAILED_GROUPS = 2  # so many groups' rollouts failed in a row
REFUSED_RECORDS = 8  # of one sender in a row
REFUSED_LATELY_S = 60.0  # a sender that has stopped is no stall any more


def nothing_is_learnt(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Rollouts come, and dynamic sampling drops them all."""
    for policy in facts.policies:
        since = patience.overdue(
            ("kept", policy.policy), policy.num_kept, facts.now, due=facts.training, unknown_s=LEAST_S
        )
        if since is not None and policy.num_filtered_in_a_row >= FILTERED_BATCHES * policy.batch_size:
            yield Finding(
                component="workflow",
                cause=Cause.ALL_FILTERED,
                detail=f"the last {policy.num_filtered_in_a_row} sequences came in groups of equal rewards: {policy.policy} "
                "has nothing to train",
                since=since,
            )


def everything_fails(facts: Facts, patience: Patience) -> Iterator[Finding]:
    failing = facts.failures_in_a_row >= FAILED_GROUPS * facts.group_size or "failures" in facts.held_back
    since = patience.holds("failing", failing, facts.now, LEAST_S / 2)
    if since is not None:
        yield Finding(
            component="rollouts",
            cause=Cause.ALL_FAIL,
            detail=facts.held_back.get("failures")  # also when too many, and not all, are without a reward
            or f"the last {facts.failures_in_a_row} rollouts failed, the newest with {facts.last_failure}",
            since=since,
            inferred=True,
        )


def everything_refused(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """A replica plays on while none of its records is taken, or a stranger keeps sending."""
    for sender in facts.refused:
        if sender.number >= REFUSED_RECORDS and facts.now - sender.newest <= REFUSED_LATELY_S:
            yield Finding(
                component=sender.component,
                cause=Cause.RECORDS_REFUSED,
                detail=f"its last {sender.number} records were refused, the newest because: {sender.detail}",
                since=sender.since,
            )


def nothing_to_play(facts: Facts, patience: Patience) -> Iterator[Finding]:
    since = patience.holds("play", facts.nothing_to_play, facts.now, 0.0)
    if since is not None:
        yield Finding(
            component="dataset",
            cause=Cause.NOTHING_TO_PLAY,
            detail="curation refuses every task of the dataset; tasks that it refused are played meanwhile",
            since=since,
        )


def nothing_goes_on(facts: Facts, patience: Patience) -> Finding | None:
    """No counter of the run grows: follow the longest waits to their end. Only asked when no other rule has an answer."""
    due = not facts.ended and not facts.paused and bool(facts.replicas)
    values = tuple(sorted(facts.progress.items()))
    since = patience.overdue("run", values, facts.now, due=due, times=LAST_RESORT_TIMES)
    if since is None:
        return None
    waiting = [name for t in facts.trainers if t.wanted and (name := f"trainer/{t.policy}") in facts.accounts]
    end = WaitGraph(facts).end_of(next(iter(waiting), ORCHESTRATOR))
    full = end in (*waiting, ORCHESTRATOR) and any(policy.quota_full for policy in facts.policies)
    return Finding(
        component=ORCHESTRATOR if full else end,
        cause=Cause.QUOTA_FULL if full else Cause.NO_PROGRESS,
        detail=f"nothing of the run has gone on for {facts.now - since:.0f} s",
        since=since,
        inferred=True,
    )
