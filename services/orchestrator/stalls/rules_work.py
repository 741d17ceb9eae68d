"""Rules about work that does not go on although everybody seems to be there: disk, journal, engines, threads, steps, records.

Each rule is ``(facts, patience) -> findings``. Work is compared with itself: with how fast this run has shown it to be.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.accounts import AccountState, ActivityTime
from services.orchestrator.stalls.causes import Cause
from services.orchestrator.stalls.facts import GATEWAY, ORCHESTRATOR, Facts, Finding, ReplicaFacts
from services.orchestrator.stalls.patience import LEAST_S, Patience

COMPUTING = ("training", "replaying")
GENERATING = "generating"
UP_TO_DATE = "up to date"
HEARD_S = 9.0  # without a report: then silence is what is wrong
CPU_SHARE = 0.2  # of a trainer's main thread, above which it computes, however long a micro-batch takes
CPU_TIMES = 6.0
WEIGHTS = "/weights/"
# What may well take longer than a minute the first time: a checkpoint of many gigabytes, an agent outside that works.
LONG_S = {"checkpointing": 600.0, "running the workflow": 300.0}
RECORDS_S = 15.0  # before anything was learnt about how soon records are acknowledged
# What is done or awaited for as long as the run likes: nothing is due.
RESTING = frozenset(
    {
        "idle",
        "starting",
        "waiting for a batch",
        "paused",
        "finished",
        "exporting",
        "draining",
        "up to date",
        "nothing to send",
        "nobody fetches",
        "waiting for calls",
        "waiting for task groups",
        "waiting for the first weights",
    }
)


def disk_and_journal(facts: Facts, patience: Patience) -> Iterator[Finding]:
    reason = facts.journal_blocked or facts.held_back.get("disk", "")
    since = patience.holds("disk", bool(reason), facts.now, 0.0)
    if since is not None:
        yield Finding(component="disk", cause=Cause.NO_FREE_DISK, detail=reason, since=since)
    elif facts.journal_oldest_s > LEAST_S and not reason:
        yield Finding(
            component=ORCHESTRATOR,
            cause=Cause.JOURNAL_STUCK,
            detail=f"its journal has not written a record for {facts.journal_oldest_s:.0f} s",
            since=facts.now - facts.journal_oldest_s,
        )


def frozen_engines(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Requests are in an engine and no token comes."""
    for replica in facts.replicas:
        account = facts.accounts.get(replica.component)
        busy = account is not None and any(a.name == GENERATING and a.num_now for a in account.activities)
        tokens = account.progress if account is not None else 0
        since = patience.overdue(("tokens", replica.component), tokens, facts.now, due=busy)
        if since is not None and account is not None:
            longest = max((a for a in account.now() if a.name == GENERATING), key=lambda a: a.longest_now_s)
            yield Finding(
                component=f"{replica.component}/{longest.on}",
                cause=Cause.FROZEN,
                detail=f"{longest.num_now} requests and no token for {facts.now - since:.0f} s",
                since=since,
                inferred=True,
            )


