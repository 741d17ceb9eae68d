"""Rules about work without progress while all components are present: disk, journal, engines, threads, steps, records.

Each rule is ``(facts, timeouts) -> findings``. The rules compare work with the speed that this run has shown as normal.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.telemetry.accounts import AccountState, ActivityTime
from services.common.telemetry.activities import ActivityName, AnyActivity
from services.common.telemetry.components import (
    DISK,
    GATEWAY,
    ORCHESTRATOR,
    is_publisher,
    is_records,
    is_weights,
    part,
    records,
    weights,
)
from services.common.telemetry.components import trainer as trainer_component
from services.common.telemetry.gateway_queue import QueueGauge, num_waiting
from services.orchestrator.stalls.adaptive_timeouts import LEAST_S, AdaptiveTimeouts
from services.orchestrator.stalls.facts import Cause, Facts, Finding, Hold, ReplicaFacts

COMPUTING = (ActivityName.TRAINING, ActivityName.REPLAYING)
HEARD_S = 9.0  # without a report: then the silence is the cause
CPU_SHARE = 0.2  # of a trainer's main thread, above which the thread computes, for any duration of a micro-batch
CPU_TIMES = 6.0
# Activities that may take longer than a minute the first time: a checkpoint of many gigabytes, an external agent.
LONG_S: dict[AnyActivity, float] = {ActivityName.CHECKPOINTING: 600.0, ActivityName.RUNNING_WORKFLOW: 300.0}
RECORDS_S = 15.0  # before the first learnt time from record to acknowledgement
# Activities without a due time: they last as long as the run needs.
RESTING = frozenset(
    {
        ActivityName.IDLE,
        ActivityName.STARTING,
        ActivityName.WAITING_FOR_BATCH,
        ActivityName.PAUSED,
        ActivityName.FINISHED,
        ActivityName.EXPORTING,
        ActivityName.DRAINING,
        ActivityName.UP_TO_DATE,
        ActivityName.NOTHING_TO_SEND,
        ActivityName.NOT_ASKED,
        ActivityName.WAITING_FOR_CALLS,
        ActivityName.WAITING_FOR_TASK_GROUPS,
        ActivityName.WAITING_FOR_FIRST_WEIGHTS,
    }
)


def disk_and_journal(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    reason = facts.journal_blocked or facts.held_back.get(Hold.DISK, "")
    since = timeouts.holds("disk", bool(reason), facts.now, 0.0)
    if since is not None:
        yield Finding(component=DISK, cause=Cause.NO_FREE_DISK, detail=reason, since=since)
    elif facts.journal_oldest_s > LEAST_S and not reason:
        yield Finding(
            component=ORCHESTRATOR,
            cause=Cause.JOURNAL_STUCK,
            detail=f"its journal has not written a record for {facts.journal_oldest_s:.0f} s",
            since=facts.now - facts.journal_oldest_s,
        )


def frozen_engines(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Requests are in an engine and no token comes."""
    for replica in facts.replicas:
        account = facts.accounts.get(replica.component)
        busy = account is not None and any(a.num_now and a.name == ActivityName.GENERATING for a in account.activities)
        tokens = account.progress if account is not None else 0
        since = timeouts.overdue(("tokens", replica.component), tokens, facts.now, due=busy)
        if since is not None and account is not None:
            longest = max(
                (a for a in account.now() if a.name == ActivityName.GENERATING), key=lambda a: a.longest_now_s
            )
            yield Finding(
                component=part(replica.component, longest.on),
                cause=Cause.FROZEN,
                detail=f"{longest.num_now} requests and no token for {facts.now - since:.0f} s",
                since=since,
                inferred=True,
            )


