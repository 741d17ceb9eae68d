"""Metrics of the run: rows in ``metrics/orchestrator.jsonl``, scalars for TensorBoard, and ``summary.json`` at the end.

Everything here can be made again from the journal or is for people to look at: nothing reads it back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from services.common.metrics import MetricsWriter
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.tensorboard import EventFile


class RunMetrics:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._rows = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
        self._board = EventFile(run_dir / "tensorboard")

    def training_step(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self._rows.write("training_step", policy=policy, step=step, **values)
        self._scalars(policy, values, step)

    def throughput(self, step: int, waits: list[str], values: Mapping[str, float]) -> None:
        self._rows.write("throughput", **values, waits=waits)
        self._scalars("throughput", values, step)

    def evaluation(self, result: EvaluationResult) -> None:
        self._rows.write(
            "evaluation",
            name=result.name,
            versions=dict(result.versions),
            mean_reward=result.mean_reward,
            num_trajectories=result.num_trajectories,
            num_failed=result.num_failed,
        )
        step = max(result.versions.values(), default=0)
        self._scalars("evaluation", {result.name: result.mean_reward}, step)

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._rows.write("summary", **summary)
        partial = self._run_dir / "summary.json.partial"
        partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        partial.replace(self._run_dir / "summary.json")

    def close(self) -> None:
        self._rows.close()
        self._board.close()

    def _scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._board.scalars(step, {f"{group}/{name}": v for name, v in values.items() if math.isfinite(v)})

