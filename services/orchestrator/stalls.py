"""Detects stalls: the component that does not move, the cause, since when, and what to do.

    facts -> rules -> stalls -> those that another one explains are dropped -> held for two looks -> reported

Four kinds of evidence: leases that ended, peers that are silent, states that peers report (a full disk, failing
rollouts), and no progress for several times the usual. Deterministic: the time comes with the facts. Independent of the
core and of logs.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from services.common.telemetry.accounts import (
    DATASET,
    DISK,
    GATEWAY,
    GATEWAY_WORKERS,
    INFERENCE,
    ORCHESTRATOR,
    REDIS,
    ROLLOUTS,
    WORKFLOW,
    AccountState,
    Activity,
    ActivityName,
    ActivityTime,
    AnyActivity,
    Component,
    PeerState,
    is_of_replica,
    is_of_trainer,
    is_publisher,
    is_records,
    is_replica,
    is_weights,
    part,
    split,
    trainer_component,
    weights,
)
from services.common.telemetry.accounts import replica as replica_component
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import QueueGauge, num_waiting
from services.orchestrator.ingest import Streak
from services.orchestrator.members import Replica, Trainer

LEAST_S = 10.0  # smallest limit
TIMES = 4.0  # the longest gap lately
UNKNOWN_S = 60.0  # limit before the first gaps of the run
ENOUGH_GAPS = 3
HALF_LIFE_S = 300.0  # of a gap that was learnt: a slow moment does not blind the detector for the rest of the run
REPORT_MOST_S = 15.0  # reports come every few seconds, however long the work takes
HEARD_S = 9.0  # without a report: then the silence is the cause
ABSENT_S = 60.0  # processes load models before they join
SETTLE_S = 4.0  # a gauge must keep its value this long: connections come and go
UNSEEN_REPORTS = 2  # one may cross the order on its way
LOOKS = 2  # that a stall must last, and be gone
NOT_LOOKED_S = 5.0  # between two looks: the orchestrator itself stood still
SHOWN_S = 10.0  # for which that is reported
CPU_SHARE = 0.2  # of a trainer's main thread, above which the thread computes, for any duration of a micro-batch
RECORDS_S = 15.0  # before the first times from record to acknowledgement
# Activities that may take longer than a minute the first time: a checkpoint of many gigabytes, an external agent.
LONG_S: dict[AnyActivity, float] = {ActivityName.CHECKPOINTING: 600.0, ActivityName.RUNNING_WORKFLOW: 300.0}
FILTERED_BATCHES = 2  # so many batches' sequences were dropped and none was kept
RARE_TIMES = 10.0  # and so many times the groups that one kept group usually takes: hardly ever by chance
PRIOR_GROUPS = 10  # that one kept group takes, as far as the run has not shown it: rare success is normal at the start
FAILED_GROUPS = 2  # so many groups' rollouts failed in a row
REFUSED_RECORDS = 8  # of one sender in a row
REFUSED_LATELY_S = 60.0  # a sender that has stopped is no stall any more
COMPUTING = (ActivityName.TRAINING, ActivityName.REPLAYING)
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


_CODE_CHANGES = (
    "changed Python code is loaded by new processes only: interrupt the run, then `rollmill run --resume RUN`"
)


class Cause(enum.StrEnum):
    """A cause is one word, for logs, tests and docs, with the remedy."""

    advice: str

    def __new__(cls, word: str, advice: str) -> Cause:
        member = str.__new__(cls, word)
        member._value_, member.advice = word, advice
        return member

    SILENT = (
        "silent",
        "check that its process and machine run and reach the orchestrator (stopped or frozen process, cut or half-open "
        f"connection); for a blocked event loop, its log has the stack ({LogEvent.LOOP_BLOCKED})",
    )
    LOST = "lost", "start the component again; the work resumes without further action"
    ABSENT = "absent", "start the component, or find the reason in its log"
    STUCK = (
        "stuck",
        f"its log has the stack of the hanging thread ({LogEvent.THREAD_STUCK}); kill -9 the process: the supervisor "
        "starts a new one, and no acknowledged data is lost",
    )
    FROZEN = "frozen", "kill -9 the replica: the engine no longer computes, and only a new process helps"
    NO_FREE_DISK = (
        "no_free_disk",
        "free space on the disk of the run directory; the run continues without further action",
    )
    JOURNAL_STUCK = "journal_stuck", "check the file system of the run directory, such as a hanging network mount"
    STOOD_STILL = (
        "stood_still",
        "check the machine: the orchestrator's process was stopped or starved; leases were extended",
    )
    ORDER_LOST = (
        "order_lost",
        "the orchestrator sends the order again; if the stall stays, check the network in between",
    )
    NOT_ACKNOWLEDGED = (
        "not_acknowledged",
        "check the network between replica and orchestrator: records leave faster than they arrive",
    )
    WEIGHTS_NOT_ARRIVING = (
        "weights_not_arriving",
        f"check the network to the publisher, and {LogEvent.WEIGHTS_KEPT_OLD} in the replica's log",
    )
    UNREACHABLE = "unreachable", "start the component, or check the network in between; jobs are kept and sent again"
    NO_WORKERS = "no_workers", "start workers: python -m extras.farm"
    EXHAUSTED = "exhausted", "raise envgateway.sandbox.num_slots, or lower the limits of the programs that fill it"
    ALL_FILTERED = (
        "all_filtered",
        "all rewards of a group are equal, so the groups have no gradient: use easier or harder tasks, a finer "
        "reward, or batch.dynamic_sampling: false",
    )
    ALL_FAIL = (
        "all_fail",
        f"fix the cause in the failures, then run `rollmill resume` if the run was paused; {_CODE_CHANGES}",
    )
    MASKED = (
        "masked",
        f"fix the named causes, or raise rollout.max_masked_share, then run `rollmill resume`; {_CODE_CHANGES}",
    )
    NUMERICS = (
        "numerics",
        "repair the named cause and start another run, or raise policies.<name>.trainer.max_mismatch (docs/doctor.md)",
    )
    RECORDS_REFUSED = (
        "records_refused",
        "fix the named reason at that replica (model, tokenizer, settings, workflow or reward), or end its "
        "process (SIGTERM); its rollouts are lost meanwhile (docs/protocol.md has the bounds)",
    )
    NOTHING_TO_PLAY = "nothing_to_play", "data.curation refuses the whole dataset: loosen its limits, or add tasks"
    QUOTA_FULL = (
        "quota_full",
        "outstanding sequences fill the quota without a full batch: raise batch.max_staleness or lower batch.size",
    )
    NO_PROGRESS = "no_progress", "look at the log of the component, and at the function that is named"


class Hold(enum.StrEnum):
    """Names of the reasons that block all issues of task groups."""

    ENDED = "ended"
    PAUSED = "paused"
    DISK = "disk"
    GATEWAY = "envgateway"
    ALL_FAIL = "all fail"
    MASKED = "masked"
    NUMERICS = "numerics"


PAUSED_ITSELF = frozenset({Hold.ALL_FAIL, Hold.MASKED, Hold.NUMERICS})  # the run has paused itself


# --- facts and stalls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """A policy that is trained, and its trainer."""

    policy: str
    batch_size: int = 1
    num_kept: int = 0  # sequences that were kept for training
    num_filtered: int = 0  # sequences dropped because a group's rewards were equal
    num_filtered_in_a_row: int = 0  # sequences dropped because a group's rewards were equal, since one was kept
    quota_full: bool = False
    trainer_wanted: bool = True  # the run trains, and there are steps left
    trainer: Trainer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The run at one moment; ``now`` is monotonic, in seconds."""

    now: float
    ended: bool = False
    paused: bool = False  # by a person
    training: bool = True  # training groups may be issued
    held_back: Mapping[Hold, str] = field(default_factory=dict)  # reasons that block all issues: name, reason
    journal_blocked: str = ""
    journal_oldest_s: float = 0.0  # age of the oldest record that is not written
    replicas: tuple[Replica, ...] = ()  # with a lease
    lost: Mapping[Component, float] = field(default_factory=dict)  # components with a lost lease: time of the loss
    policies: tuple[PolicyFacts, ...] = ()
    accounts: Mapping[Component, AccountState] = field(default_factory=dict)
    peers: Mapping[Component, PeerState] = field(default_factory=dict)  # by the best report of each
    failures_in_a_row: int = 0
    last_failure: str = ""
    refused: Mapping[str, Streak] = field(default_factory=dict)  # records refused in a row, by replica
    group_size: int = 1
    nothing_to_play: bool = False  # curation refused a whole pass of the data
    progress: Mapping[str, float] = field(default_factory=dict)  # counters that grow while the run goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stalled component. ``inferred`` from its time, or else seen directly."""

    component: Component
    cause: Cause
    detail: str
    since: float = -1.0  # monotonic; left out: since the detector has seen it
    for_s: float = 0.0  # that the detector must see it before it counts
    inferred: bool = False

    @property
    def key(self) -> tuple[Component, Cause]:
        return self.component, self.cause


