"""What must be looked at from time to time because nobody will say it: leases, overdue groups, free disk, throughput."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from services.common.errors import InfrastructureError
from services.orchestrator import forecast
from services.orchestrator.forecast import DiskForecast
from services.orchestrator.journal.retention import MOST_REWRITTEN, collect
from services.orchestrator.progress import waits
from services.orchestrator.ring import Ring
from services.orchestrator.stall_watch import StallWatch
from services.orchestrator.stalls.rules_work import COMPUTING

log = structlog.get_logger()

TICK_S = 0.25
DISK_S = 1.0
THROUGHPUT_S = 2.0
STALLS_S = 1.0
ACCOUNTS_S = 10.0
STOOD_STILL_S = 5.0  # between two ticks
STATE_S = 5.0
OVERDUE_GRACE_S = 60.0  # beyond all attempts of a rollout
LEAST_FAILURES = 256
FAILED_GROUPS = 16
GONE_S = 30.0  # a version that no replica holds for this long cannot be evaluated any more


class Watch:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._due: dict[str, float] = {}
        self._gone_since: float | None = None
        self._counters_written: Mapping[str, int] = {}
        self._collected_step: dict[str, int] = {}
        self._paused_for_failures = False
        self._paused_without: frozenset[str] = frozenset()  # peers that were silent then
        self._ticked_at: float | None = None
        self._stalls = StallWatch(ring)
        self._forecast = DiskForecast(ring.recipe.orchestrator.min_free_bytes)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        ring = self._ring
        self._prolong_leases()
        for replica in ring.pool.give_away():
            log.warning("replica.work_given_away", replica=replica.replica_id, incarnation=replica.incarnation)
        for replica in ring.pool.expire():
            log.warning("replica.lease_lost", replica=replica.replica_id, incarnation=replica.incarnation)
            ring.replica_lost(replica)
        for trainer in ring.trainers.expire():
            log.warning("trainer.lease_lost", policy=trainer.policy, incarnation=trainer.incarnation)
            ring.trainer_lost(trainer.policy)
        if self._is_due("disk", DISK_S):
            self._hold_back(await asyncio.to_thread(ring.journal.free_bytes))
            self._pause_for_failures()
            self._give_up_overdue()
            self._abandon_evaluations()
        if self._is_due("forecast", forecast.SAMPLE_S):
            used = await asyncio.to_thread(forecast.bytes_below, ring.run_dir)
            ring.disk = self._forecast.note(ring.clock(), ring.journal.free_bytes(), used)
        if self._is_due("stalls", STALLS_S):
            self._stalls.look()
        if self._is_due("throughput", THROUGHPUT_S):
            self._write_throughput()
        if self._is_due("state", STATE_S):
            ring.timeline.settle(time.time())
            if self._is_due("accounts", ACCOUNTS_S):
                ring.metrics.accounts(ring.standing.book.summary(), ring.standing.book.waits())
            if ring.counters != self._counters_written:
                self._counters_written = dict(ring.counters)
                ring.write_state()
            await self._collect()

    def _prolong_leases(self) -> None:
        """While this process stood still nobody could renew a lease here: none runs out for that."""
        now, before = self._ring.clock(), self._ticked_at
        self._ticked_at = now
        if before is not None and now - before > STOOD_STILL_S:
            log.warning("orchestrator.stood_still", seconds=round(now - before, 1))
            self._ring.pool.prolong(now - before)
            self._ring.trainers.prolong(now - before)

    def _is_due(self, name: str, every_s: float) -> bool:
        now = self._ring.clock()
        if now < self._due.get(name, now):
            return False
        self._due[name] = now + every_s
        return True

    def _hold_back(self, free_bytes: int) -> None:
        ring = self._ring
        least = ring.recipe.orchestrator.min_free_bytes
        reason = ""
        if ring.journal.blocked:
            reason = "the journal has no free disk"
        elif free_bytes < least:
            reason = f"free disk is below orchestrator.min_free_bytes ({least})"
        ring.dispatcher.hold("disk", reason)

    def _pause_for_failures(self) -> None:
        """A broken reward or a gateway that is gone would burn through the dataset; somebody must mend it first. So would
        machinery that fails where a policy wants it to.

        Where it was a peer that replicas could not reach, as a gateway whose machine is started again, nobody has to say
        that it is mended: the run goes on when they hear of it.
        """
        ring = self._ring
        ingest = ring.ingest
        if self._paused_for_failures:
            if self._paused_without and self._paused_without <= self._peers(silent=False):
                log.info("run.resumed", reason=f"heard again: {', '.join(sorted(self._paused_without))}")
                ring.resume()
            if not ring.control.paused:  # somebody resumed
                ingest.failures_in_a_row = 0
                ring.masked.forget()
                self._paused_for_failures = False
                ring.dispatcher.hold("failures", "")
            return
        limit = max(LEAST_FAILURES, FAILED_GROUPS * ring.recipe.rollout.group_size)
        all_fail = ingest.failures_in_a_row >= limit
        why = f"the last {ingest.failures_in_a_row} rollouts all failed" if all_fail else ring.masked.too_many()
        if not why or ring.control.paused or ring.control.ended:
            return
        self._paused_for_failures = True
        self._paused_without = self._peers(silent=True)
        ring.counters["pauses_for_failures"] += 1
        reason = f"{why}, the newest with {ingest.last_failure}; mend it, then `millrace resume`"
        if self._paused_without:
            reason += f" (by itself once replicas hear of {', '.join(sorted(self._paused_without))} again)"
        log.error("run.paused", reason=reason)
        ring.dispatcher.hold("failures", reason)  # first, so that this is the reason that people see
        ring.pause()

    def _peers(self, *, silent: bool) -> frozenset[str]:
        """What replicas depend on: what some of them do not hear of, or what all do that speak of it."""
        known = [peer for replica in self._ring.pool for peer in replica.peers]
        unheard = frozenset(peer.component for peer in known if peer.silent_s > 0.0)
        return unheard if silent else frozenset(peer.component for peer in known) - unheard

    def _give_up_overdue(self) -> None:
        """A replica that lives but never brings a rollout to its end loses the task group."""
        ring = self._ring
        rollout = ring.recipe.rollout
        limit = rollout.timeout_s * (rollout.infra_retries + 1) + OVERDUE_GRACE_S
        now = ring.clock()
        for replica in ring.pool:
            for name in [n for n, a in replica.assignments.items() if now - a.since > limit]:
                ring.counters["task_groups_overdue"] += 1
                ring.dispatcher.cancel(name, f"not done after {limit:g} s")
                ring.giving_up.orphaned([name])

    def _abandon_evaluations(self) -> None:
        """Versions that training has left behind and no replica holds: the rest of such a pass fails, and is reported."""
        ring = self._ring
        replicas = list(ring.pool)

        def gone(versions: Mapping[str, int]) -> bool:
            is_old = any(ring.ledgers[policy].newest_number > number for policy, number in versions.items())
            return is_old and bool(replicas) and not any(ring.dispatcher.may_play(r, versions) for r in replicas)

        if not any(gone(versions) for versions in ring.evaluations.pinned_versions()):
            self._gone_since = None
            return
        now = ring.clock()
        self._gone_since = now if self._gone_since is None else self._gone_since
        if now - self._gone_since < GONE_S:
            return
        ring.giving_up.abandon_evaluations(gone)
        self._gone_since = None

    def _write_throughput(self) -> None:
        ring = self._ring
        step = max((ledger.newest_number for ledger in ring.trained_ledgers.values()), default=0)
        values = {
            "tokens_per_s": ring.pool.tokens_per_s,
            "replicas": float(len(ring.pool)),
            "running": float(ring.pool.num_running),
        }
        ring.standing.book.mark(ring.clock())
        idle = {
            "trainer_idle_share": ring.standing.book.share_lately(
                lambda name: name.startswith("trainer/"), lambda a: a.name not in COMPUTING
            ),
            "replica_idle_share": ring.standing.book.share_lately(
                lambda name: name.startswith("replica/") and name.count("/") == 1, lambda a: a.on == "orchestrator"
            ),
        }
        values |= {name: share for name, share in idle.items() if share is not None}
        ring.metrics.throughput(max(step, 0), waits(ring), values)

    async def _collect(self) -> None:
        """Where the recipe asks for it, delete trajectories that no replay can need."""
        ring = self._ring
        if ring.recipe.orchestrator.retention != "needed" or ring.journal.blocked:
            return
        steps = {trainer.policy: trainer.oldest_checkpoint_step for trainer in ring.trainers}
        if len(steps) < len(ring.trained_ledgers) or steps == self._collected_step:
            return
        current = ring.journal.current_segments()
        live = set(ring.groups) | ring.experience.buffered_groups() | ring.evaluations.group_ids()
        try:
            found = await asyncio.to_thread(collect, ring.journal, steps, live, current=current)
        except (
            OSError,
            InfrastructureError,
        ) as error:  # no room for what makes room, or a disk that fails: later again
            log.warning("journal.not_collected", reason=str(error))
            return
        if len(found.rewritten) < MOST_REWRITTEN:  # else there may be more
            self._collected_step = steps
        if found.removed or found.rewritten:
            log.info("journal.collected", removed=found.removed, rewritten=found.rewritten, num_bytes=found.num_bytes)
