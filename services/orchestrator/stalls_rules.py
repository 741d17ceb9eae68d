"""Detects stalls: the component that does not move, the cause, since when, and what to do.

    parts of the core -> rules -> stalls -> those that another one explains are dropped -> held for two looks -> reported

Four kinds of evidence: leases that ended, peers that are silent, states that peers report (a full disk, failing
rollouts), and no progress for several times the usual. Deterministic, by the clock of the core. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

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
)  # fmt: skip
from services.common.telemetry.accounts import replica as replica_component
from services.common.telemetry.metrics import QueueGauge, num_waiting
from services.orchestrator.members import Trainer
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.stalls import COMPUTING, PAUSED_ITSELF, Cause, Hold, Stall

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


# --- the rules -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    stall: Stall
    num_looks: int = 0
    num_missed: int = 0
    reported: bool = False


class StallDetector:
    """The rules over the parts of the core, and the stalls that they have found at the looks so far."""

    def __init__(self, core: OrchestratorCore) -> None:
        self._core = core
        self.now = 0.0  # of the present look, monotonic
        self.trainers: dict[str, Trainer | None] = {}  # by policy
        self.accounts: dict[Component, AccountState] = {}  # of this process, and of members with a lease
        self.peers: dict[Component, PeerState] = {}  # by the report of the component with the best view
        self._usual = Usual()
        self._first_seen: dict[tuple[Component, Cause], float] = {}
        self._seen: dict[tuple[Component, Cause], _Seen] = {}
        self._stood_still: tuple[float, Stall] | None = None  # the newest, with the end of its report

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The present stalls, oldest first."""
        return tuple(sorted((s.stall for s in self._seen.values() if s.reported), key=lambda stall: stall.since))

    def look(self) -> tuple[list[Stall], list[Stall]]:
        """Look once, about once a second; returns the stalls that have begun and those that have ended."""
        core, before = self._core, self.now
        self._read()
        if before and (gap_s := self.now - before) > NOT_LOOKED_S:
            self._usual.skip(gap_s)
            detail = f"its process or event loop stood still for {gap_s:.0f} s"
            stall = Stall(component=ORCHESTRATOR, cause=Cause.STOOD_STILL, detail=detail, since=before)
            self._stood_still = self.now + SHOWN_S, stall
        self._usual.learning = not self._seen
        rules = self._silence, self._states, self.nothing_is_learnt, self._lost_orders, self._no_progress
        found = [stall for rule in rules for stall in rule()]
        first_seen = {stall.key: self._first_seen.get(stall.key, self.now) for stall in found}
        self._first_seen = first_seen
        found = [
            replace(stall, since=first_seen[stall.key]) if stall.since < 0 else stall
            for stall in found
            if self.now - first_seen[stall.key] >= stall.for_s
        ]
        by_a_person = core.control.paused and PAUSED_ITSELF.isdisjoint(core.dispatcher.holds)
        last_resort = self._nothing_goes_on(due=not by_a_person)  # always called: it learns the usual
        if last_resort is not None and not found:
            found = [last_resort]
        if self._stood_still is not None and self.now < self._stood_still[0]:
            found.append(self._stood_still[1])
        return self._settle([] if core.control.ended or by_a_person else _unexplained(found))

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

    def _read(self) -> None:
        """The moment, and the reports of members with a lease: older reports do not describe the present. Publishers are of
        their trainer's lease."""
        core = self._core
        self.now = core.clock()
        self.trainers = {policy: core.trainers.get(policy) for policy in core.batches}
        members = [*core.pool, *filter(None, self.trainers.values())]
        self.peers = {}
        for peer in (peer for member in members for peer in member.peers):
            known = self.peers.get(peer.component)
            if known is None or peer.silent_s < known.silent_s:
                self.peers[peer.component] = peer
        told = [account for replica in core.pool for account in replica.accounts]
        told += [a for trainer in self.trainers.values() if trainer for of in trainer.accounts.values() for a in of]
        told += [account for peer in self.peers.values() for account in peer.accounts]
        self.accounts = {account.component: account for account in (*told, core.account.state())}

    def _silence(self) -> Iterator[Stall]:
        """Members without a report or a lease, and dependencies that do not answer."""
        core, now = self._core, self.now
        reports = {replica.component: replica.num_reports for replica in core.pool}
        for policy, trainer in self.trainers.items():
            if trainer is not None:
                ranks = {0: trainer.num_reports, **trainer.rank_reports}
                reports |= {trainer_component(policy, rank): count for rank, count in ranks.items()}
        for component, count in reports.items():
            silent_s = self._usual.overdue(("report", component), count, now, unknown_s=LEAST_S, most_s=REPORT_MOST_S)
            if silent_s is not None:
                detail = f"no report for {silent_s:.0f} s"
                yield Stall(component=component, cause=Cause.SILENT, detail=detail, since=now - silent_s)
        for component, since in core.lost.items():
            if is_of_replica(component) and any(replica.mailbox is not None for replica in core.pool):
                continue  # other replicas continue: the dispatcher issued the task groups again
            detail = "its lease ended and the component has not returned"
            yield Stall(component=component, cause=Cause.LOST, detail=detail, since=since)
        absent = {}
        for policy, trainer in self.trainers.items():
            wanted = core.num_steps > 0 and core.ledgers[policy].newest_number < core.last_step(policy)
            if wanted and trainer is None and trainer_component(policy) not in core.lost:
                absent[trainer_component(policy)] = "no trainer has joined"
        if not len(core.pool) and not any(is_of_replica(component) for component in core.lost):
            absent[INFERENCE] = "no replica has joined"
        if away := core.dispatcher.holds.get(Hold.GATEWAY, ""):
            absent[GATEWAY] = away
        for component, detail in absent.items():
            yield Stall(component=component, cause=Cause.ABSENT, detail=detail, for_s=ABSENT_S)
        for peer in self.peers.values():
            if peer.silent_s > LEAST_S:
                detail = f"no component has reached it for {peer.silent_s:.0f} s: {peer.detail}"
                yield Stall(component=peer.component, cause=Cause.SILENT, detail=detail, since=now - peer.silent_s)
        if GATEWAY in self.peers and self.peers[GATEWAY].silent_s > LEAST_S:
            return  # for all of them
        for replica in core.pool:
            for peer in replica.peers:
                if peer.component == GATEWAY and peer.silent_s > LEAST_S:
                    detail = f"this replica does not reach the gateway, other replicas do: {peer.detail}"
                    since = now - peer.silent_s
                    yield Stall(component=replica.component, cause=Cause.UNREACHABLE, detail=detail, since=since)

    def _states(self) -> Iterator[Stall]:
        """States that the run or its peers report: disk, queue of the gateway, failing or refused work."""
        core, holds, ingest = self._core, self._core.dispatcher.holds, self._core.ingest
        if reason := core.journal.blocked or holds.get(Hold.DISK, ""):
            yield Stall(component=DISK, cause=Cause.NO_FREE_DISK, detail=reason)
        elif (waiting_s := core.journal.waiting_s) > LEAST_S:
            detail = f"its journal has not written a record for {waiting_s:.0f} s"
            yield Stall(component=ORCHESTRATOR, cause=Cause.JOURNAL_STUCK, detail=detail, since=self.now - waiting_s)
        gateway = self.peers.get(GATEWAY)
        if gateway is not None and not gateway.silent_s:
            programs = gateway.gauges.get(QueueGauge.UNANSWERED, 0.0) + num_waiting(gateway.gauges)
            if not gateway.gauges.get(QueueGauge.REDIS_CONNECTED, 1.0):
                detail = "the gateway does not reach its queue"
                yield Stall(component=REDIS, cause=Cause.UNREACHABLE, detail=detail, for_s=SETTLE_S)
            elif programs and not gateway.gauges.get(QueueGauge.WORKERS, 1.0):
                detail = f"{programs:.0f} programs wait and no worker is there"
                yield Stall(component=GATEWAY_WORKERS, cause=Cause.NO_WORKERS, detail=detail, for_s=SETTLE_S)
        for policy, trainer in self.trainers.items():
            if trainer is not None and trainer.refusal:
                yield Stall(component=trainer_component(policy), cause=Cause.NUMERICS, detail=trainer.refusal)
        masked = holds.get(Hold.MASKED, "")
        paused = masked or holds.get(Hold.ALL_FAIL, "")
        all_fail = ingest.failures_in_a_row >= FAILED_GROUPS * core.recipe.rollout.group_size
        if paused or all_fail:
            cause = Cause.MASKED if masked and not all_fail else Cause.ALL_FAIL
            detail = f"the last {ingest.failures_in_a_row} rollouts failed, the newest with {ingest.last_failure}"
            yield Stall(component=ROLLOUTS, cause=cause, detail=paused or detail, for_s=LEAST_S / 2, inferred=True)
        for sender, streak in ingest.streaks.items():
            if streak.number >= REFUSED_RECORDS and self.now - streak.newest <= REFUSED_LATELY_S:
                newest = f"{streak.last.reason.value}: {streak.last.detail}"
                detail = f"its last {streak.number} records were refused, the newest because: {newest}"
                component = replica_component(sender)
                yield Stall(component=component, cause=Cause.RECORDS_REFUSED, detail=detail, since=streak.since)
        if core.training_orders.nothing_to_play and core.dispatcher.train:
            detail = "curation refuses every task of the dataset; refused tasks are played meanwhile"
            yield Stall(component=DATASET, cause=Cause.NOTHING_TO_PLAY, detail=detail)

    def nothing_is_learnt(self) -> Iterator[Stall]:
        """Rollouts come, and dynamic sampling drops them all."""
        experience, group = self._core.experience, self._core.recipe.rollout.group_size
        for policy, num_kept in experience.num_kept.items():
            key, due = ("kept", policy), self._core.dispatcher.train
            still_s = self._usual.overdue(key, num_kept, self.now, due=due, unknown_s=LEAST_S)
            in_a_row = experience.num_filtered_in_a_row[policy]  # sequences, since one was kept
            judged = num_kept + max(0, experience.num_filtered[policy] - in_a_row)
            expected = group * (judged + PRIOR_GROUPS * group) / (num_kept + group)  # sequences
            least = max(FILTERED_BATCHES * experience.buffers[policy].batch_size, RARE_TIMES * expected)
            if still_s is not None and in_a_row >= least:
                detail = (
                    f"the last {in_a_row} sequences came in groups of equal rewards: {policy} has no trainable group "
                    f"(before: {num_kept} of {judged} sequences)"
                )
                yield Stall(component=WORKFLOW, cause=Cause.ALL_FILTERED, detail=detail, since=self.now - still_s)

    def _lost_orders(self) -> Iterator[Stall]:
        """Replicas that report but do not confirm issued slots or announced versions."""
        core, now = self._core, self.now
        if core.journal.blocked or core.journal.waiting_s > LEAST_S / 2:
            return  # the replica may have run them without a durable record
        for replica in core.pool:
            key = ("heard", replica.component)
            silent_s = self._usual.overdue(key, replica.num_reports, now, unknown_s=LEAST_S, most_s=HEARD_S)
            if replica.mailbox is None or silent_s is not None:
                continue
            lost: list[tuple[str, float]] = []
            unseen = [assignment.since for assignment in replica.unseen(UNSEEN_REPORTS)]
            if unseen and (old_s := now - min(unseen)) > LEAST_S:
                lost.append((f"{len(unseen)} task groups were sent", old_s))
            for policy in replica.moving:
                account = self.accounts.get(part(replica.component, weights(policy)))
                knows = account is None or any(a.name != ActivityName.UP_TO_DATE for a in account.now())
                key_, held = ("taken", replica.component, policy), replica.held[policy].number
                still_s = self._usual.overdue(key_, held, now, due=not knows, most_s=LEAST_S)
                if still_s is not None:
                    lost.append((f"a newer version of {policy} was announced", still_s))
            for what, old_s in lost:
                detail = f"{what} {old_s:.0f} s ago, and the replica's reports do not confirm that"
                yield Stall(component=replica.component, cause=Cause.ORDER_LOST, detail=detail, since=now - old_s)

    def _no_progress(self) -> Iterator[Stall]:
        """Work without progress for several times the usual: a decoding engine, a step, a call, a reward, a fetch."""
        gateway = self.peers.get(GATEWAY)
        for account in self.accounts.values():
            component = account.component
            if is_publisher(component) or component.startswith((GATEWAY, ORCHESTRATOR)):
                continue  # the components that wait for them show their state
            cpu_key, cpu = ("cpu", component), int(account.cpu_s / CPU_SHARE)
            rests = self._usual.overdue(cpu_key, cpu, self.now, unknown_s=LEAST_S) is not None
            for activity in account.activities:
                if activity.name in RESTING:
                    continue
                computing = activity.name in COMPUTING
                # Micro-batches, tokens, records; elsewhere progress is of other things, but a fetch has bytes beside its end.
                counts = computing or activity.name == ActivityName.GENERATING or is_records(component)
                ends = activity.num_done, account.progress if is_weights(component) else 0
                # The gateway knows after a while whether its queue is the cause.
                queued = activity.on == GATEWAY and gateway and QueueGauge.REDIS_CONNECTED in gateway.gauges
                still_s = self._usual.overdue(
                    ("ends", component, activity.name, activity.on),
                    account.progress if counts else ends,
                    self.now,
                    due=activity.num_now > 0,
                    age_s=float("inf") if counts else activity.longest_now_s,
                    unknown_s=RECORDS_S if is_records(component) else LONG_S.get(activity.name, UNKNOWN_S),
                    times=2.0 if queued else 1.0,
                )
                if still_s is None or (computing and account.cpu_s and not rests):
                    continue
                awaited = self.peers.get(activity.on)
                if activity.on == GATEWAY if awaited is None else awaited.silent_s:
                    continue  # the silence says more, soon
                blamed, cause = self._blamed(account, activity)
                detail = f"{component} has been {activity.name} without progress for {still_s:.0f} s"
                if activity.num_now > 1:
                    detail += f" ({activity.num_now} times at once)"
                if activity.detail:
                    detail += f": {activity.detail}"
                yield Stall(component=blamed, cause=cause, detail=detail, since=self.now - still_s, inferred=True)

    def _blamed(self, account: AccountState, activity: ActivityTime) -> tuple[Component, Cause]:
        """The component behind an activity without progress, and the cause."""
        component = account.component
        if activity.name == ActivityName.GENERATING:
            return part(component, activity.on), Cause.FROZEN
        if is_weights(component):
            return component, Cause.WEIGHTS_NOT_ARRIVING
        if is_records(component):
            return split(component)[0], Cause.NOT_ACKNOWLEDGED
        if activity.on == GATEWAY:
            return GATEWAY, Cause.EXHAUSTED if num_waiting(self.peers[GATEWAY].gauges) > 0 else Cause.STUCK
        if is_publisher(activity.on):
            return activity.on, Cause.STUCK
        if is_of_trainer(component) and activity.name in COMPUTING:
            # The ranks step together: one that does something else, or has done least, holds up the others.
            first = component.partition("/rank")[0]
            ranks = [other for name, other in self.accounts.items() if name.partition("/rank")[0] == first]
            elsewhere = [other for other in ranks if not any(a.name in COMPUTING for a in other.now())]
            return min(elsewhere or ranks, key=lambda other: other.progress).component, Cause.STUCK
        return component, Cause.STUCK

    def _nothing_goes_on(self, *, due: bool) -> Stall | None:
        """No counter of the run grows: the longest activity of a rollout, else of a trainer. Counts where no rule has an
        answer."""
        core = self._core
        progress = [
            core.ingest.num_durable,
            {n: a.progress for n, a in self.accounts.items() if is_of_replica(n) or is_of_trainer(n)},
            {replica.replica_id: replica.num_tokens for replica in core.pool},
            {policy: trainer.checkpoint_step for policy, trainer in self.trainers.items() if trainer is not None},
            {policy: (core.ledgers[policy].newest_number, b.newest_step) for policy, b in core.batches.items()},
        ]
        still_s = self._usual.overdue("run", progress, self.now, due=due and len(core.pool) > 0, times=2.0)
        if still_s is None:
            return None
        detail = f"no part of the run made progress for {still_s:.0f} s"
        for belongs in (is_replica, is_of_trainer):
            accounts = [account for name, account in self.accounts.items() if belongs(name)]
            busy = [(a.longest_now_s, a, of.component) for of in accounts for a in of.now() if a.name not in RESTING]
            if busy:
                longest_s, activity, component = max(busy, key=lambda one: one[0])
                who = f"{activity.num_now} rollouts have" if belongs is is_replica else f"{component} has"
                detail += f": {who} been {activity.name} for {longest_s:.0f} s"
                component = component if activity.on in ("", ORCHESTRATOR) else activity.on
                break
        else:
            component = ORCHESTRATOR
        full = component == ORCHESTRATOR and any(a.is_full for a in core.experience.admission.accounts.values())
        cause = Cause.QUOTA_FULL if full else Cause.NO_PROGRESS
        return Stall(component=component, cause=cause, detail=detail, since=self.now - still_s, inferred=True)


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
