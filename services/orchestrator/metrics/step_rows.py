"""Writes the row of a training step: statistics of its batch, metrics of its trainer, gauges of the curation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from services.common.records.types import WeightVersion
from services.common.telemetry.metrics import StepKey, trainer_key
from services.orchestrator.buffer.batches import Batches
from services.orchestrator.metrics.run_metrics import RunMetrics
from services.orchestrator.tasks.orders import TrainingOrders


class StepRows:
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