# --- the usual -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pulse:
    value: object
    since: float  # the last change, or the last moment at which no change was due
    longest_s: float = 0.0
    learnt_at: float = 0.0
    num_gaps: int = 0


class Usual:
    """The usual time between changes of each counter, in this run.

    counter grows -> note the gap since the last change        counter is still, though due -> its age
    limit = max(10 s, 4 x the longest gap lately); one minute before the first few gaps

    Gaps during a stall are not noted.
    """

    def __init__(self) -> None:
        self.learning = True
        self._pulses: dict[Hashable, _Pulse] = {}

    def overdue(
        self,
        key: Hashable,
        value: object,
        now: float,
        *,
        due: bool = True,
        age_s: float = float("inf"),
        unknown_s: float = UNKNOWN_S,
        most_s: float = float("inf"),
        times: float = 1.0,
    ) -> float | None:
        """Observe a counter; returns the seconds since its last change when those exceed the limit, else None.

        ``due``: whether the counter should grow at all. ``age_s``: of the work that the counter counts; younger work is not
        overdue. ``unknown_s``: limit before the first gaps. ``most_s``: upper bound of the limit; ``times``: factor on it.
        """
        pulse = self._pulses.setdefault(key, _Pulse(value, now))
        usual_s = pulse.longest_s * 0.5 ** ((now - pulse.learnt_at) / HALF_LIFE_S)
        if value != pulse.value:
            if self.learning:
                pulse.longest_s, pulse.learnt_at = max(now - pulse.since, usual_s), now
                pulse.num_gaps += 1
            pulse.value, pulse.since = value, now
        elif not due:
            pulse.since = now
        least_s = LEAST_S if pulse.num_gaps >= ENOUGH_GAPS else unknown_s
        still_s = min(now - pulse.since, age_s)
        return still_s if still_s > min(most_s, max(least_s, TIMES * usual_s) * times) else None

    def skip(self, seconds: float) -> None:
        """Shift all gaps by the seconds during which the detector did not run."""
        for pulse in self._pulses.values():
            pulse.since += seconds


