"""The detector in a running orchestrator: looks at the ring once a second, and tells logs, metrics and progress.

Everything here is told, nothing is decided: a stall changes nothing about the run, except that a lost order is sent again.
"""

from __future__ import annotations

import time

import structlog

from services.orchestrator.ring import Ring
from services.orchestrator.stall_facts import facts, own_activity
from services.orchestrator.stalls.causes import Cause
from services.orchestrator.stalls.detector import Stall, StallDetector

log = structlog.get_logger()

REPLICA = "replica/"


class StallWatch:
    def __init__(self, ring: Ring, detector: StallDetector | None = None) -> None:
        self._ring = ring
        self._detector = detector or StallDetector()

    def look(self) -> None:
        """Once a second."""
        ring = self._ring
        ring.standing.account.enter(*own_activity(ring))
        seen = facts(ring)
        ring.standing.book.note(seen.accounts.values())
        change = self._detector.look(seen)
        ring.standing.stalls = self._detector.stalls
        for stall in change.begun:
            self._begun(stall)
        for stall in change.ended:
            seconds = round(ring.clock() - stall.since, 1)
            log.info("run.unstalled", component=stall.component, cause=stall.cause.value, seconds=seconds)
            ring.metrics.stall("end", stall.component, stall.cause.value, stall.detail, seconds)

    def _begun(self, stall: Stall) -> None:
        ring = self._ring
        seconds = round(ring.clock() - stall.since, 1)
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
        ring.counters["stalls"] += 1
        ring.metrics.stall("begin", stall.component, stall.cause.value, stall.detail, seconds)
        if stall.cause is Cause.ORDER_LOST:
            replica = ring.pool.get(stall.component.removeprefix(REPLICA))
            if replica is not None:
                ring.dispatcher.rejoined(replica)  # repeating an order is harmless
