"""Metrics of the run: rows in ``metrics/orchestrator.jsonl``, scalars for TensorBoard, and ``summary.json`` at the end.

These files are for users: the journal can produce them again, and the run does not read them. On a full disk rows are
dropped, counted and logged once; the run continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import structlog

from services.common import run_files
from services.common.records.types import WeightTransfer, WeightVersion
from services.common.telemetry.metrics import MetricsWriter, RowKind, StallMoment, StepKey, trainer_key
from services.common.telemetry.summary import EstimateSummary, EvaluationSummary, RunSummary, ThresholdSummary
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.buffer.batches import Batches
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.dispatch.threshold import Threshold, ThresholdState
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.metrics.scalars import EventFile, scalars_of
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.state.run_control import RunControl
from services.orchestrator.state.timeline import Timeline
from services.orchestrator.state.versions import VersionLedger
from services.orchestrator.tasks.orders import TrainingOrders

log = structlog.get_logger()


def evaluation_values(result: EvaluationResult, items: bool = False) -> EvaluationSummary:
    """An evaluation as plain JSON without its name; with ``items`` also the reward of each item."""
    values = cast(EvaluationSummary, {name: value for name, value in asdict(result).items() if name != "name"})
    for found in values["datasets"]:
        pairs = cast(list[tuple[int, EstimateSummary]], found["pass_at"])
        found["pass_at"] = {str(k): share for k, share in pairs}
        if not items:
            del found["item_rewards"]
    return values


class RunMetrics:
    def __init__(self, run_dir: Path, *, tensorboard: bool = True) -> None:
        self._run_dir = run_dir
        self._rows = MetricsWriter(run_files.metrics(run_dir))
        self.num_dropped = 0
        self._board = EventFile(run_files.tensorboard(run_dir)) if tensorboard else None

    def _row(self, kind: RowKind, /, **values: Any) -> None:
        try:
            row = self._rows.write(kind, **values)
            scalars = scalars_of(row)
            if scalars is not None and self._board is not None:
                self._board.scalars(scalars.step, scalars.tagged)
        except OSError as error:
            if not self.num_dropped:
                log.error("metrics.dropped", error=str(error))
            self.num_dropped += 1

    def training_step(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self._row(RowKind.TRAINING_STEP, policy=policy, step=step, **values)

    def throughput(self, step: int, waits: list[str], values: Mapping[str, float]) -> None:
        self._row(RowKind.THROUGHPUT, step=step, **values, waits=waits)

    def weight_transfer(self, replica_id: str, transfer: WeightTransfer) -> None:
        self._row(RowKind.WEIGHT_TRANSFER, **ReportedTransfer(replica=replica_id, transfer=transfer).to_row())

    def stall(self, moment: StallMoment, component: str, cause: str, detail: str, seconds: float) -> None:
        """``seconds`` since the begin of the stall."""
        self._row(RowKind.STALL, moment=moment, component=component, cause=cause, detail=detail, seconds=seconds)

    def accounts(self, shares: Mapping[str, Mapping[str, float]], waits: Mapping[str, Mapping[str, float]]) -> None:
        """The time of every component since its start, and the waits between components."""
        self._row(RowKind.ACCOUNTS, shares=shares, waits=waits)

    def evaluation(self, result: EvaluationResult) -> None:
        self._row(
            RowKind.EVALUATION,
            name=result.name,
            **evaluation_values(result, items=True),
        )

    def threshold(self, state: ThresholdState) -> None:
        """Write that training ends early; repeated after a restart."""
        self._row(RowKind.THRESHOLD, **asdict(state))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Written again by a restart when missing. The row has the shares of time under the key of the accounts."""
        self._row(RowKind.SUMMARY, **{"shares" if key == "time" else key: value for key, value in summary.items()})
        target = run_files.summary(self._run_dir)
        partial = target.with_suffix(".json.partial")
        try:
            partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
            partial.replace(target)
        except OSError as error:
            log.error("summary.not_written", error=str(error))

    def close(self) -> None:
        self._rows.close()
        if self._board is not None:
            self._board.close()


class StepRows:
    """Writes the row of a training step: statistics of its batch, metrics of its trainer, gauges of the curation."""

    def __init__(
        self,
        *,
        batches: Mapping[str, Batches],
        curation: TrainingOrders,
        last_metrics: dict[str, dict[str, float]],
        metrics: RunMetrics,
        started_at: float,
        write_state: Callable[[], None],
    ) -> None:
        """``last_metrics`` gets the values of every row, by policy; ``started_at`` in seconds since the epoch."""
        self._batches = batches
        self._curation = curation
        self._last_metrics = last_metrics
        self._metrics = metrics
        self._started_at = started_at
        self._write_state = write_state

    def write(self, version: WeightVersion, metrics: Mapping[str, float], compute_s: float) -> None:
        """Write the row of the training step that brought this version."""
        policy, step = version.policy, version.number
        statistics = self._batches[policy].statistics.pop(step, {})
        values = {
            **statistics,
            **{trainer_key(name): value for name, value in metrics.items()},
            **self._curation.gauges(),
            StepKey.COMPUTE_S.value: compute_s,
            StepKey.ELAPSED_S.value: time.time() - self._started_at,
        }
        self._last_metrics[policy] = values
        self._metrics.training_step(policy, step, values)
        self._write_state()


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
            "until": None if self.threshold is None else cast(ThresholdSummary, asdict(self.threshold.state())),
            "overlap_share": self.timeline.overlap_share,
            "max_staleness": max((batches.staleness_max for batches in self.batches.values()), default=0),
            "seconds": time.time() - self.started_at,
            "counters": dict(self.counters),
            "time": self.book.summary(),
            "waited_for": self.book.waits(),
        }