# --- rules: (facts, usual) -> stalls -----------------------------------------------------------------------------------


def _silence(facts: Facts, usual: Usual) -> Iterator[Stall]:
    """Members without a report or a lease, and dependencies that do not answer."""
    now = facts.now
    reports = {replica.component: replica.num_reports for replica in facts.replicas}
    for policy in facts.policies:
        if (trainer := policy.trainer) is not None:
            ranks = {0: trainer.num_reports, **trainer.rank_reports}
            reports |= {trainer_component(policy.policy, rank): count for rank, count in ranks.items()}
    for component, count in reports.items():
        silent_s = usual.overdue(("report", component), count, now, unknown_s=LEAST_S, most_s=REPORT_MOST_S)
        if silent_s is not None:
            detail = f"no report for {silent_s:.0f} s"
            yield Stall(component=component, cause=Cause.SILENT, detail=detail, since=now - silent_s)
    for component, since in facts.lost.items():
        if is_of_replica(component) and any(replica.mailbox is not None for replica in facts.replicas):
            continue  # other replicas continue: the dispatcher issued the task groups again
        detail = "its lease ended and the component has not returned"
        yield Stall(component=component, cause=Cause.LOST, detail=detail, since=since)
    absent = {
        trainer_component(p.policy): "no trainer has joined"
        for p in facts.policies
        if p.trainer_wanted and p.trainer is None and trainer_component(p.policy) not in facts.lost
    }
    if not facts.replicas and not any(is_of_replica(component) for component in facts.lost):
        absent[INFERENCE] = "no replica has joined"
    if away := facts.held_back.get(Hold.GATEWAY, ""):
        absent[GATEWAY] = away
    for component, detail in absent.items():
        yield Stall(component=component, cause=Cause.ABSENT, detail=detail, for_s=ABSENT_S)
    for peer in facts.peers.values():
        if peer.silent_s > LEAST_S:
            detail = f"no component has reached it for {peer.silent_s:.0f} s: {peer.detail}"
            yield Stall(component=peer.component, cause=Cause.SILENT, detail=detail, since=now - peer.silent_s)
    best = facts.peers.get(GATEWAY)
    for replica in facts.replicas:
        for peer in replica.peers:
            if peer.component == GATEWAY and peer.silent_s > LEAST_S and best is not None and best.silent_s <= LEAST_S:
                detail = f"this replica does not reach the gateway, other replicas do: {peer.detail}"
                yield Stall(
                    component=replica.component, cause=Cause.UNREACHABLE, detail=detail, since=now - peer.silent_s
                )


