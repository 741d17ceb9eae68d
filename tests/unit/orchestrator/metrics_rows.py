"""Metrics of a run, written by the real recorder."""

from __future__ import annotations

from pathlib import Path

from services.common.records import WeightTransfer
from services.common.telemetry.metrics import RowKind, StallMoment
from services.orchestrator.metrics import RunMetrics

STEP = {
    "rollouts_finished": 64.0,
    "rollout_reward_mean": 0.5,
    "compute_s": 0.25,
    "elapsed_s": 3.0,
    "trainer/loss": -0.125,
    "trainer/entropy": 0.75,
    "trainer/tokens_per_second": 1000.0,
}


def transfer(version: int, error: str = "") -> WeightTransfer:
    return WeightTransfer(
        policy="model0", version=version, encoding="delta", transport="grpc", payload_size_bytes=1000, num_changes=4000,
        started_at=1.0, fetch_s=0.5, error=error,
    )  # fmt: skip


def write_run(run_dir: Path, *, steps: range = range(1, 4), summary: bool = True) -> None:
    metrics = RunMetrics(run_dir, tensorboard=False)
    for step in steps:
        metrics.training_step("model0", step, STEP)
        metrics.weight_transfer("a", transfer(step))
        metrics.row(RowKind.THROUGHPUT, step=step, tokens_per_s=500.0, waits=["waits"])
    metrics.weight_transfer("a", transfer(9, error="no answer"))
    metrics.stall(StallMoment.BEGIN, "envgateway", "silent", "no answer", 0.0)
    metrics.stall(StallMoment.END, "envgateway", "silent", "no answer", 12.0)
    if summary:
        metrics.summary(
            {"run_id": "run0", "state": "finished", "seconds": 9.0, "time": {"replica/a": {"generating": 1.0}}}
        )
    metrics.close()