def stuck_trainers(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """A step without a micro-batch: of a rank that is behind, or of the trainer itself."""
    for trainer in facts.trainers:
        if not trainer.joined:
            continue
        names = [trainer_component(trainer.policy, rank) for rank in range(trainer.num_ranks)]
        ranks = [a for a in (facts.accounts.get(name) for name in names) if a is not None]
        overdue = [
            (since, account) for account in ranks if (since := _step_overdue(account, facts, timeouts)) is not None
        ]
        if not overdue:
            continue
        elsewhere = [account for account in ranks if not _computing(account)]
        blamed = elsewhere[0] if elsewhere else min((a for _, a in overdue), key=lambda a: a.progress)
        since = min(since for since, _ in overdue)
        what = next((a.name for a in blamed.now()), "?")
        yield Finding(
            component=blamed.component,
            cause=Cause.STUCK,
            detail=f"no micro-batch of step for {facts.now - since:.0f} s; the trainer is {what}",
            since=since,
            inferred=True,
        )


def _computing(account: AccountState) -> bool:
    return any(a.name in COMPUTING for a in account.now())


def _step_overdue(account: AccountState, facts: Facts, timeouts: AdaptiveTimeouts) -> float | None:
    cpu = timeouts.overdue(("cpu", account.component), int(account.cpu_s / CPU_SHARE), facts.now, unknown_s=LEAST_S)
    return timeouts.overdue(
        ("step", account.component),
        (account.progress, next((a.name for a in account.now()), "")),
        facts.now,
        due=_computing(account),
        times=1.0 if cpu is not None or not account.cpu_s else CPU_TIMES,
    )


def stuck_waits(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Find activities of which none has ended for long: a call of a gateway, a reward, a checkpoint."""
    for account in facts.accounts.values():
        if is_publisher(account.component) or account.component.startswith((GATEWAY, ORCHESTRATOR)):
            continue  # the components that wait for them show their state
        for activity in account.activities:
            if activity.name in RESTING or activity.name in COMPUTING or activity.name == ActivityName.GENERATING:
                continue
            key = ("ends", account.component, activity.name, activity.on)
            timeouts.allow(key, activity.longest_done_s, facts.now)
            # A fetch has bytes for a pulse; elsewhere progress is of other things.
            pulse = (activity.num_done, account.progress if is_weights(account.component) else 0)
            unknown_s = LONG_S.get(activity.name)
            since = timeouts.overdue(key, pulse, facts.now, due=activity.num_now > 0, unknown_s=unknown_s)
            # A recent activity may take its time, even when none has ended for long.
            grace_s = _gateway_grace_s(facts) if activity.on == GATEWAY else 0.0
            if since is not None and activity.longest_now_s > timeouts.limit(key, facts.now, unknown_s) + grace_s:
                yield _stuck(account, activity, facts)


def _gateway_grace_s(facts: Facts) -> float:
    """Longer while the gateway or its queue may turn out to be absent: other rules name those."""
    gateway = facts.peers.get(GATEWAY)
    if gateway is None or gateway.silent_s > 0.0:
        return LEAST_S
    return LEAST_S if QueueGauge.REDIS_CONNECTED in gateway.gauges else 0.0


def _stuck(account: AccountState, activity: ActivityTime, facts: Facts) -> Finding:
    component, cause = account.component, Cause.STUCK
    if is_weights(component):
        cause = Cause.WEIGHTS_NOT_ARRIVING
    elif is_records(component):
        cause = Cause.NOT_ACKNOWLEDGED
    elif activity.on == GATEWAY:
        component, cause = GATEWAY, _in_the_gateway(facts)
    elif is_publisher(activity.on):
        component = activity.on
    detail = f"{account.component} has been {activity.name} for {activity.longest_now_s:.0f} s"
    return Finding(
        component=component,
        cause=cause,
        detail=f"{detail}: {activity.detail}" if activity.detail else detail,
        since=facts.now - activity.longest_now_s,
        inferred=True,
    )


def _in_the_gateway(facts: Facts) -> Cause:
    gauges = facts.peers[GATEWAY].gauges if GATEWAY in facts.peers else {}
    return Cause.EXHAUSTED if num_waiting(gauges) > 0 else Cause.STUCK


def unacknowledged_records(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    for replica in facts.replicas:
        account = facts.accounts.get(records(replica.component))
        if account is None:
            continue
        waiting = any(a.num_now and a.on == ORCHESTRATOR for a in account.activities)
        key = ("acknowledged", replica.component)
        since = timeouts.overdue(key, account.progress, facts.now, due=waiting, unknown_s=RECORDS_S)
        if since is not None:
            yield Finding(
                component=replica.component,
                cause=Cause.NOT_ACKNOWLEDGED,
                detail=f"none of its records has been acknowledged for {facts.now - since:.0f} s",
                since=since,
                inferred=True,
            )


def lost_orders(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Find replicas that report but do not confirm issued slots or announced versions."""
    if facts.journal_blocked or facts.journal_oldest_s > LEAST_S / 2:
        return  # the replica may have run them without a durable record
    for replica in facts.replicas:
        key = ("heard", replica.component)
        silent = timeouts.overdue(key, replica.num_reports, facts.now, unknown_s=LEAST_S, most_s=HEARD_S)
        if not replica.stream_open or silent is not None:
            continue
        unseen = replica.unseen_orders
        if unseen and facts.now - min(unseen) > LEAST_S:
            yield _lost(replica, f"{len(unseen)} task groups were sent", min(unseen), facts.now)
        for policy, held in replica.untaken.items():
            account = facts.accounts.get(part(replica.component, weights(policy)))
            knows = account is None or any(a.name != ActivityName.UP_TO_DATE for a in account.now())
            taken = timeouts.overdue(
                ("taken", replica.component, policy), held, facts.now, due=not knows, most_s=LEAST_S
            )
            if taken is not None:
                yield _lost(replica, f"a newer version of {policy} was announced", taken, facts.now)


def _lost(replica: ReplicaFacts, what: str, since: float, now: float) -> Finding:
    return Finding(
        component=replica.component,
        cause=Cause.ORDER_LOST,
        detail=f"{what} {now - since:.0f} s ago, and the replica's reports do not confirm that",
        since=since,
    )


WORK_RULES = (
    disk_and_journal,
    frozen_engines,
    stuck_trainers,
    stuck_waits,
    unacknowledged_records,
    lost_orders,
)