def _states(facts: Facts, usual: Usual) -> Iterator[Stall]:
    """States that the run or its peers report: disk, queue of the gateway, failing or refused work."""
    if reason := facts.journal_blocked or facts.held_back.get(Hold.DISK, ""):
        yield Stall(component=DISK, cause=Cause.NO_FREE_DISK, detail=reason)
    elif (waiting_s := facts.journal_oldest_s) > LEAST_S:
        detail = f"its journal has not written a record for {waiting_s:.0f} s"
        yield Stall(component=ORCHESTRATOR, cause=Cause.JOURNAL_STUCK, detail=detail, since=facts.now - waiting_s)
    gateway = facts.peers.get(GATEWAY)
    if gateway is not None and not gateway.silent_s:
        programs = gateway.gauges.get(QueueGauge.UNANSWERED, 0.0) + num_waiting(gateway.gauges)
        if not gateway.gauges.get(QueueGauge.REDIS_CONNECTED, 1.0):
            detail = "the gateway does not reach its queue"
            yield Stall(component=REDIS, cause=Cause.UNREACHABLE, detail=detail, for_s=SETTLE_S)
        elif programs and not gateway.gauges.get(QueueGauge.WORKERS, 1.0):
            detail = f"{programs:.0f} programs wait and no worker is there"
            yield Stall(component=GATEWAY_WORKERS, cause=Cause.NO_WORKERS, detail=detail, for_s=SETTLE_S)
    for policy in facts.policies:
        if policy.trainer is not None and (refusal := policy.trainer.refusal):
            yield Stall(component=trainer_component(policy.policy), cause=Cause.NUMERICS, detail=refusal)
    masked = facts.held_back.get(Hold.MASKED, "")
    paused = masked or facts.held_back.get(Hold.ALL_FAIL, "")
    all_fail = facts.failures_in_a_row >= FAILED_GROUPS * facts.group_size
    if paused or all_fail:
        cause = Cause.MASKED if masked and not all_fail else Cause.ALL_FAIL
        detail = f"the last {facts.failures_in_a_row} rollouts failed, the newest with {facts.last_failure}"
        yield Stall(component=ROLLOUTS, cause=cause, detail=paused or detail, for_s=LEAST_S / 2, inferred=True)
    for sender, streak in facts.refused.items():
        if streak.number >= REFUSED_RECORDS and facts.now - streak.newest <= REFUSED_LATELY_S:
            newest = f"{streak.last.reason.value}: {streak.last.detail}"
            detail = f"its last {streak.number} records were refused, the newest because: {newest}"
            component = replica_component(sender)
            yield Stall(component=component, cause=Cause.RECORDS_REFUSED, detail=detail, since=streak.since)
    if facts.nothing_to_play:
        detail = "curation refuses every task of the dataset; refused tasks are played meanwhile"
        yield Stall(component=DATASET, cause=Cause.NOTHING_TO_PLAY, detail=detail)


