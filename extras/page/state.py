"""What the page shows of a run's metrics, logs and orchestrator: its state, and its events in order of time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from services.cli.console import format_clock, format_reward
from services.cli.doctor import as_object, diagnose
from services.cli.inspect.plot import newest_shares, segments_of
from services.cli.inspect.run_model import Json
from services.cli.inspect.run_state import Row, logged_at, parse_rows, read_rows
from services.cli.inspect.standing import RUNNING, Standing
from services.cli.watch import (
    check_answers,
    masked_rollouts,
    reach,
    shares_of,
    state_word,
    threshold_words,
    time_words,
    warnings_of,
)
from services.common import run_files
from services.common.config.recipe import Recipe
from services.common.errors import RollmillError
from services.common.pb import run_pb2
from services.common.security import identity
from services.common.telemetry.accounts import is_records, is_weights
from services.common.telemetry.metrics import ReportedTransfer, RowKind, StallMoment, StepKey, ThroughputKey
from services.orchestrator.evaluation import played_by

LOG_BYTES = 512 * 1024
"""Of the end of each log that is read."""

MOST = 1000
"""Events that are listed, the newest."""

_LEVELS = ("warning", "error", "critical")
_OF_EVERY_LINE = ("event", "level", "timestamp", "service", "instance", "run", "logger")


def events(run_dir: Path, rows: Sequence[Row]) -> list[Json]:
    """The newest first: ``at``, ``kind``, ``who``, ``text``, and ``seconds`` of a stall that has ended."""
    found = [*_stalls(rows), *_of_metrics(rows), *_changes(run_dir), *_logged(run_dir)]
    return sorted(found, key=lambda event: -float(event["at"]))[:MOST]


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
                "cause": _words(key[1]),
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


_NUMBER = (int, float)
_KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    RowKind.TRAINING_STEP: {"policy": str, "step": int},
    RowKind.WEIGHT_TRANSFER: {"policy": str, "replica": str, "version": int, "started_at": _NUMBER},
    RowKind.STALL: {"component": str, "moment": str},
    RowKind.ACCOUNTS: {"shares": dict},
    RowKind.EVALUATION: {"name": str, "versions": dict, "datasets": list, "mean_reward": (*_NUMBER, type(None))},
    RowKind.THRESHOLD: {"step": int, "wanted": str},
}
"""The keys of rows that their readers need, and the types of their values."""


def is_usable(row: Row) -> bool:
    """Whether a row has a time, a kind, and the keys that readers of its kind need."""
    kind = row.get("kind")
    keys = {"time": _NUMBER, **_KEYS.get(kind, {})} if isinstance(kind, str) else {"kind": str}
    return all(isinstance(row.get(key), types) and not isinstance(row.get(key), bool) for key, types in keys.items())


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
                status = os.fstat(file.fileno())
                inode, size = status.st_ino, status.st_size
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


def state_of(standing: Standing, rows: Sequence[Row], live: Json | None, recipe: Recipe) -> Json:
    """Rollouts in flight, waits between components, evaluations, and the doctor's verdict."""
    shares: Mapping[str, Mapping[str, float]] = newest_shares(rows)
    if live is not None and live["shares"]:
        shares = {name: of for name, of in live["shares"].items() if not is_records(name) and not is_weights(name)}
    return {
        "state": live["state"] if live is not None else standing.state,
        "held_by": standing.held_by,
        "directory": str(standing.run_dir),
        "stands": standing.state,
        "newest_at": rows[-1]["time"] if rows else None,
        "checkpoints": standing.checkpoints,
        "now": live if live is not None else _last(standing, rows),
        "is_live": live is not None,
        "recipe": {
            "name": recipe.name,
            "description": recipe.description,
            "steps": recipe.run.steps,
            "seed": recipe.run.seed,
        },
        "time": [
            {
                "component": component,
                "segments": [
                    {"kind": kind, "activity": activity, "share": share}
                    for kind, activity, share in segments_of(shares[component])
                ],
            }
            for component in sorted(shares)
        ],
        "evaluations": [_evaluation(row) for row in rows if row["kind"] == RowKind.EVALUATION],
        "verdict": as_object(diagnose(rows, recipe)) if rows else None,
    }