def stuck_trainers(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """A step without a micro-batch: of a rank that is behind, or of the trainer itself."""
    for trainer in facts.trainers:
        if not trainer.joined:
            continue
        name = f"trainer/{trainer.policy}"
        ranks = [a for a in (facts.accounts.get(n) for n in (name, *_ranks(name, trainer.num_ranks))) if a is not None]
        overdue = [
            (since, account) for account in ranks if (since := _step_overdue(account, facts, patience)) is not None
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
            detail=f"no micro-batch of step for {facts.now - since:.0f} s; it is {what}",
            since=since,
            inferred=True,
        )


def _ranks(name: str, num_ranks: int) -> list[str]:
    return [f"{name}/rank{rank}" for rank in range(1, num_ranks)]


def _computing(account: AccountState) -> bool:
    return any(a.name in COMPUTING for a in account.now())


def _step_overdue(account: AccountState, facts: Facts, patience: Patience) -> float | None:
    cpu = patience.overdue(("cpu", account.component), int(account.cpu_s / CPU_SHARE), facts.now, unknown_s=LEAST_S)
    return patience.overdue(
        ("step", account.component),
        (account.progress, next((a.name for a in account.now()), "")),
        facts.now,
        due=_computing(account),
        times=1.0 if cpu is not None or not account.cpu_s else CPU_TIMES,
    )


def stuck_waits(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """An activity that something is in, of which none has ended for long: a call of a gateway, a reward, a checkpoint."""
    for account in facts.accounts.values():
        if account.component.startswith(("publisher/", GATEWAY, ORCHESTRATOR)):
            continue  # what they do is seen from those who wait for them
        for activity in account.activities:
            if activity.name in RESTING or activity.name in COMPUTING or activity.name == GENERATING:
                continue
            key = ("ends", account.component, activity.name, activity.on)
            patience.allow(key, activity.longest_done_s, facts.now)
            # A fetch has bytes for a pulse; elsewhere progress is of other things.
            pulse = (activity.num_done, account.progress if WEIGHTS in account.component else 0)
            unknown_s = LONG_S.get(activity.name)
            since = patience.overdue(key, pulse, facts.now, due=activity.num_now > 0, unknown_s=unknown_s)
            # What was begun lately may take its time, though none of it has ended for long.
            grace_s = _gateway_grace_s(facts) if activity.on == GATEWAY else 0.0
            if since is not None and activity.longest_now_s > patience.limit(key, facts.now, unknown_s) + grace_s:
                yield _stuck(account, activity, facts)


def _gateway_grace_s(facts: Facts) -> float:
    """Longer while it may turn out that the gateway is not there, or its queue: those are told by name."""
    gateway = facts.peers.get(GATEWAY)
    if gateway is None or gateway.silent_s > 0.0:
        return LEAST_S
    return LEAST_S if "queue_redis_connected" in gateway.gauges else 0.0


def _stuck(account: AccountState, activity: ActivityTime, facts: Facts) -> Finding:
    component, cause = account.component, Cause.STUCK
    if WEIGHTS in component:
        cause = Cause.WEIGHTS_NOT_ARRIVING
    elif component.endswith("/records"):
        cause = Cause.NOT_ACKNOWLEDGED
    elif activity.on == GATEWAY:
        component, cause = GATEWAY, _in_the_gateway(facts)
    elif activity.on.startswith("publisher/"):
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
    full = any(gauges.get(f"queue_{lane}_waiting", 0.0) > 0 for lane in ("interactive", "batch"))
    return Cause.EXHAUSTED if full else Cause.STUCK


def unacknowledged_records(facts: Facts, patience: Patience) -> Iterator[Finding]:
    for replica in facts.replicas:
        account = facts.accounts.get(f"{replica.component}/records")
        if account is None:
            continue
        waiting = any(a.on == ORCHESTRATOR for a in account.now())
        key = ("acknowledged", replica.component)
        since = patience.overdue(key, account.progress, facts.now, due=waiting, unknown_s=RECORDS_S)
        if since is not None:
            yield Finding(
                component=replica.component,
                cause=Cause.NOT_ACKNOWLEDGED,
                detail=f"none of its records has been acknowledged for {facts.now - since:.0f} s",
                since=since,
                inferred=True,
            )


def lost_orders(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Slots were issued, or a version was announced; the replica reports, and knows nothing of it."""
    if facts.journal_blocked or facts.journal_oldest_s > LEAST_S / 2:
        return  # it may have played them, and nothing becomes durable
    for replica in facts.replicas:
        key = ("heard", replica.component)
        silent = patience.overdue(key, replica.num_reports, facts.now, unknown_s=LEAST_S, most_s=HEARD_S)
        if not replica.stream_open or silent is not None:
            continue
        unseen = replica.unseen_orders
        if unseen and facts.now - min(unseen) > LEAST_S:
            yield _lost(replica, f"{len(unseen)} task groups were sent to it", min(unseen), facts.now)
        for policy, held in replica.untaken.items():
            account = facts.accounts.get(f"{replica.component}/weights/{policy}")
            knows = account is None or any(a.name != UP_TO_DATE for a in account.now())
            taken = patience.overdue(
                ("taken", replica.component, policy), held, facts.now, due=not knows, most_s=LEAST_S
            )
            if taken is not None:
                yield _lost(replica, f"a newer version of {policy} was announced to it", taken, facts.now)


def _lost(replica: ReplicaFacts, what: str, since: float, now: float) -> Finding:
    return Finding(
        component=replica.component,
        cause=Cause.ORDER_LOST,
        detail=f"{what} {now - since:.0f} s ago, and its reports know nothing of it",
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
