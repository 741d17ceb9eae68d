"""Periodic checks: leases, overdue groups, free disk, stalls, failures that pause the run, throughput, and the deletion of
trajectories that no replay needs.

A stall changes no decision of the run, except that a lost order is sent again.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Mapping

import structlog

from services.common.errors import ConfigError, ModelMismatchError, UnknownPolicyError
from services.common.kept_tokens import MaskedCause, cause_of
from services.common.records import RunCount
from services.common.telemetry.accounts import (
    DISK,
    GATEWAY,
    INFERENCE,
    PERSON,
    Activity,
    ActivityName,
    replica_id,
    trainer_component,
)
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import RowKind, StallMoment, ThroughputKey
from services.orchestrator import metrics
from services.orchestrator.journal.journal import collect
from services.orchestrator.members import REPORT_S
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.progress import waits
from services.orchestrator.stalls import PAUSED_ITSELF, Cause, Hold
from services.orchestrator.stalls_rules import StallDetector

log = structlog.get_logger()

TICK_S = 0.25
DISK_S = 1.0
THROUGHPUT_S = 2.0
STALLS_S = 1.0
ACCOUNTS_S = 10.0
STOOD_STILL_S = 5.0  # between two ticks
STATE_S = 5.0
OVERDUE_GRACE_S = 60.0  # beyond all attempts of a rollout
GONE_S = 30.0  # a version that no replica holds for this long cannot be evaluated any more
LEAST_FAILURES = 256
FAILED_GROUPS = 16
RETRY_S = 60.0
PATIENCE_S = 600.0  # from the first pause after a success
PASSING = {
    MaskedCause.CAPACITY, MaskedCause.DEADLINE, MaskedCause.EPISODE_LOST, MaskedCause.INFRASTRUCTURE,
    MaskedCause.INVALID_RECORD,  # of one faulty replica, beside which others may join
    MaskedCause.REPLICA_LOST,
}  # fmt: skip
LASTING = tuple(f"{error.reason}: " for error in (ConfigError, ModelMismatchError, UnknownPolicyError))


class Watch:
    def __init__(self, core: OrchestratorCore) -> None:
        config, rollout = core.recipe.orchestrator, core.recipe.rollout
        self._core = core
        self.detector = StallDetector(core)
        self._failures = FailurePause(core)
        self._gone_since: float | None = None  # the versions of an evaluation
        self._overdue_s = rollout.timeout_s * (rollout.infra_retries + 1) + OVERDUE_GRACE_S
        self._deletes = config.retention == "needed"
        self._collected: dict[str, int] = {}  # oldest checkpoint steps at the last complete collection
        self._due: dict[str, float] = {}
        self._counters_written: Mapping[str, int] = {}
        self._ticked_at: float | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        core, now, before = self._core, self._core.clock(), self._ticked_at
        self._ticked_at = now
        if before is not None and now - before > STOOD_STILL_S:
            # This process did not run, so no member could renew its lease.
            log.warning("orchestrator.stood_still", seconds=round(now - before, 1))
            core.pool.prolong(now - before)
            core.trainers.prolong(now - before)
        core.check_leases()
        if self._is_due("disk", DISK_S):
            free_bytes, least = (
                await asyncio.to_thread(core.journal.free_bytes),
                core.recipe.orchestrator.min_free_bytes,
            )
            little = f"free disk is below orchestrator.min_free_bytes ({least})" if free_bytes < least else ""
            core.dispatcher.hold(Hold.DISK, "the journal has no free disk" if core.journal.blocked else little)
            self._failures.check()
            self._take_back_overdue()
            self._end_evaluations_of_gone_versions()
            core.dispatcher.schedule()  # decisions that depend on time alone
        if self._is_due("forecast", metrics.SAMPLE_S):
            used = await asyncio.to_thread(metrics.bytes_below, core.run_dir)
            newest = sum(trainer.checkpoint_step for trainer in core.trainers)
            core.disk.note(core.clock(), core.journal.free_bytes(), used, newest)
        pace = core.pool.report_every_s / REPORT_S  # longer interval for values that replicas report seldom
        if self._is_due("stalls", STALLS_S * pace):
            self.report_stalls()
        if self._is_due("throughput", THROUGHPUT_S * pace):
            self._write_throughput()
        if self._is_due("state", STATE_S):
            core.timeline.settle(time.time())
            if self._is_due("accounts", ACCOUNTS_S * pace):
                core.metrics.row(RowKind.ACCOUNTS, shares=core.book.summary(), waits=core.book.waits())
            if core.counters != self._counters_written:
                self._counters_written = dict(core.counters)
                core.write_state()
            if self._deletes:
                await self._collect()

    def _is_due(self, name: str, every_s: float) -> bool:
        now = self._core.clock()
        if now < self._due.get(name, now):
            return False
        self._due[name] = now + every_s
        return True

    def report_stalls(self) -> None:
        """Run the stall detector once, and write its results to logs, metrics and progress."""
        core = self._core
        core.account.enter(*own_activity(core))
        begun, ended = self.detector.look()
        core.book.note(self.detector.accounts.values())
        core.stalls = self.detector.stalls
        for moment, stall in [*((StallMoment.BEGIN, s) for s in begun), *((StallMoment.END, s) for s in ended)]:
            seconds = round(core.clock() - stall.since, 1)
            component, cause = stall.component, stall.cause.value
            core.metrics.stall(moment, component, cause, stall.detail, seconds)
            if moment is StallMoment.END:
                log.info(LogEvent.RUN_UNSTALLED, component=component, cause=cause, seconds=seconds)
                continue
            log.warning(
                "run.stalled", component=component, cause=cause, detail=stall.detail, since=time.time() - seconds,
                seconds=seconds, advice=stall.cause.advice,
            )  # fmt: skip
            core.counters[RunCount.STALLS.value] += 1
            lost = core.pool.get(replica_id(component)) if stall.cause is Cause.ORDER_LOST else None
            if lost is not None:
                core.dispatcher.rejoined(lost)  # sends the orders again; repeating one is harmless

    def _take_back_overdue(self) -> None:
        """Issue task groups again whose replicas live but never end a rollout."""
        core, now = self._core, self._core.clock()
        for replica in core.pool:
            for name in [name for name, given in replica.assignments.items() if now - given.since > self._overdue_s]:
                core.counters[RunCount.TASK_GROUPS_OVERDUE.value] += 1
                core.dispatcher.take_back(name, f"not done after {self._overdue_s:g} s")

    def _end_evaluations_of_gone_versions(self) -> None:
        """End each pass on versions that training has left behind and no replica has held for ``GONE_S``."""
        core, now = self._core, self._core.clock()

        def gone(versions: Mapping[str, int]) -> bool:
            is_old = any(core.ledgers[policy].newest_number > number for policy, number in versions.items())
            held = any(core.dispatcher.may_play(replica.held, versions) for replica in core.pool)
            return is_old and len(core.pool) > 0 and not held

        if not any(current.pinned and gone(current.versions) for current in core.evaluations.passes.values()):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= GONE_S:
            core.abandon_evaluations(gone)
            self._gone_since = None

    def _write_throughput(self) -> None:
        """Write the row of the run's throughput and of the shares of idle time."""
        core = self._core
        trainers_idle, replicas_idle = core.book.idle_shares(core.clock())
        step = max((ledger.newest_number for ledger in core.trained_ledgers.values()), default=0)
        values = {
            ThroughputKey.TOKENS_PER_S: core.pool.tokens_per_s,
            ThroughputKey.REPLICAS: float(len(core.pool)),
            ThroughputKey.RUNNING: float(core.pool.num_running),
            ThroughputKey.TRAINER_IDLE_SHARE: trainers_idle,
            ThroughputKey.REPLICA_IDLE_SHARE: replicas_idle,
        }
        known = {key.value: value for key, value in values.items() if value is not None}
        core.metrics.row(RowKind.THROUGHPUT, step=max(step, 0), **known, waits=waits(core))

    async def _collect(self) -> None:
        """Delete segments of unneeded records."""
        core = self._core
        steps = {trainer.policy: trainer.oldest_checkpoint_step for trainer in core.trainers}
        if len(steps) < len(core.trained_ledgers) or steps == self._collected:
            return
        current, live = core.journal.current_segments(), core.live_groups()
        try:
            removed = await asyncio.to_thread(collect, core.journal, steps, live, current=current)
        except (OSError, sqlite3.Error) as error:
            # No space for the note of a deletion, or a failing disk: try again later.
            log.warning("journal.not_collected", reason=str(error))
            return
        self._collected = steps
        if removed:
            log.info("journal.collected", removed=removed)