def nothing_is_learnt(facts: Facts, usual: Usual) -> Iterator[Stall]:
    """Rollouts come, and dynamic sampling drops them all."""
    for policy in facts.policies:
        key, due = ("kept", policy.policy), facts.training
        still_s = usual.overdue(key, policy.num_kept, facts.now, due=due, unknown_s=LEAST_S)
        group, judged = facts.group_size, policy.num_kept + max(0, policy.num_filtered - policy.num_filtered_in_a_row)
        expected = group * (judged + PRIOR_GROUPS * group) / (policy.num_kept + group)  # sequences
        least = max(FILTERED_BATCHES * policy.batch_size, RARE_TIMES * expected)
        if still_s is not None and policy.num_filtered_in_a_row >= least:
            detail = (
                f"the last {policy.num_filtered_in_a_row} sequences came in groups of equal rewards: {policy.policy} "
                f"has no trainable group (before: {policy.num_kept} of {judged} sequences)"
            )
            yield Stall(component=WORKFLOW, cause=Cause.ALL_FILTERED, detail=detail, since=facts.now - still_s)


def _lost_orders(facts: Facts, usual: Usual) -> Iterator[Stall]:
    """Replicas that report but do not confirm issued slots or announced versions."""
    if facts.journal_blocked or facts.journal_oldest_s > LEAST_S / 2:
        return  # the replica may have run them without a durable record
    for replica in facts.replicas:
        key = ("heard", replica.component)
        silent_s = usual.overdue(key, replica.num_reports, facts.now, unknown_s=LEAST_S, most_s=HEARD_S)
        if replica.mailbox is None or silent_s is not None:
            continue
        lost: list[tuple[str, float]] = []
        unseen = [assignment.since for assignment in replica.unseen(UNSEEN_REPORTS)]
        if unseen and (old_s := facts.now - min(unseen)) > LEAST_S:
            lost.append((f"{len(unseen)} task groups were sent", old_s))
        for policy in replica.moving:
            account = facts.accounts.get(part(replica.component, weights(policy)))
            knows = account is None or any(a.name != ActivityName.UP_TO_DATE for a in account.now())
            key_, due = ("taken", replica.component, policy), not knows
            still_s = usual.overdue(key_, replica.held[policy].number, facts.now, due=due, most_s=LEAST_S)
            if still_s is not None:
                lost.append((f"a newer version of {policy} was announced", still_s))
        for what, old_s in lost:
            detail = f"{what} {old_s:.0f} s ago, and the replica's reports do not confirm that"
            yield Stall(component=replica.component, cause=Cause.ORDER_LOST, detail=detail, since=facts.now - old_s)


