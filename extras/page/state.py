"""What the page shows of a run's metrics, logs and orchestrator: its state, and its events in order of time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from services.cli.console import format_reward
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
from services.common.telemetry.metrics import RowKind, StallMoment, StepKey, ThroughputKey
from services.orchestrator.evaluation import played_by

LOG_BYTES = 512 * 1024
"""Of the end of each log that is read."""

MOST = 1000
"""Events that are listed, the newest."""

_LEVELS = ("warning", "error", "critical")
_KINDS = frozenset(RowKind)
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
        key, seconds = (row["component"], row["cause"]), row["seconds"]
        if row["moment"] == StallMoment.BEGIN:
            known = {"who": key[0], "cause": _words(key[1]), "text": row["detail"]}
            begun[key] = {"at": row["time"] - seconds, "kind": "stall", **known, "seconds": None}
            found.append(begun[key])
        elif key in begun:
            begun.pop(key)["seconds"] = seconds
    return found


def _of_metrics(rows: Iterable[Row]) -> Iterator[Json]:
    for row in rows:
        if row["kind"] == RowKind.EVALUATION:
            name = row["name"] + played_by(row["name"], row["versions"], row["newest_versions"])
            told = (
                f"{name}: mean reward {format_reward(row['mean_reward'])} over {row['num_trajectories']} trajectories"
            )
            told += f", {row['num_failed']} failed" if row["num_failed"] else ""
            yield {"at": row["time"], "kind": "evaluation", "who": "orchestrator", "text": told}
        elif row["kind"] == RowKind.THRESHOLD:
            told = f"training ends after step {row['step']}: {row['wanted']}"
            yield {"at": row["time"], "kind": "threshold", "who": "orchestrator", "text": told}
        elif row["kind"] == RowKind.WEIGHT_TRANSFER and row["error"]:
            told = f"version {row['version']} of {row['policy']} did not arrive: {row['error']}"
            yield {"at": row["time"], "kind": "weights", "who": f"replica/{row['replica']}", "text": told}


def _changes(run_dir: Path) -> Iterator[Json]:
    path = run_files.changes(run_dir)
    for row in read_rows(path) if path.is_file() else ():
        told = ", ".join(f"{key}: {value}" for key, value in row.items() if key != "time")
        yield {"at": row["time"], "kind": "change", "who": "recipe", "text": told}


def _logged(run_dir: Path) -> Iterator[Json]:
    for path in sorted(run_files.logs(run_dir).glob("*.jsonl")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            for row in parse_rows(file):
                if (level := row.get("level")) in _LEVELS:
                    facts = " ".join(f"{key}={value}" for key, value in row.items() if key not in _OF_EVERY_LINE)
                    yield {
                        "at": logged_at(row),
                        "kind": "warning" if level == "warning" else "error",
                        "who": str(row.get("instance", path.stem)),
                        "text": f"{row.get('event', '')} {facts}".strip()[:2000],
                    }


class MetricsTail:
    """``rows`` of the file so far; ``look`` reads on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.rows: list[Row] = []
        self.num_skipped = 0
        """Lines that are no row."""

    def look(self) -> bool:
        """Whether there are new rows. Raises ``OSError`` for a file that cannot be read; one that is missing is empty."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be being written
        self._at += len(whole)
        lines = whole.splitlines()
        found = [r for r in parse_rows(lines) if isinstance(r.get("time"), int | float) and r.get("kind") in _KINDS]
        self.num_skipped += len(lines) - len(found)
        self.rows = [*self.rows, *found] if found else self.rows  # readers keep the list that they have
        return bool(found)


def state_of(standing: Standing, rows: Sequence[Row], live: run_pb2.RunProgress | None, recipe: Recipe) -> Json:
    """Rollouts in flight, waits between components, evaluations, and the doctor's verdict. ``live``: as the orchestrator says
    it; None where only the files tell."""
    shares = newest_shares([{"kind": RowKind.ACCOUNTS, "shares": shares_of(live.accounts)}] if live else rows)
    evaluations = [row for row in rows if row["kind"] == RowKind.EVALUATION]
    now = as_json(live if live is not None else _last(standing, rows))
    if live is None:
        steps = [row for row in rows if row["kind"] == RowKind.TRAINING_STEP]
        now["rollouts"] = sum(row.get(StepKey.ROLLOUTS_FINISHED) or 0 for row in steps)
        now["trained_tokens"] = sum(row.get(StepKey.NUM_TRAINED_TOKENS) or 0 for row in steps)
    return {
        "state": now["state"] if live is not None else standing.state,
        "held_by": standing.held_by,
        "directory": str(standing.run_dir),
        "stands": standing.state,
        "newest_at": rows[-1]["time"] if rows else None,
        "checkpoints": standing.checkpoints,
        "now": now,
        "is_live": live is not None,
        "recipe": {"name": recipe.name, "description": recipe.description, "seed": recipe.run.seed},
        "time": [
            {
                "component": component,
                "segments": [segment._asdict() for segment in segments_of(shares[component])],
            }
            for component in sorted(shares)
        ],
        "evaluations": [
            {
                **{key: row[key] for key in ("name", "mean_reward", "num_failed", "difference")},
                "played_by": played_by(row["name"], row["versions"], row["newest_versions"]),
                "datasets": [{"name": of["name"], "mean_reward": of["mean_reward"]} for of in row["datasets"]],
            }
            for row in evaluations
        ],
        "verdict": as_object(diagnose(rows, recipe)) if rows else None,
    }


def _last(standing: Standing, rows: Sequence[Row]) -> run_pb2.RunProgress:
    """The progress of a run as far as its files tell."""
    progress = run_pb2.RunProgress()
    newest = {row["policy"]: row for row in rows if row["kind"] == RowKind.TRAINING_STEP}
    for policy, row in newest.items():
        metrics = {key: value for key, value in row.items() if isinstance(value, int | float)}
        most = int(row.get(StepKey.STALENESS_MAX) or 0)
        progress.policies.add(
            policy=policy, version=row["step"], num_steps=standing.wanted_steps, staleness_max=most, metrics=metrics
        )
    for row in rows:
        if row["kind"] == RowKind.THROUGHPUT:
            progress.tokens_per_s = row.get(ThroughputKey.TOKENS_PER_S) or 0.0
            progress.waits[:] = row.get("waits", ())
        elif row["kind"] == RowKind.THRESHOLD:
            told = {key: row[key] for key in ("wanted", "step", "seconds")}
            progress.threshold.MergeFrom(run_pb2.Threshold(reached=True, **told))
    for stall in _stalls(rows):
        if stall["seconds"] is None:
            open_ = progress.stalls.add(component=stall["who"], cause=stall["cause"], detail=stall["text"])
            open_.since.FromNanoseconds(int(stall["at"] * 1e9))
    if rows:
        progress.started_at.FromNanoseconds(int(rows[0]["time"] * 1e9))
        progress.at.FromNanoseconds(int(rows[-1]["time"] * 1e9))
    return progress


_CALLS = threading.Lock()  # one call at a time uses the identity of this process


class Live:
    """Asks the orchestrator of one run with the keys of that run; ``why`` says why there is no answer."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.why = ""

    def ask(self, standing: Standing) -> run_pb2.RunProgress | None:
        """None of a run that has ended or whose orchestrator does not answer; a call of at most seconds."""
        self.why = ""
        if not standing.held_by and standing.state != RUNNING:
            return None
        try:
            with _CALLS, identity.used(None):  # of this call: several runs have keys of their own
                client = reach(self._run_dir, None)
                with closing(client):
                    return check_answers(client, self._run_dir).progress
        except RollmillError as error:
            self.why = error.message
            return None


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
    }


def _words(name: str) -> str:
    return name.replace("_", " ")
