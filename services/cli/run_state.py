"""What a run's directory says of the run without asking anybody: whether it is one, and whether its run has ended."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from services.common.config.loading import RESOLVED
from services.common.errors import ConfigError

SUMMARY = "summary.json"  # written when the run is over
READ_IT = "`millrace plot`, `millrace trajectories` and `millrace trace` read it"


def check_run_directory(run_dir: Path) -> None:
    """Raises ``ConfigError``, with the nearest name beside it, when there is no run in ``run_dir``."""
    if (run_dir / RESOLVED).is_file():
        return
    if run_dir.is_dir():
        raise ConfigError(
            f"{run_dir} is no run directory: {RESOLVED} is missing; start a run with `millrace run RECIPE`"
        )
    raise ConfigError(f"there is no directory {run_dir}{_nearest(run_dir)}")


def ended(run_dir: Path) -> str:
    """``finished`` or ``stopped`` of a run that is over, else nothing."""
    try:
        return str(json.loads((run_dir / SUMMARY).read_text())["state"])
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return ""


def why_silent(run_dir: Path) -> str:
    """Why nobody answers for this run, as far as its directory tells, and what to do."""
    if state := ended(run_dir):
        return f"the run is over ({state}); {READ_IT}"
    if not (run_dir / "journal").is_dir():
        return f"its orchestrator has not begun, for starting checkpoints come first; {run_dir / 'logs'} says how far it is"
    return f"its orchestrator does not run; go on with the run: `millrace run --resume {run_dir}`"


def check_can_go_on(run_dir: Path) -> None:
    """Raises ``ConfigError`` for a run that is over."""
    state = ended(run_dir)
    if not state:
        return
    why = "all its training steps are done" if state == "finished" else "`millrace stop` ended it"
    exports = sorted((run_dir / "export").glob("*/config.json"))
    onwards = f", such as {exports[-1].parent}" if exports else ""
    raise ConfigError(
        f"{run_dir} does not go on: {why}. {READ_IT}; to train on, begin another run whose "
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
