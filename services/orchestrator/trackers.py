"""The trackers of a run beside its own files: the process that sends the rows of ``metrics/orchestrator.jsonl``, and how far
each tracker has come.

The process is part of an extra (``extras/trackers``); only its positions are read here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common import run_files
from services.common.config.processes import Tracker
from services.common.config.recipe import Recipe
from services.common.extras import provided
from services.common.system.child import module_command
from services.common.system.processes import end, start_logged

log = structlog.get_logger()

LAST_ROWS_S = 10.0  # at the end of the run; rows that are not sent then stay for `rollmill track`


@dataclass(slots=True)
class Position:
    """How far a tracker has come, as ``RUN/trackers/<tracker>.json`` keeps it."""

    offset: int = 0
    """Bytes of the metrics file whose rows were sent."""
    num_rows: int = 0
    error: str = ""
    """Why rows wait; empty while none do."""


def position_file(run_dir: Path, tracker: str) -> Path:
    return run_files.trackers(run_dir) / f"{tracker}.json"


def read_position(run_dir: Path, tracker: str) -> Position:
    """The position of a tracker; the beginning when there is no valid file."""
    try:
        return Position(**json.loads(position_file(run_dir, tracker).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return Position()


def all_sent(run_dir: Path, tracker: str) -> bool:
    """Whether a tracker has taken every row of the run's metrics."""
    metrics = run_files.metrics(run_dir)
    return not metrics.exists() or read_position(run_dir, tracker).offset >= metrics.stat().st_size


def followed(recipe: Recipe) -> list[Tracker]:
    """The trackers that need the process: TensorBoard's files are written by the orchestrator itself."""
    return [tracker for tracker in recipe.run.trackers if tracker is not Tracker.TENSORBOARD]


class TrackersProcess:
    """The orchestrator's child that sends rows. No process starts if no tracker of the recipe needs one."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        paths = provided("trackers")
        modules = sorted({paths[name].partition(":")[0] for name in followed(recipe) if name in paths})
        folder = run_files.logs(run_dir)
        if modules:
            folder.mkdir(parents=True, exist_ok=True)
        self._processes = [
            start_logged(module_command(module, "--run-dir", str(run_dir)), folder / "trackers.stderr", own_group=False)
            for module in modules
        ]

    def end(self) -> None:
        """Ask for a last attempt to send all rows, wait for the attempt, then kill the process. Called after the last row."""
        for process in self._processes:
            process.terminate()
            if not end(process, LAST_ROWS_S):
                log.warning("trackers.late", after_s=LAST_ROWS_S)
