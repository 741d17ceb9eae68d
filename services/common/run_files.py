"""Paths of the files in a run's directory that one process writes and another reads."""

from __future__ import annotations

from pathlib import Path


def journal(run_dir: Path) -> Path:
    return run_dir / "journal"


def logs(run_dir: Path) -> Path:
    """The directory of the processes' logs, ``<instance>.jsonl`` each."""
    return run_dir / "logs"


def metrics(run_dir: Path) -> Path:
    """Rows of ``services.common.telemetry.metrics.RowKind``."""
    return run_dir / "metrics" / "orchestrator.jsonl"


def warm_start_metrics(run_dir: Path) -> Path:
    return run_dir / "metrics" / "warm_start.jsonl"


def summary(run_dir: Path) -> Path:
    """The result of a run that has ended; absent before."""
    return run_dir / "summary.json"


def pids(run_dir: Path) -> Path:
    """The process ids of the launch, by instance; written anew when a process starts."""
    return run_dir / "pids.json"


def changes(run_dir: Path) -> Path:
    """Settings that changed when the run was continued, a row for each."""
    return run_dir / "recipe.changes.jsonl"


def tensorboard(run_dir: Path) -> Path:
    """The directory of TensorBoard's event files."""
    return run_dir / "tensorboard"


def trackers(run_dir: Path) -> Path:
    """The directory of the trackers: how far each has come, and what W&B writes."""
    return run_dir / "trackers"


def export(run_dir: Path, policy: str) -> Path:
    """The final model of a policy, as a Hugging Face directory."""
    return run_dir / "export" / policy


def prometheus_target(run_dir: Path, name: str) -> Path:
    """Where Prometheus finds a process: for its file-based service discovery."""
    return run_dir / "prometheus" / f"{name}.json"
