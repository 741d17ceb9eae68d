"""Gauges of checkpoints, which trainers report and the orchestrator sums into counters of the run."""

from __future__ import annotations

from enum import StrEnum


class CheckpointGauge(StrEnum):
    FAILED = "failed_checkpoints"  # refused by the disk since the start of the trainer
    DAMAGED = "damaged_checkpoints"  # set aside in the directory
