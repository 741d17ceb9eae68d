"""Rules about the whole run: no trainable data, no playable tasks, and the last resort: no progress.

Each rule is ``(facts, timeouts) -> findings``.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.telemetry.components import DATASET, ORCHESTRATOR, ROLLOUTS, WORKFLOW, trainer
from services.orchestrator.stalls.adaptive_timeouts import LEAST_S, AdaptiveTimeouts
from services.orchestrator.stalls.facts import Cause, Facts, Finding, Hold
from services.orchestrator.stalls.graph import WaitGraph
from services.orchestrator.stalls.rules_work import RESTING

FILTERED_BATCHES = 2  # so many batches' sequences were dropped and none was kept
RARE_TIMES = 10.0  # and so many times the groups that one kept group usually takes: hardly ever by chance
PRIOR_GROUPS = 10  # that one kept group takes, as far as the run has not shown it: rare success is normal at the start
LAST_RESORT_TIMES = 2.0  # the other rules know better, and get their time
FAILED_GROUPS = 2  # so many groups' rollouts failed in a row
REFUSED_RECORDS = 8  # of one sender in a row
REFUSED_LATELY_S = 60.0  # a sender that has stopped is no stall any more


def nothing_is_learnt(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Rollouts come, and dynamic sampling drops them all."""
    for policy in facts.policies:
        since = timeouts.overdue(
            ("kept", policy.policy), policy.num_kept, facts.now, due=facts.training, unknown_s=LEAST_S
        )
        group, judged = facts.group_size, policy.num_kept + max(0, policy.num_filtered - policy.num_filtered_in_a_row)
        usual = group * (judged + PRIOR_GROUPS * group) / (policy.num_kept + group)  # sequences
        least = max(FILTERED_BATCHES * policy.batch_size, RARE_TIMES * usual)
        if since is not None and policy.num_filtered_in_a_row >= least:
            yield Finding(
                component=WORKFLOW,
                cause=Cause.ALL_FILTERED,
                detail=f"the last {policy.num_filtered_in_a_row} sequences came in groups of equal rewards: {policy.policy} "
                f"has no trainable group (before: {policy.num_kept} of {judged} sequences)",
                since=since,
            )


def rollouts_fail(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """All of them, or so many that the run was paused (``rollout.max_masked_share``)."""
    masked = facts.held_back.get(Hold.MASKED, "")
    paused = masked or facts.held_back.get(Hold.ALL_FAIL, "")
    all_fail = facts.failures_in_a_row >= FAILED_GROUPS * facts.group_size
    since = timeouts.holds("failing", bool(paused) or all_fail, facts.now, LEAST_S / 2)
    if since is not None:
        yield Finding(
            component=ROLLOUTS,
            cause=Cause.MASKED if masked and not all_fail else Cause.ALL_FAIL,
            detail=paused
            or f"the last {facts.failures_in_a_row} rollouts failed, the newest with {facts.last_failure}",
            since=since,
            inferred=True,
        )


def batch_refused(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """A trainer does not train its batch: the engines compute other log-probabilities."""
    for policy in facts.trainers:
        since = timeouts.holds(("refusal", policy.policy), bool(policy.refusal), facts.now, 0.0)
        if since is not None:
            yield Finding(component=trainer(policy.policy), cause=Cause.NUMERICS, detail=policy.refusal, since=since)


def everything_refused(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """A replica plays on while none of its records is taken, or an unknown sender keeps sending."""
    for sender in facts.refused:
        if sender.number >= REFUSED_RECORDS and facts.now - sender.newest <= REFUSED_LATELY_S:
            yield Finding(
                component=sender.component,
                cause=Cause.RECORDS_REFUSED,
                detail=f"its last {sender.number} records were refused, the newest because: {sender.detail}",
                since=sender.since,
            )


def nothing_to_play(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    since = timeouts.holds("play", facts.nothing_to_play, facts.now, 0.0)
    if since is not None:
        yield Finding(
            component=DATASET,
            cause=Cause.NOTHING_TO_PLAY,
            detail="curation refuses every task of the dataset; refused tasks are played meanwhile",
            since=since,
        )


def nothing_goes_on(facts: Facts, timeouts: AdaptiveTimeouts) -> Finding | None:
    """No counter of the run grows: follow the longest waits to their end. Only asked when no other rule has an answer."""
    due = not facts.ended and not facts.paused and bool(facts.replicas)
    since = timeouts.overdue("run", facts.progress, facts.now, due=due, times=LAST_RESORT_TIMES)
    if since is None:
        return None
    waiting = [name for t in facts.trainers if t.wanted and (name := trainer(t.policy)) in facts.accounts]
    end = WaitGraph(facts).end_of(next(iter(waiting), ORCHESTRATOR))
    full = end in (*waiting, ORCHESTRATOR) and any(policy.quota_full for policy in facts.policies)
    detail = f"no part of the run made progress for {facts.now - since:.0f} s"
    if full or end in [replica.component for replica in facts.replicas]:
        # Rollouts that are played fill the quota: a function in which they are says more.
        accounts = [facts.accounts[r.component] for r in facts.replicas if r.component in facts.accounts]
        played = [(a.longest_now_s, a, on.component) for on in accounts for a in on.now() if a.name not in RESTING]
        longest_s, activity, on = max(played, key=lambda one: one[0], default=(0.0, None, end))
        if activity is not None:
            full, end = False, on
            detail += f": {activity.num_now} rollouts have been {activity.name} for {longest_s:.0f} s"
    return Finding(
        component=ORCHESTRATOR if full else end,
        cause=Cause.QUOTA_FULL if full else Cause.NO_PROGRESS,
        detail=detail,
        since=since,
        inferred=True,
    )
