"""Periodic checks and rows: leases, overdue groups, free disk, throughput, and the deletion of unneeded trajectories."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from services.common.errors import InfrastructureError
from services.common.telemetry.components import ORCHESTRATOR, is_of_trainer, is_replica
from services.common.telemetry.metrics import ThroughputKey
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.retry_limit import GoneVersions, OverdueGroups
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import collect
from services.orchestrator.members.absences import Absences
from services.orchestrator.members.pool import REPORT_S, ReplicaPool
from services.orchestrator.members.trainers import TrainerLeases
from services.orchestrator.metrics.run_metrics import RunMetrics
from services.orchestrator.monitoring.failure_pause import FailurePause
from services.orchestrator.monitoring.stall_watch import StallWatch
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.stalls.facts import Hold
from services.orchestrator.stalls.rules_work import COMPUTING
from services.orchestrator.state import disk_forecast as forecast
from services.orchestrator.state.disk_forecast import DiskForecast
from services.orchestrator.state.timeline import Timeline
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()

TICK_S = 0.25
DISK_S = 1.0
THROUGHPUT_S = 2.0
STALLS_S = 1.0
ACCOUNTS_S = 10.0
STOOD_STILL_S = 5.0  # between two ticks
STATE_S = 5.0


class ThroughputRows:
    """Writes rows of the run's throughput and of the shares of idle time."""

    def __init__(
        self,
        *,
        pool: ReplicaPool,
        trained_ledgers: Mapping[str, VersionLedger],
        book: AccountBook,
        metrics: RunMetrics,
        waits: Callable[[], list[str]],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._trained_ledgers = trained_ledgers
        self._book = book
        self._metrics = metrics
        self._waits = waits
        self._clock = clock

    def write(self) -> None:
        step = max((ledger.newest_number for ledger in self._trained_ledgers.values()), default=0)
        values = {
            ThroughputKey.TOKENS_PER_S.value: self._pool.tokens_per_s,
            ThroughputKey.REPLICAS.value: float(len(self._pool)),
            ThroughputKey.RUNNING.value: float(self._pool.num_running),
        }
        self._book.mark(self._clock())
        idle = {
            ThroughputKey.TRAINER_IDLE_SHARE.value: self._book.share_lately(
                is_of_trainer, lambda a: a.name not in COMPUTING
            ),
            ThroughputKey.REPLICA_IDLE_SHARE.value: self._book.share_lately(is_replica, lambda a: a.on == ORCHESTRATOR),
        }
        values |= {name: share for name, share in idle.items() if share is not None}
        self._metrics.throughput(max(step, 0), self._waits(), values)


class Collector:
    """Deletes trajectories that no replay can need, where the recipe enables retention."""

    def __init__(
        self, journal: Journal, trainers: TrainerLeases, num_trainers: int, live_groups: Callable[[], set[str]]
    ) -> None:
        """``num_trainers`` of the whole run; ``live_groups`` returns task groups whose records must stay."""
        self._journal = journal
        self._trainers = trainers
        self._num_trainers = num_trainers
        self._live_groups = live_groups
        self._collected: dict[str, int] = {}  # oldest checkpoint steps at the last complete collection

    async def collect(self) -> None:
        """Delete segments of unneeded records."""
        steps = {trainer.policy: trainer.oldest_checkpoint_step for trainer in self._trainers}
        if len(steps) < self._num_trainers or steps == self._collected:
            return
        current = self._journal.current_segments()
        live = self._live_groups()
        try:
            removed = await asyncio.to_thread(collect, self._journal, steps, live, current=current)
        except (OSError, InfrastructureError) as error:
            # No space for the record of a deletion, or a failing disk: try again later.
            log.warning("journal.not_collected", reason=str(error))
            return
        self._collected = steps
        if removed:
            log.info("journal.collected", removed=removed)


class Watch:
    def __init__(
        self,
        *,
        absences: Absences,
        collector: Collector | None,
        failures: FailurePause,
        gone_versions: GoneVersions,
        overdue: OverdueGroups,
        stalls: StallWatch,
        throughput: ThroughputRows,
        book: AccountBook,
        counters: Mapping[str, int],
        disk: DiskForecast,
        dispatcher: Dispatcher,
        journal: Journal,
        metrics: RunMetrics,
        min_free_bytes: int,
        pool: ReplicaPool,
        run_dir: Path,
        timeline: Timeline,
        trainers: TrainerLeases,
        write_state: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """``collector`` is None in a run that keeps every record."""
        self._absences = absences
        self._collector = collector
        self._failures = failures
        self._gone_versions = gone_versions
        self._overdue = overdue
        self._stalls = stalls
        self._throughput = throughput
        self._book = book
        self._counters = counters
        self._disk = disk
        self._dispatcher = dispatcher
        self._journal = journal
        self._metrics = metrics
        self._min_free_bytes = min_free_bytes
        self._pool = pool
        self._run_dir = run_dir
        self._timeline = timeline
        self._trainers = trainers
        self._write_state = write_state
        self._clock = clock
        self._due: dict[str, float] = {}
        self._counters_written: Mapping[str, int] = {}
        self._ticked_at: float | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        self._prolong_leases()
        self._absences.check()
        if self._is_due("disk", DISK_S):
            self._hold_back(await asyncio.to_thread(self._journal.free_bytes))
            self._failures.check()
            self._overdue.take_back()
            self._gone_versions.check()
            self._dispatcher.schedule()  # decisions that depend on time alone
        if self._is_due("forecast", forecast.SAMPLE_S):
            used = await asyncio.to_thread(forecast.bytes_below, self._run_dir)
            newest = sum(trainer.checkpoint_step for trainer in self._trainers)
            self._disk.note(self._clock(), self._journal.free_bytes(), used, newest)
        pace = self._pool.report_every_s / REPORT_S  # longer interval for values that replicas report seldom
        if self._is_due("stalls", STALLS_S * pace):
            self._stalls.look()
        if self._is_due("throughput", THROUGHPUT_S * pace):
            self._throughput.write()
        if self._is_due("state", STATE_S):
            self._timeline.settle(time.time())
            if self._is_due("accounts", ACCOUNTS_S * pace):
                self._metrics.accounts(self._book.summary(), self._book.waits())
            if self._counters != self._counters_written:
                self._counters_written = dict(self._counters)
                self._write_state()
            if self._collector is not None:
                await self._collector.collect()

    def _prolong_leases(self) -> None:
        """Extend the leases by the time during which this process did not run: no member could renew its lease."""
        now, before = self._clock(), self._ticked_at
        self._ticked_at = now
        if before is not None and now - before > STOOD_STILL_S:
            log.warning("orchestrator.stood_still", seconds=round(now - before, 1))
            self._absences.prolong(now - before)

    def _is_due(self, name: str, every_s: float) -> bool:
        now = self._clock()
        if now < self._due.get(name, now):
            return False
        self._due[name] = now + every_s
        return True

    def _hold_back(self, free_bytes: int) -> None:
        least = self._min_free_bytes
        reason = ""
        if self._journal.blocked:
            reason = "the journal has no free disk"
        elif free_bytes < least:
            reason = f"free disk is below orchestrator.min_free_bytes ({least})"
        self._dispatcher.hold(Hold.DISK, reason)
