"""The process of the trackers: its threads, and how the orchestrator starts and ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from services.common import run_files
from services.common.config.processes.trackers import Tracker, missing_packages
from services.common.config.reading.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.system.child import module_command
from services.common.system.children import ChildProcess, end, start_logged
from services.common.telemetry.logs import without_passwords
from services.orchestrator.trackers.follower import Follower
from services.orchestrator.trackers.sink import RunFacts, Sink

log = structlog.get_logger()

MODULE = "services.orchestrator.trackers"
LAST_ROWS_S = 10.0  # at the end of the run; rows that are not sent then stay for `rollmill track`
SILENT_S = 300.0  # without a row sent, or for the end of a tracker's upload


def followed(recipe: Recipe) -> list[Tracker]:
    """The trackers that need the process: TensorBoard's files are written by the orchestrator itself."""
    return [tracker for tracker in recipe.run.trackers if tracker is not Tracker.TENSORBOARD]


class TrackersProcess:
    """The orchestrator's child that sends rows. No process starts if no tracker of the recipe needs one."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self._process: ChildProcess | None = None
        if not followed(recipe):
            return
        folder = run_files.logs(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        command = module_command(MODULE, "--run-dir", str(run_dir))
        self._process = start_logged(command, folder / "trackers.stderr", own_group=False)

    def end(self) -> None:
        """Ask for a last attempt to send all rows, wait for the attempt, then kill the process. Called after the last row."""
        if self._process is None:
            return
        self._process.terminate()
        if not end(self._process, LAST_ROWS_S):
            log.warning("trackers.late", after_s=LAST_ROWS_S)


def send_rows(run_dir: Path, stop: threading.Event) -> dict[Tracker, bool]:
    """Follow the run until its end; from ``stop`` on, only send the rows that exist. Each tracker has a thread, so that none
    waits for another. Returns whether each tracker has taken every row: False for one that hangs, after ``SILENT_S``."""
    recipe = load_resolved(run_dir)
    for line in missing_packages(followed(recipe)):
        log.error("tracker.not_installed", error=line)
    followers = {
        tracker: Follower(run_dir, tracker, sink_maker(tracker, recipe, run_dir))
        for tracker in followed(recipe)
        if not missing_packages([tracker])
    }
    threads = {
        tracker: threading.Thread(target=follower.run, args=(stop,), daemon=True)
        for tracker, follower in followers.items()
    }
    for thread in threads.values():
        thread.start()
    ended = {tracker: _has_ended(thread, followers[tracker], stop) for tracker, thread in threads.items()}
    return {tracker: ended.get(tracker, False) and followers[tracker].complete for tracker in followed(recipe)}


def _has_ended(thread: threading.Thread, follower: Follower, stop: threading.Event) -> bool:
    """Wait for the end of a follower; False when the follower sends no row for ``SILENT_S`` after ``stop``."""
    sent, since = follower.num_rows, time.monotonic()
    while thread.is_alive():
        thread.join(min(1.0, SILENT_S))
        if not stop.is_set() or follower.num_rows != sent:
            sent, since = follower.num_rows, time.monotonic()
        elif thread.is_alive() and time.monotonic() - since > SILENT_S:
            log.error("tracker.hangs", tracker=follower.tracker, silent_s=SILENT_S)
            return False
    return True


def sink_maker(tracker: Tracker, recipe: Recipe, run_dir: Path) -> Callable[[], Sink]:
    def make() -> Sink:
        facts = RunFacts(
            run_id=str(recipe.run.id),
            project=recipe.name,
            directory=run_files.trackers(run_dir),
            settings=without_passwords(recipe.model_dump(mode="json")),
        )
        # Imported here: each needs a package of its own, which takes a second to load.
        if tracker is Tracker.WANDB:
            from services.orchestrator.trackers.wandb_sink import WandbSink

            return WandbSink(facts)
        if tracker is Tracker.TRACKIO:
            from services.orchestrator.trackers.trackio_sink import TrackioSink

            return TrackioSink(facts)
        from services.orchestrator.trackers.otlp_sink import OtlpSink

        return OtlpSink(facts)

    return make