def _no_progress(facts: Facts, usual: Usual) -> Iterator[Stall]:
    """Work without progress for several times the usual: a decoding engine, a step, a call, a reward, a fetch."""
    gateway = facts.peers.get(GATEWAY)
    for account in facts.accounts.values():
        component = account.component
        if is_publisher(component) or component.startswith((GATEWAY, ORCHESTRATOR)):
            continue  # the components that wait for them show their state
        cpu_key, cpu = ("cpu", component), int(account.cpu_s / CPU_SHARE)
        rests = usual.overdue(cpu_key, cpu, facts.now, unknown_s=LEAST_S) is not None
        for activity in account.activities:
            if activity.name in RESTING:
                continue
            computing = activity.name in COMPUTING
            # Micro-batches, tokens, records; elsewhere progress is of other things, but a fetch has bytes beside its end.
            counts = computing or activity.name == ActivityName.GENERATING or is_records(component)
            ends = activity.num_done, account.progress if is_weights(component) else 0
            key = ("ends", component, activity.name, activity.on)
            still_s = usual.overdue(
                key,
                account.progress if counts else ends,
                facts.now,
                due=activity.num_now > 0,
                age_s=float("inf") if counts else activity.longest_now_s,
                unknown_s=RECORDS_S if is_records(component) else LONG_S.get(activity.name, UNKNOWN_S),
                # The gateway knows after a while whether its queue is the cause.
                times=2.0
                if activity.on == GATEWAY and gateway and QueueGauge.REDIS_CONNECTED in gateway.gauges
                else 1.0,
            )
            if still_s is None or (computing and account.cpu_s and not rests):
                continue
            awaited = facts.peers.get(activity.on)
            if activity.on == GATEWAY if awaited is None else awaited.silent_s:
                continue  # the silence says more, soon
            blamed, cause = _blamed(account, activity, facts)
            detail = f"{component} has been {activity.name} without progress for {still_s:.0f} s"
            if activity.num_now > 1:
                detail += f" ({activity.num_now} times at once)"
            if activity.detail:
                detail += f": {activity.detail}"
            yield Stall(component=blamed, cause=cause, detail=detail, since=facts.now - still_s, inferred=True)


def _blamed(account: AccountState, activity: ActivityTime, facts: Facts) -> tuple[Component, Cause]:
    """The component behind an activity without progress, and the cause."""
    component = account.component
    if activity.name == ActivityName.GENERATING:
        return part(component, activity.on), Cause.FROZEN
    if is_weights(component):
        return component, Cause.WEIGHTS_NOT_ARRIVING
    if is_records(component):
        return split(component)[0], Cause.NOT_ACKNOWLEDGED
    if activity.on == GATEWAY:
        gauges = facts.peers[GATEWAY].gauges
        return GATEWAY, Cause.EXHAUSTED if num_waiting(gauges) > 0 else Cause.STUCK
    if is_publisher(activity.on):
        return activity.on, Cause.STUCK
    if is_of_trainer(component) and activity.name in COMPUTING:
        # The ranks step together: one that does something else, or has done least, holds up the others.
        first = component.partition("/rank")[0]
        ranks = [other for name, other in facts.accounts.items() if name.partition("/rank")[0] == first]
        elsewhere = [other for other in ranks if not any(a.name in COMPUTING for a in other.now())]
        return min(elsewhere or ranks, key=lambda other: other.progress).component, Cause.STUCK
    return component, Cause.STUCK


