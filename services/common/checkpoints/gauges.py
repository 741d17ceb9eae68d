"""What a trainer tells of its checkpoints among its gauges, and the orchestrator among the counters of a run."""

from __future__ import annotations

from enum import StrEnum


class CheckpointGauge(StrEnum):
    FAILED = "failed_checkpoints"  # that the disk did not take, since the trainer was started
    DAMAGED = "damaged_checkpoints"  # that lie there, set aside