def own_activity(core: OrchestratorCore) -> Activity:
    """The orchestrator's activity: the component that the run waits for."""
    control, holds = core.control, core.dispatcher.holds
    if control.ended:
        return Activity(ActivityName.RUN_ENDED)
    if not PAUSED_ITSELF.isdisjoint(holds) or control.paused:
        return Activity(ActivityName.PAUSED, PERSON)
    if Hold.DISK in holds or core.journal.blocked:
        return Activity(ActivityName.WAITING_FOR_DISK, DISK)
    if Hold.GATEWAY in holds:
        return Activity(ActivityName.WAITING_FOR_GATEWAY_TO_JOIN, GATEWAY)
    if not any(core.pool.workers()):
        return Activity(ActivityName.WAITING_FOR_REPLICA, INFERENCE)
    if missing := [policy for policy, ledger in core.ledgers.items() if ledger.newest is None]:
        on = trainer_component(missing[0]) if missing[0] in core.batches else INFERENCE
        return Activity(ActivityName.WAITING_FOR_FIRST_VERSION, on)
    accounts = core.experience.admission.accounts
    if accounts and all(account.is_full for account in accounts.values()):
        fullest = max(accounts, key=lambda policy: accounts[policy].fullness)
        return Activity(ActivityName.WAITING_FOR_QUOTA, trainer_component(fullest))
    busiest = max(core.pool, key=lambda replica: replica.num_running, default=None)
    if busiest is not None and busiest.num_running:
        return Activity(ActivityName.WAITING_FOR_ROLLOUTS, busiest.component)
    return Activity(ActivityName.NOTHING_TO_DO)


