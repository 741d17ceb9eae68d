"""Reads whether a directory is a run, whether it has ended, and the rows of JSON that it leaves. Calls no service."""

from __future__ import annotations

import difflib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from services.common import run_files
from services.common.config.loading import RESOLVED
from services.common.errors import ConfigError
from services.common.telemetry.metrics import RowKind
from services.orchestrator.config import RunLock
from services.orchestrator.groups import RunState

_PROC = Path("/proc")
READ_IT = "`rollmill plot`, `rollmill trajectories` and `rollmill trace` read it"


def check_run_directory(run_dir: Path) -> None:
    """Raises ``ConfigError``, with the nearest name beside it, when there is no run in ``run_dir``."""
    if (run_dir / RESOLVED).is_file():
        return
    if run_dir.is_dir():
        raise ConfigError(
            f"{run_dir} is no run directory: {RESOLVED} is missing; start a run with `rollmill run RECIPE`"
        )
    raise ConfigError(f"there is no directory {run_dir}{_nearest(run_dir)}")


def processes_left(run_dir: Path) -> list[int]:
    """Processes that write their output into the run's logs: those of an earlier launch that have not ended."""
    logs = f"{run_files.logs(run_dir.resolve())}{os.sep}"
    found = []
    for entry in _PROC.glob("[0-9]*"):
        try:
            if os.readlink(entry / "fd" / "2").startswith(logs):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return sorted(found)


def launcher_lock(run_dir: Path) -> RunLock:
    """Held by `rollmill run` while processes of this run exist."""
    return RunLock(run_dir / "launcher.lock", "launcher")


def ended(run_dir: Path) -> str:
    """``finished`` or ``stopped`` of a run that is over, else empty."""
    try:
        return str(json.loads(run_files.summary(run_dir).read_text())["state"])
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return ""


def why_silent(run_dir: Path) -> str:
    """Why no process of this run answers, as far as its directory shows, and the remedy."""
    if state := ended(run_dir):
        return f"the run is over ({state}); {READ_IT}"
    if not run_files.journal(run_dir).is_dir():
        return f"its orchestrator has not begun, for starting checkpoints come first; {run_files.logs(run_dir)} says how far it is"
    return f"its orchestrator does not run; go on with the run: `rollmill run --resume {run_dir}`"


def check_can_go_on(run_dir: Path) -> None:
    """Raises ``ConfigError`` for a run that is over."""
    state = ended(run_dir)
    if not state:
        return
    why = "all its training steps are done" if state == RunState.FINISHED else "`rollmill stop` ended it"
    exports = sorted((run_dir / "export").glob("*/config.json"))
    onwards = f", such as {exports[-1].parent}" if exports else ""
    raise ConfigError(
        f"{run_dir} cannot continue: {why}. {READ_IT}; to train on, begin another run whose "
        f"policies.<name>.model.path is an export of this one{onwards}"
    )


def _nearest(run_dir: Path) -> str:
    beside = run_dir.parent if run_dir.parent.is_dir() else Path("runs")
    found = sorted(beside.glob(f"*/{RESOLVED}"), key=lambda path: path.stat().st_mtime)
    names = [path.parent.name for path in found]
    if not names:
        return ""
    close = difflib.get_close_matches(run_dir.name, names, n=1, cutoff=0.6)
    return f"; did you mean {beside / close[0]}?" if close else f"; the newest run there is {beside / names[-1]}"


Row = dict[str, Any]


def parse_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """A row for each valid line; the last may be incomplete during a write."""
    for line in lines:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in its order."""
    with path.open("rb") as lines:
        yield from parse_rows(lines)


def read_metrics(run_dir: Path) -> list[Row]:
    """Rows of a run's metrics; raises ``ConfigError`` when the directory has none."""
    path = run_files.metrics(run_dir)
    if not path.exists():
        check_run_directory(run_dir)
        raise ConfigError(f"{run_dir} has no metrics yet: its orchestrator has not begun")
    return list(read_rows(path))


def logged_at(row: Row) -> float:
    """The time of a line of a log; 0 of one without."""
    try:
        return datetime.fromisoformat(str(row.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0


def training_steps(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of training steps by policy; the last row counts where a recovery has repeated a step."""
    steps: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == RowKind.TRAINING_STEP:
            steps[row["policy"]][row["step"]] = row
    return {policy: [by_step[s] for s in sorted(by_step)] for policy, by_step in steps.items()}
