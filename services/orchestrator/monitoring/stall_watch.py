"""Runs the stall detector once a second, and writes its results to logs, metrics and progress.

A stall changes no decision of the run, except that a lost order is sent again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import structlog

from services.common.telemetry.components import replica_id
from services.common.telemetry.log_events import LogEvent
from services.common.telemetry.metrics import StallMoment
from services.orchestrator.members.replica import Replica
from services.orchestrator.metrics.run_metrics import RunMetrics
from services.orchestrator.monitoring.stall_facts import facts, own_activity
from services.orchestrator.monitoring.views import StallView
from services.orchestrator.stalls.detector import Stall, StallDetector
from services.orchestrator.stalls.facts import Cause

log = structlog.get_logger()


class StallWatch:
    def __init__(
        self,
        view: StallView,
        metrics: RunMetrics,
        counters: Counter[str],
        resend: Callable[[Replica], None],
        detector: StallDetector | None = None,
    ) -> None:
        """``resend`` sends a replica its orders again."""
        self._view = view
        self._state = view.stall_state
        self._metrics = metrics
        self._counters = counters
        self._resend = resend
        self._detector = detector or StallDetector()

    def look(self) -> None:
        """Run the detector; the caller does so once a second."""
        view = self._view
        self._state.account.enter(*own_activity(view))
        seen = facts(view)
        self._state.book.note(seen.accounts.values())
        change = self._detector.look(seen)
        self._state.stalls = self._detector.stalls
        for stall in change.begun:
            self._begun(stall)
        for stall in change.ended:
            seconds = round(self._view.clock() - stall.since, 1)
            log.info(LogEvent.RUN_UNSTALLED, component=stall.component, cause=stall.cause.value, seconds=seconds)
            self._metrics.stall(StallMoment.END, stall.component, stall.cause.value, stall.detail, seconds)

    def _begun(self, stall: Stall) -> None:
        seconds = round(self._view.clock() - stall.since, 1)
        log.warning(
            "run.stalled",
            component=stall.component,
            cause=stall.cause.value,
            detail=stall.detail,
            since=time.time() - seconds,
            seconds=seconds,
            chain=list(stall.chain),
            advice=stall.advice,
        )
        self._counters["stalls"] += 1
        self._metrics.stall(StallMoment.BEGIN, stall.component, stall.cause.value, stall.detail, seconds)
        if stall.cause is Cause.ORDER_LOST:
            replica = self._view.pool.get(replica_id(stall.component))
            if replica is not None:
                self._resend(replica)  # repeating an order is harmless
