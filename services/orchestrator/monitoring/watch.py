"""Periodic checks: leases, overdue groups, free disk, throughput."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.retry_limit import GoneVersions, OverdueGroups
from services.orchestrator.journal.writer import Journal
from services.orchestrator.members.absences import Absences
from services.orchestrator.members.pool import REPORT_S, ReplicaPool
from services.orchestrator.metrics.run_metrics import RunMetrics
from services.orchestrator.monitoring.collector import Collector
from services.orchestrator.monitoring.failure_pause import FailurePause
from services.orchestrator.monitoring.stall_watch import StallWatch
from services.orchestrator.monitoring.throughput import ThroughputRows
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.stalls.facts import Hold
from services.orchestrator.state import disk_forecast as forecast
from services.orchestrator.state.disk_forecast import DiskForecast
from services.orchestrator.state.timeline import Timeline

log = structlog.get_logger()

TICK_S = 0.25
DISK_S = 1.0
THROUGHPUT_S = 2.0
STALLS_S = 1.0
ACCOUNTS_S = 10.0
STOOD_STILL_S = 5.0  # between two ticks
STATE_S = 5.0


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
            self._disk.note(self._clock(), self._journal.free_bytes(), used)
        pace = self._pool.report_every_s / REPORT_S  # longer interval for values that replicas report seldom
        if self._is_due("stalls", STALLS_S * pace):
            self._stalls.look()
        if self._is_due("throughput", THROUGHPUT_S * pace):
            self._throughput.write()
        if self._is_due("state", STATE_S):
            self._timeline.settle(time.time())
            if self._is_due("accounts", ACCOUNTS_S):
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
