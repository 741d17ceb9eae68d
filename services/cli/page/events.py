"""Events of a run, in order of time: stalls, evaluations, thresholds, changed settings, warnings and errors of its
processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.console import format_reward
from services.cli.inspect.run_state import Row, logged_at, parse_rows, read_rows
from services.common import run_files
from services.common.telemetry.metrics import RowKind, StallMoment
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.dispatch.evaluation_pass import played_by

LOG_BYTES = 512 * 1024
"""Of the end of each log that is read."""

MOST = 1000
"""Events that are listed, the newest."""

_LEVELS = ("warning", "error", "critical")
_OF_EVERY_LINE = ("event", "level", "timestamp", "service", "instance", "run", "logger")

Json = dict[str, Any]


def events(run_dir: Path, rows: Sequence[Row]) -> list[Json]:
    """The newest first: ``at``, ``kind``, ``who``, ``text``, and ``seconds`` of a stall that has ended."""
    found = [*_stalls(rows), *_of_metrics(rows), *_changes(run_dir), *_logged(run_dir)]
    return sorted(found, key=lambda event: -float(event["at"]))[:MOST]


def open_stalls(rows: Iterable[Row]) -> list[Json]:
    """Stalls without an end."""
    return [
        {
            "component": stall["who"],
            "cause": stall["cause"],
            "detail": stall["text"],
            "since": stall["at"],
            "advice": "",
            "chain": [],
        }
        for stall in _stalls(rows)
        if stall["seconds"] is None
    ]


def _stalls(rows: Iterable[Row]) -> list[Json]:
    """A stall is one event, with its length once it has ended."""
    found: list[Json] = []
    begun: dict[tuple[str, str], Json] = {}
    for row in rows:
        if row["kind"] != RowKind.STALL:
            continue
        key = row["component"], str(row.get("cause"))
        if row["moment"] == StallMoment.BEGIN:
            begun[key] = {
                "at": row["time"] - _seconds(row),
                "kind": "stall",
                "who": key[0],
                "cause": key[1].replace("_", " "),
                "text": str(row.get("detail", "")),
                "seconds": None,
            }
            found.append(begun[key])
        elif key in begun:
            begun.pop(key)["seconds"] = _seconds(row)
    return found


def _seconds(row: Row) -> float:
    value = row.get("seconds")
    return float(value) if isinstance(value, int | float) else 0.0


def _of_metrics(rows: Iterable[Row]) -> Iterator[Json]:
    for row in rows:
        if row["kind"] == RowKind.EVALUATION:
            name = row["name"] + played_by(row["name"], row.get("versions", {}), row.get("newest_versions", {}))
            told = f"{name}: mean reward {format_reward(row['mean_reward'])} over {row.get('num_trajectories')} trajectories"
            told += f", {row['num_failed']} failed" if row.get("num_failed") else ""
            yield {"at": row["time"], "kind": "evaluation", "who": "orchestrator", "text": told}
        elif row["kind"] == RowKind.THRESHOLD:
            told = f"training ends after step {row['step']}: {row['wanted']}"
            yield {"at": row["time"], "kind": "threshold", "who": "orchestrator", "text": told}
        elif row["kind"] == RowKind.WEIGHT_TRANSFER and (failed := ReportedTransfer.from_row(row)).transfer.error:
            transfer = failed.transfer
            told = f"version {transfer.version} of {transfer.policy} did not arrive: {transfer.error}"
            yield {"at": row["time"], "kind": "weights", "who": f"replica/{failed.replica}", "text": told}


def _changes(run_dir: Path) -> Iterator[Json]:
    path = run_files.changes(run_dir)
    if not path.is_file():
        return
    for row in read_rows(path):
        told = ", ".join(f"{key}: {value}" for key, value in row.items() if key != "time")
        at = row.get("time")
        yield {"at": at if isinstance(at, int | float) else 0.0, "kind": "change", "who": "recipe", "text": told}


def _logged(run_dir: Path) -> Iterator[Json]:
    folder = run_files.logs(run_dir)
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.jsonl")):
        for row in _last_rows(path):
            if row.get("level") in _LEVELS:
                facts = " ".join(f"{key}={value}" for key, value in row.items() if key not in _OF_EVERY_LINE)
                yield {
                    "at": logged_at(row),
                    "kind": "error" if row["level"] != "warning" else "warning",
                    "who": str(row.get("instance", path.stem)),
                    "text": f"{row.get('event', '')} {facts}".strip()[:2000],
                }


def _last_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - LOG_BYTES))
        yield from parse_rows(file.read().splitlines())


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SHAPES: Mapping[str, Callable[[Row], bool]] = {
    RowKind.TRAINING_STEP: lambda row: isinstance(row.get("policy"), str) and isinstance(row.get("step"), int),
    RowKind.WEIGHT_TRANSFER: lambda row: (
        isinstance(row.get("policy"), str)
        and isinstance(row.get("replica"), str)
        and isinstance(row.get("version"), int)
        and _number(row.get("started_at"))
    ),
    RowKind.STALL: lambda row: isinstance(row.get("component"), str) and isinstance(row.get("moment"), str),
    RowKind.ACCOUNTS: lambda row: isinstance(row.get("shares"), dict),
    RowKind.EVALUATION: lambda row: (
        isinstance(row.get("name"), str)
        and isinstance(row.get("versions"), dict)
        and isinstance(row.get("datasets"), list)
        and (_number(row.get("mean_reward")) or row.get("mean_reward") is None)
    ),
    RowKind.THRESHOLD: lambda row: isinstance(row.get("step"), int) and isinstance(row.get("wanted"), str),
}


def is_usable(row: Row) -> bool:
    """Whether a row has a time, a kind, and the keys that readers of its kind need."""
    kind = row.get("kind")
    return isinstance(kind, str) and _number(row.get("time")) and (kind not in _SHAPES or _SHAPES[kind](row))


class MetricsTail:
    """``rows`` of the file so far; ``look`` reads on. A file that was replaced or cut is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._inode = 0
        self.rows: list[Row] = []
        self.num_skipped = 0
        """Lines that are no row, or not one of the shape of its kind."""

    def look(self) -> bool:
        """Whether there are new rows. Raises ``OSError`` for a file that cannot be read; one that is missing is empty."""
        try:
            with self._path.open("rb") as file:
                inode, size = self._identity(file.fileno())
                if inode != self._inode or size < self._at:
                    self._at, self._inode, self.rows, self.num_skipped = 0, inode, [], 0
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be being written
        self._at += len(whole)
        lines = whole.splitlines()
        found = [row for row in parse_rows(lines) if is_usable(row)]
        self.num_skipped += sum(1 for line in lines if line.strip()) - len(found)
        self.rows = [*self.rows, *found] if found else self.rows  # readers keep the list that they have
        return bool(found)

    @staticmethod
    def _identity(descriptor: int) -> tuple[int, int]:
        status = os.fstat(descriptor)
        return status.st_ino, status.st_size
