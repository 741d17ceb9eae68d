"""Sends the metrics of a run to trackers, in a process of its own that follows ``metrics/orchestrator.jsonl``.

    ``python -m extras.trackers.follow --run-dir DIR``

The orchestrator starts it. Ends with the run, or on SIGTERM after a last attempt.

Invariant: a row is sent, in order, before the position of its tracker moves beyond it; so rows that a stopped tracker did
not take stay in the file and are sent later, also by another process. A process that is killed between the two sends rows
twice. The file is the queue: no row is held in memory, and the run never waits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import structlog

from extras.trackers.sinks import SINKS, RunFacts, Sink, TrackerDown
from services.common import run_files
from services.common.config.loading import load_resolved
from services.common.config.processes import Tracker, missing_packages
from services.common.config.recipe import Recipe
from services.common.system.child import die_with_parent_if_asked
from services.common.telemetry import logs
from services.common.telemetry.metrics import RowKind
from services.orchestrator.metrics import Row
from services.orchestrator.trackers import Position, followed, position_file, read_position

log = structlog.get_logger()

NICENESS = 10  # the run comes first
SILENT_S = 300.0  # without a row sent, or for the end of a tracker's upload
POLL_S = 5.0  # rows that are sent together cost less
MOST_BYTES = 4 * 1024 * 1024  # read at once
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 60.0  # between two attempts at a tracker that is down


class Follower:
    def __init__(
        self,
        run_dir: Path,
        tracker: str,
        make: Callable[[], Sink],
    ) -> None:
        """``make`` may raise ``TrackerDown``; it is called again then."""
        self._run_dir = run_dir
        self.tracker = tracker
        self._make = make
        self._sink: Sink | None = None
        self._position = read_position(run_dir, tracker)
        self.is_down = False
        self.ended = False
        """Whether the last row that was sent is the summary of the run."""

    @property
    def num_rows(self) -> int:
        """Rows that the tracker has taken, in earlier processes too."""
        return self._position.num_rows

    @property
    def complete(self) -> bool:
        """Whether every row of the file was sent."""
        metrics = run_files.metrics(self._run_dir)
        return not self.is_down and (not metrics.exists() or self._position.offset >= metrics.stat().st_size)

    def poll(self) -> bool:
        """Send the rows that are new; returns whether all are sent. A tracker that is down is logged once."""
        rows, end = self._read()
        if not rows:
            self._position.offset = end
            return True
        try:
            if self._sink is None:
                self._sink = self._make()
            self._sink.send(rows)
        except TrackerDown as error:
            if not self.is_down:
                log.warning("tracker.down", tracker=self.tracker, error=str(error))
            self.is_down = True
            self._position.error = str(error)
            self._save()
            return False
        if self.is_down:
            log.info("tracker.back", tracker=self.tracker)
        self.is_down = False
        self._position = Position(end, self._position.num_rows + len(rows))
        self.ended = rows[-1].get("kind") == RowKind.SUMMARY
        self._save()
        return self.complete

    def run(self, stop: threading.Event) -> None:
        """Poll until the run has ended, or ``stop`` is set and what was there then is sent or cannot be."""
        delay_s = FIRST_DELAY_S
        while True:
            stopping = stop.is_set()
            done = self.poll()
            if (done and (stopping or self.ended)) or (stopping and self.is_down):
                break
            delay_s = min(2 * delay_s, LONGEST_DELAY_S) if self.is_down else FIRST_DELAY_S
            if done or self.is_down:
                stop.wait(delay_s if self.is_down else POLL_S)
        self.close()

    def close(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.close()
        except TrackerDown as error:
            log.warning("tracker.down", tracker=self.tracker, error=str(error))
            return
        log.info("tracker.done", tracker=self.tracker, rows=self._position.num_rows)

    def _read(self) -> tuple[Sequence[Row], int]:
        """Whole rows after the position, and the offset behind them. A line that is no row is passed over."""
        try:
            with run_files.metrics(self._run_dir).open("rb") as file:
                file.seek(self._position.offset)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return [], self._position.offset
        whole = data.rfind(b"\n") + 1
        rows: list[dict[str, Any]] = []
        for line in data[:whole].splitlines():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict) and {"time", "kind"} <= row.keys():
                rows.append(row)
        return rows, self._position.offset + whole

    def _save(self) -> None:
        path = position_file(self._run_dir, self.tracker)
        partial = path.with_suffix(".json.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(self._position)))
            partial.replace(path)
        except OSError as error:  # a full disk: rows since then are sent twice after a restart
            log.error("tracker.position_not_written", tracker=self.tracker, error=str(error))


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
            settings=logs.without_passwords(recipe.model_dump(mode="json")),
        )
        return SINKS[tracker](facts)

    return make


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m extras.trackers.follow", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run directory")
    options = parser.parse_args()
    die_with_parent_if_asked()
    os.nice(NICENESS)
    logs.configure("trackers", options.run_dir)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return 0 if all(send_rows(options.run_dir, stop).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