def _last(standing: Standing, rows: Sequence[Row]) -> Json:
    """The same keys as ``live.as_json``, as far as the files tell."""
    steps = [row for row in rows if row["kind"] == RowKind.TRAINING_STEP]
    newest = {row["policy"]: row for row in steps}
    throughput = next((row for row in reversed(rows) if row["kind"] == RowKind.THROUGHPUT), {})
    reached = next((row for row in reversed(rows) if row["kind"] == RowKind.THRESHOLD), None)
    return {
        "time": f"{format_clock(rows[-1]['time'] - rows[0]['time'])} of records" if rows else "",
        "tokens_per_s": throughput.get(ThroughputKey.TOKENS_PER_S),
        "policies": [
            {
                "policy": policy,
                "version": row["step"],
                "num_steps": standing.wanted_steps,
                "staleness_max": row.get(StepKey.STALENESS_MAX),
                "metrics": row,
            }
            for policy, row in newest.items()
        ],
        "replicas": [],
        "rollouts": sum(row.get(StepKey.ROLLOUTS_FINISHED) or 0 for row in steps),
        "trained_tokens": sum(row.get(StepKey.NUM_TRAINED_TOKENS) or 0 for row in steps),
        "waits": throughput.get("waits", []),
        "stalls": [
            {"component": one["who"], "cause": one["cause"], "detail": one["text"], "since": one["at"], "advice": ""}
            for one in _stalls(rows)
            if one["seconds"] is None
        ],
        "warnings": [],
        "threshold": f"threshold reached after training step {reached['step']}: {reached['wanted']}" if reached else "",
    }


def _evaluation(row: Row) -> Json:
    whole = ("name", "versions", "mean_reward", "num_trajectories", "num_failed", "num_opaque", "difference")
    return {
        **{key: row.get(key) for key in whole},
        "played_by": played_by(row["name"], row["versions"], row.get("newest_versions", {})),
        "datasets": [
            {"name": d.get("name"), "mean_reward": d.get("mean_reward"), "pass_at": d.get("pass_at", {})}
            for d in row["datasets"]
        ],
    }


_CALLS = threading.Lock()  # one call at a time uses the identity of this process


class Live:
    """Asks the orchestrator of one run with the keys of that run; ``why`` says why there is no answer."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.why = ""

    def ask(self, standing: Standing) -> Json | None:
        """None of a run that has ended or whose orchestrator does not answer; a call of at most seconds."""
        if not standing.held_by and standing.state != RUNNING:
            self.why = ""
            return None
        try:
            with _CALLS, identity.used(None):  # of this call: several runs have keys of their own
                client = reach(self._run_dir, None)
                try:
                    progress = check_answers(client, self._run_dir).progress
                finally:
                    client.close()
        except RollmillError as error:
            self.why = error.message
            return None
        self.why = ""
        return as_json(progress)


def as_json(progress: run_pb2.RunProgress) -> Json:
    """The parts of a run's progress that the page shows, under the names of the protocol."""

    def plain(message: Message, **own: Any) -> Json:
        return {f.name: getattr(message, f.name) for f in message.DESCRIPTOR.fields if f.name not in own} | own

    return {
        "state": state_word(progress.state),
        "time": time_words(progress),
        "tokens_per_s": progress.tokens_per_s,
        "policies": [
            plain(one, version=max(0, one.version), metrics=dict(one.metrics), trainer_state=_words(one.trainer_state))
            for one in progress.policies
        ],
        "replicas": [plain(one, versions=dict(one.versions)) for one in progress.replicas],
        "waits": list(progress.waits),
        "stalls": [
            plain(one, cause=_words(one.cause), since=one.since.ToNanoseconds() / 1e9) for one in progress.stalls
        ],
        "warnings": [*warnings_of(progress), *masked_rollouts(progress.counters)],
        "threshold": threshold_words(progress.threshold) if progress.HasField("threshold") else "",
        "shares": shares_of(progress.accounts),
    }


def _words(name: str) -> str:
    return name.replace("_", " ")