def _nothing_goes_on(facts: Facts, usual: Usual) -> Stall | None:
    """No counter of the run grows: the longest activity of a rollout, else of a trainer. Counts where no rule has an answer."""
    still_s = usual.overdue("run", facts.progress, facts.now, due=not facts.paused and bool(facts.replicas), times=2.0)
    if still_s is None:
        return None
    detail = f"no part of the run made progress for {still_s:.0f} s"
    for belongs in (is_replica, is_of_trainer):
        accounts = [account for name, account in facts.accounts.items() if belongs(name)]
        busy = [(a.longest_now_s, a, of.component) for of in accounts for a in of.now() if a.name not in RESTING]
        if busy:
            longest_s, activity, component = max(busy, key=lambda one: one[0])
            who = f"{activity.num_now} rollouts have" if belongs is is_replica else f"{component} has"
            detail += f": {who} been {activity.name} for {longest_s:.0f} s"
            component = component if activity.on in ("", ORCHESTRATOR) else activity.on
            break
    else:
        component = ORCHESTRATOR
    full = component == ORCHESTRATOR and any(policy.quota_full for policy in facts.policies)
    cause = Cause.QUOTA_FULL if full else Cause.NO_PROGRESS
    return Stall(component=component, cause=cause, detail=detail, since=facts.now - still_s, inferred=True)


RULES: tuple[Callable[[Facts, Usual], Iterable[Stall]], ...] = (
    _silence,
    _states,
    nothing_is_learnt,
    _lost_orders,
    _no_progress,
)


# --- the detector ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    stall: Stall
    num_looks: int = 0
    num_missed: int = 0
    reported: bool = False