class FailurePause:
    """Pauses the run when a broken reward, a lost gateway or failing machinery would use up the dataset, or a trainer
    refuses its batch because the engines compute other log-probabilities.

    Ends the run instead when no rollout has ever succeeded, or the recipe itself is wrong: no resume repairs that. The
    journal does not record such an end, so `rollmill run --resume` continues the run with a repaired workflow, reward or
    setting. After the loss of a peer that replicas could not reach, such as a gateway on a restarted machine, the run
    resumes by itself when the replicas reach the peer again. After failures of other machinery, such as a judge that still
    loads, it tries again after ``RETRY_S``. After ``PATIENCE_S`` without a success it tries once more; the next pause is one
    that a person ends and that ``PAUSES_FOR_FAILURES`` counts, or the run ends.
    """

    def __init__(self, core: OrchestratorCore) -> None:
        self._core = core
        self._limit = max(LEAST_FAILURES, FAILED_GROUPS * core.recipe.rollout.group_size)  # failures in a row
        self._paused = False
        self._num_tokens = -1  # recorded by the last pause
        self._patient_until = 0.0
        self._retry_at = math.inf
        self._unreachable: frozenset[str] = frozenset()  # peers that were silent at the pause

    def check(self) -> None:
        """Pause or resume the run if needed; the caller repeats this every second.

        Raises ``ConfigError`` to end a run in which no rollout can succeed.
        """
        if self._paused:
            self._resume_by_itself()
            return
        core, ingest = self._core, self._core.ingest
        refusal = "; ".join(trainer.refusal for trainer in core.trainers if trainer.refusal)
        all_fail = not refusal and ingest.failures_in_a_row >= self._limit
        streak = f"the last {ingest.failures_in_a_row} rollouts all failed"
        why = refusal or (streak if all_fail else core.masked.too_many())
        if not why or core.control.paused or core.control.ended:
            return
        now, num_tokens = core.clock(), core.counters[RunCount.TOKENS_RECORDED.value]
        if num_tokens != self._num_tokens:
            self._num_tokens, self._patient_until = num_tokens, now + PATIENCE_S
        self._unreachable = frozenset() if refusal else self._peers(silent=True)
        passes = all_fail and cause_of(ingest.last_failure.partition(":")[0]) in PASSING
        by_itself = not refusal and now < self._patient_until and (passes or bool(self._unreachable))
        newest = f"the newest with {ingest.last_failure}"
        if all_fail and not by_itself and (not num_tokens or ingest.last_failure.startswith(LASTING)):
            before = "" if num_tokens else "no rollout of this run has succeeded: "
            raise ConfigError(
                f"{before}{why}, {newest}; `rollmill fate RUN` counts the failures, and RUN/logs has the tracebacks. Fix the cause, "
                "then go on: `rollmill run --resume RUN`"
            )
        self._paused = True
        self._retry_at = math.inf if not by_itself else self._patient_until if self._unreachable else now + RETRY_S
        core.counters[RunCount.PAUSES_FOR_FAILURES.value] += not by_itself
        reason = refusal or f"{why}, {newest}; fix the cause, then run `rollmill resume`"
        if self._unreachable:
            reason += f" (by itself once replicas hear of {', '.join(sorted(self._unreachable))} again)"
        elif by_itself:
            reason += f" (by itself after {RETRY_S:g} s)"
        log.error("run.paused", reason=reason)
        # Ahead of the pause, so that people see this reason.
        core.dispatcher.hold(Hold.NUMERICS if refusal else Hold.ALL_FAIL if all_fail else Hold.MASKED, reason)
        core.pause()

    def _resume_by_itself(self) -> None:
        core = self._core
        if (self._unreachable and self._unreachable <= self._peers(silent=False)) or core.clock() >= self._retry_at:
            log.info("run.resumed", unreachable_before=sorted(self._unreachable))
            core.resume()
        if core.control.paused:
            return
        core.ingest.failures_in_a_row = 0  # also after a user resumed the run
        core.masked.forget()
        self._paused = False
        for held in PAUSED_ITSELF:
            core.dispatcher.hold(held, "")

    def _peers(self, *, silent: bool) -> frozenset[str]:
        """Dependencies of replicas: unreachable for some of the replicas, or for all replicas that report on them."""
        known = [peer for replica in self._core.pool for peer in replica.peers]
        unheard = frozenset(peer.component for peer in known if peer.silent_s > 0.0)
        return unheard if silent else frozenset(peer.component for peer in known) - unheard
