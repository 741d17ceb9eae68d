"""The contents of ``summary.json``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.telemetry.summary import RunSummary, ThresholdSummary
from services.orchestrator.buffer.batches import Batches
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.dispatch.threshold import Threshold, ThresholdState
from services.orchestrator.metrics.run_metrics import evaluation_values
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.state.run_control import RunControl
from services.orchestrator.state.timeline import Timeline
from services.orchestrator.state.versions import VersionLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Refers to live parts: every call gives the present values."""

    run_id: str
    started_at: float  # seconds since the epoch
    control: RunControl
    trained_ledgers: Mapping[str, VersionLedger]
    evaluations: Evaluations
    threshold: Threshold | None
    timeline: Timeline
    batches: Mapping[str, Batches]
    counters: Mapping[str, int]
    book: AccountBook

    def __call__(self) -> RunSummary:
        return {
            "run_id": self.run_id,
            "state": self.control.phase.value,
            "steps": {policy: max(ledger.newest_number, 0) for policy, ledger in self.trained_ledgers.items()},
            "evaluations": {result.name: evaluation_values(result) for result in self.evaluations.results.values()},
            "until": None if self.threshold is None else _threshold(self.threshold.state()),
            "overlap_share": self.timeline.overlap_share,
            "max_staleness": max((batches.staleness_max for batches in self.batches.values()), default=0),
            "seconds": time.time() - self.started_at,
            "counters": dict(self.counters),
            "time": self.book.summary(),
            "waited_for": self.book.waits(),
        }


def _threshold(state: ThresholdState) -> ThresholdSummary:
    return {
        "wanted": state.wanted,
        "newest": state.newest,
        "reached": state.reached,
        "step": state.step,
        "seconds": state.seconds,
    }