class StallDetector:
    def __init__(self) -> None:
        self._usual = Usual()
        self._first_seen: dict[tuple[Component, Cause], float] = {}
        self._seen: dict[tuple[Component, Cause], _Seen] = {}
        self._looked_at: float | None = None
        self._stood_still: tuple[float, Stall] | None = None  # the newest, with the end of its report

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The present stalls, oldest first."""
        return tuple(sorted((s.stall for s in self._seen.values() if s.reported), key=lambda stall: stall.since))

    def look(self, facts: Facts) -> tuple[list[Stall], list[Stall]]:
        """Look once, about once a second; returns the stalls that have begun and those that have ended."""
        before, self._looked_at = self._looked_at, facts.now
        if before is not None and (gap_s := facts.now - before) > NOT_LOOKED_S:
            self._usual.skip(gap_s)
            detail = f"its process or event loop stood still for {gap_s:.0f} s"
            stall = Stall(component=ORCHESTRATOR, cause=Cause.STOOD_STILL, detail=detail, since=before)
            self._stood_still = facts.now + SHOWN_S, stall
        self._usual.learning = not self._seen
        found = [stall for rule in RULES for stall in rule(facts, self._usual)]
        first_seen = {stall.key: self._first_seen.get(stall.key, facts.now) for stall in found}
        self._first_seen = first_seen
        found = [
            replace(stall, since=first_seen[stall.key]) if stall.since < 0 else stall
            for stall in found
            if facts.now - first_seen[stall.key] >= stall.for_s
        ]
        last_resort = _nothing_goes_on(facts, self._usual)  # always called: it learns the usual
        if last_resort is not None and not found:
            found = [last_resort]
        if self._stood_still is not None and facts.now < self._stood_still[0]:
            found.append(self._stood_still[1])
        return self._settle([] if facts.ended or facts.paused else _unexplained(found))

    def _settle(self, found: list[Stall]) -> tuple[list[Stall], list[Stall]]:
        begun, ended = [], []
        for stall in found:
            seen = self._seen.setdefault(stall.key, _Seen(stall))
            seen.stall, seen.num_missed = stall, 0
            seen.num_looks += 1
            if seen.num_looks >= LOOKS and not seen.reported:
                seen.reported = True
                begun.append(stall)
        for key in self._seen.keys() - {stall.key for stall in found}:
            seen = self._seen[key]
            seen.num_missed += 1
            if seen.num_missed >= LOOKS or not seen.reported:
                del self._seen[key]
                if seen.reported:
                    ended.append(seen.stall)
        return begun, ended


def _unexplained(found: list[Stall]) -> list[Stall]:
    """Without stalls that are inferred while another component was seen to stall, which explains them unless both are of
    different replicas; and only the first of each component and cause."""
    seen = [stall for stall in found if not stall.inferred and stall.component not in (WORKFLOW, DATASET)]

    def explained(stall: Stall) -> bool:
        owner = split(stall.component)[0]
        return any(not is_replica(owner) or not is_of_replica(s.component) or s.component == owner for s in seen)

    kept: dict[tuple[Component, Cause], Stall] = {}
    for stall in found:
        if not stall.inferred or not explained(stall):
            kept.setdefault(stall.key, stall)
    return list(kept.values())


# --- time accounts of all components ---------------------------------------------------------------------------------

WINDOW_S = 30.0  # over which shares of the present are taken
MOST_COMPONENTS = 4096  # names are words of peers: those beyond are not kept

_Seconds = dict[Activity, float]


class AccountBook:
    """Time accounts of all components, over the restarts of each: a restarted process begins its account anew, and the
    book adds the totals of its earlier incarnations."""

    def __init__(self) -> None:
        self._latest: dict[str, AccountState] = {}
        self._earlier: dict[str, _Seconds] = {}  # seconds of incarnations that are over
        # When, and the idle seconds and all seconds of trainers, and of replicas, until then.
        self._marks: deque[tuple[float, tuple[float, ...]]] = deque()

    def note(self, accounts: Iterable[AccountState]) -> None:
        """Note newer states of some components."""
        for account in accounts:
            known = self._latest.get(account.component)
            if known is None and len(self._latest) >= MOST_COMPONENTS:
                continue
            if known is not None and account.seconds < known.seconds:
                self._earlier[known.component] = self._seconds(known)
            self._latest[account.component] = account

    def _seconds(self, account: AccountState) -> _Seconds:
        """Seconds of this incarnation and the earlier ones."""
        found = dict(self._earlier.get(account.component, {}))
        for told in account.activities:
            activity = Activity(told.name, told.on)
            found[activity] = found.get(activity, 0.0) + told.seconds
        return found

    def totals(self) -> tuple[AccountState, ...]:
        """Every component with all its booked time, by name."""
        found = []
        for name, account in sorted(self._latest.items()):
            if name in self._earlier:
                now = {Activity(told.name, told.on): told for told in account.activities}
                activities = [
                    replace(now.get(activity) or ActivityTime(name=activity.name, on=activity.on), seconds=seconds)
                    for activity, seconds in self._seconds(account).items()
                ]
                account = replace(account, activities=tuple(activities))
            found.append(account)
        return tuple(found)

    def idle_shares(self, now: float) -> tuple[float | None, float | None]:
        """Shares of the time of trainers and of replicas in which they did not compute, and waited for the orchestrator,
        since the call ``WINDOW_S`` ago; None without any time."""
        sums = [0.0] * 4
        for name, account in self._latest.items():
            if is_of_trainer(name) or is_replica(name):
                first = 0 if is_of_trainer(name) else 2
                for activity, seconds in self._seconds(account).items():
                    idle = activity.name not in COMPUTING if is_of_trainer(name) else activity.on == ORCHESTRATOR
                    sums[first] += seconds if idle else 0.0
                    sums[first + 1] += seconds
        self._marks.append((now, tuple(sums)))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()
        passed = [after - before for before, after in zip(self._marks[0][1], sums, strict=True)]
        trainers, replicas = (passed[at] / passed[at + 1] if passed[at + 1] > 0 else None for at in (0, 2))
        return trainers, replicas

    def summary(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> "activity" or "activity -> awaited component" -> share of its time."""
        return {
            account.component: {name: round(share, 4) for name, share in account.named_shares().items()}
            for account in self.totals()
        }

    def waits(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> awaited component ("" is its own work) -> share of its time."""
        table: dict[str, dict[str, float]] = {}
        for account in self.totals():
            row: defaultdict[str, float] = defaultdict(float)
            for activity, share in account.shares().items():
                row[activity.on] += share
            table[account.component] = {on: round(share, 4) for on, share in row.items()}
        return table
