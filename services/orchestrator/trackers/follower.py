"""Follows the file of a run's metrics for one tracker, and stores the position of the last row that was sent.

Invariant: a row is sent, in order, before the position moves beyond it; so rows that a stopped tracker did not take
stay in the file and are sent later, also by another process. A process that is killed between the two sends rows twice.
The file is the queue: no row is held in memory, and the run never waits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.common import run_files
from services.common.telemetry.metrics import RowKind
from services.orchestrator.trackers.sink import Row, Sink, TrackerDown

log = structlog.get_logger()

POLL_S = 5.0  # rows that are sent together cost less
MOST_BYTES = 4 * 1024 * 1024  # read at once
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 60.0  # between two attempts at a tracker that is down


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


class Follower:
    def __init__(
        self,
        run_dir: Path,
        tracker: str,
        make: Callable[[], Sink],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make`` may raise ``TrackerDown``; it is called again then."""
        self._run_dir = run_dir
        self.tracker = tracker
        self._make = make
        self._clock = clock
        self._sink: Sink | None = None
        self._position = read_position(run_dir, tracker)
        self._down_since: float | None = None
        self.ended = False
        """Whether the last row that was sent is the summary of the run."""

    @property
    def num_rows(self) -> int:
        """Rows that the tracker has taken, in earlier processes too."""
        return self._position.num_rows

    @property
    def complete(self) -> bool:
        """Whether every row of the file was sent."""
        return not self.is_down and self._position.offset >= self._size()

    def _size(self) -> int:
        metrics = run_files.metrics(self._run_dir)
        return metrics.stat().st_size if metrics.exists() else 0

    @property
    def is_down(self) -> bool:
        return self._down_since is not None

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
            if self._down_since is None:
                self._down_since = self._clock()
                log.warning("tracker.down", tracker=self.tracker, error=str(error))
            self._position.error = str(error)
            self._save()
            return False
        if self._down_since is not None:
            log.info("tracker.back", tracker=self.tracker, after_s=round(self._clock() - self._down_since, 1))
            self._down_since = None
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
