"""Prometheus metrics of a trainer and of its weight publisher. Imports no torch."""

from __future__ import annotations

from services.common.prometheus import Metric

METRICS = (
    Metric("rollmill_training_step", "gauge", "The training step at hand.", "training_step"),
    Metric("rollmill_checkpoint_step", "gauge", "The step of the newest durable checkpoint.", "checkpoint_step"),
    Metric("rollmill_step_seconds", "gauge", "Seconds of the newest training step.", "step_seconds"),
    Metric("rollmill_training_tokens_per_second", "gauge", "Tokens trained per second in the newest step, all ranks.", "tokens_per_second"),
    Metric("rollmill_batch_wait_seconds_total", "counter", "Seconds spent waiting for batches.", "waited_s"),
    Metric("rollmill_failed_checkpoints_total", "counter", "Checkpoints that could not be written.", "failed_checkpoints"),
    Metric("rollmill_damaged_checkpoints", "gauge", "Checkpoints that were set aside as damaged.", "damaged_checkpoints"),
)  # fmt: skip

PUBLISHER_METRICS = (
    Metric("rollmill_published_weight_version", "gauge", "The newest version that can be fetched.", "newest_version"),
    Metric("rollmill_snapshots", "gauge", "Versions kept in full.", "snapshots"),
    Metric("rollmill_deltas", "gauge", "Deltas kept.", "deltas"),
    Metric("rollmill_delta_bytes", "gauge", "Bytes of the deltas kept.", "delta_bytes"),
    Metric("rollmill_deltas_skipped_total", "counter", "Versions without a delta of their own: coding was slower than publishing.", "deltas_skipped"),
    Metric("rollmill_weight_bytes_sent_total", "counter", "Bytes of weights sent.", "bytes_sent"),
)  # fmt: skip
