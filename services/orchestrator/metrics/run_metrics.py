"""Metrics of the run: rows in ``metrics/orchestrator.jsonl``, scalars for TensorBoard, and ``summary.json`` at the end.

These files are for users: the journal can produce them again, and the run does not read them. On a full disk rows are
dropped, counted and logged once; the run continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import orjson
import structlog

from services.common import run_files
from services.common.records.types import WeightTransfer
from services.common.telemetry.metrics import MetricsWriter, RowKind, StallMoment
from services.common.telemetry.summary import EstimateSummary, EvaluationSummary
from services.orchestrator.dispatch.threshold import ThresholdState
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.metrics.scalars import scalars_of
from services.orchestrator.metrics.tensorboard import EventFile

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

    def _row(self, kind: RowKind, **values: Any) -> None:
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
        self._row(RowKind.WEIGHT_TRANSFER, replica=replica_id, **asdict(transfer))

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
        """Written again by a restart when missing."""
        self._row(RowKind.SUMMARY, **summary)
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
