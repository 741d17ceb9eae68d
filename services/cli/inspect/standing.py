"""Reads the state of a run from its directory alone: finished, stopped, interrupted, starting or running; and how to go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import filterfalse
from pathlib import Path

from services.cli.console import format_reward, source_words
from services.cli.inspect.checkpoints.found import places, policies_of
from services.cli.inspect.run_state import Row, check_run_directory, ended, launcher_lock, processes_left, read_rows
from services.common import run_files
from services.common.checkpoints.directory import path_of
from services.common.config.reading.loading import RESOLVED, load_resolved
from services.common.errors import ConfigError
from services.common.telemetry.metrics import RowKind, StepKey
from services.orchestrator.config import Settings
from services.orchestrator.dispatch.evaluation_pass import played_by
from services.orchestrator.lock import RunLock

INTERRUPTED, NOT_BEGUN, RUNNING = "interrupted", "not begun", "running"

COMMAND = "    rollmill "


@dataclass(slots=True, kw_only=True)
class Standing:
    """``state``: ``finished`` or ``stopped`` as the orchestrator wrote it, else one of the words of this module."""

    run_dir: Path
    state: str
    held_by: str = ""  # the launcher or orchestrator of a run that has processes
    steps: dict[str, int] = field(default_factory=dict)  # policy -> newest training step
    wanted_steps: int = 0
    reward: float | None = None  # of rollouts, at the newest step
    sources: dict[str, str] = field(default_factory=dict)  # policy -> how the sources of its tasks stand then
    evaluations: list[str] = field(default_factory=list)  # the first and the newest of each kind
    checkpoints: dict[str, int] = field(default_factory=dict)  # policy -> newest durable step
    quiet_s: float | None = None  # since the newest row of the metrics

    def lines(self) -> list[str]:
        """The lines of `rollmill status`; a command has a line of its own, which begins with ``COMMAND``."""
        steps = ", ".join(f"{policy} step {step}/{self.wanted_steps}" for policy, step in self.steps.items())
        told = [f"{self.run_dir}: {self.state}{f' ({self.held_by})' if self.held_by else ''}"]
        told += [
            f"  trained: {steps or 'no step yet'}"
            + ("" if self.reward is None else f", rollout reward {self.reward:.3f}")
        ]
        told += [f"  sources of {policy}: {words}" for policy, words in self.sources.items() if words]
        told += [f"  evaluation {line}" for line in self.evaluations]
        if self.checkpoints:
            kept = ", ".join(f"{policy} at step {step}" for policy, step in self.checkpoints.items())
            told += [f"  newest checkpoint: {kept}", f"{COMMAND}export {self.run_dir}"]
        if self.quiet_s is not None and self.state != RUNNING:
            told.append(f"  newest entry: {timedelta(seconds=int(self.quiet_s))} ago")
        if self.state in (INTERRUPTED, NOT_BEGUN):
            left = ", ".join(map(str, processes_left(self.run_dir)))
            where = f"processes of it still run: {left}" if left else "no process of it runs"
            told += [f"  {where}; go on with it:", f"{COMMAND}run --resume {self.run_dir}"]
        elif self.state != RUNNING:
            told += ["  read it:", f"{COMMAND}plot {self.run_dir}", f"{COMMAND}trajectories {self.run_dir}"]
        return told


def standing(run_dir: Path, rows: Iterable[Row] | None = None) -> Standing:
    """The state of the run in a directory. ``rows``: rows of its metrics that the caller has read already.

    Raises ``ConfigError`` for a directory without a run.
    """
    check_run_directory(run_dir)
    recipe = load_resolved(run_dir)
    held = _held_by(run_dir)
    begun = run_files.metrics(run_dir).is_file()
    state = ended(run_dir) or (RUNNING if held else INTERRUPTED if begun else NOT_BEGUN)
    found = Standing(run_dir=run_dir, state=state, held_by=held, wanted_steps=recipe.run.steps)
    if begun:
        _read_metrics(found, rows)
    for policy in policies_of(run_dir):
        durable = [step for step, path in places(run_dir, policy) if path == path_of(path.parent, step)]
        if durable:
            found.checkpoints[policy] = durable[-1]
            # A step whose version was not published any more is trained all the same.
            found.steps[policy] = max(found.steps.get(policy, 0), durable[-1])
    return found


def _held_by(run_dir: Path) -> str:
    try:
        return launcher_lock(run_dir).held_by() or RunLock(Settings(run_dir).lock_file).held_by()
    except PermissionError:  # the run of another user: its files say what they can
        return ""


def _read_metrics(found: Standing, rows: Iterable[Row] | None) -> None:
    path = run_files.metrics(found.run_dir)
    scores: dict[str, list[str]] = {}
    for row in read_rows(path) if rows is None else rows:
        if row.get("kind") == RowKind.TRAINING_STEP and isinstance(row.get("step"), int):
            found.steps[str(row.get("policy"))] = row["step"]
            found.sources[str(row.get("policy"))] = source_words(row)
            reward = row.get(StepKey.ROLLOUT_REWARD_MEAN)
            found.reward = float(reward) if isinstance(reward, int | float) else found.reward
        elif row.get("kind") == RowKind.EVALUATION and isinstance(row.get("mean_reward", ""), int | float | None):
            name = str(row.get("name", ""))
            versions = played_by(name, row.get("versions", {}), row.get("newest_versions", {}))
            failed = f"; {row['num_failed']} failed" if row.get("num_failed") else ""
            scores.setdefault(name.partition("/")[2], []).append(
                f"{name}{versions}: {format_reward(row['mean_reward'])}{failed}"
            )
    for told in scores.values():
        found.evaluations += [told[0], *([told[-1]] if len(told) > 1 else [])]
    found.quiet_s = max(0.0, time.time() - path.stat().st_mtime)


def newest_run(runs: Path = Path("runs")) -> Path | None:
    """The run in a directory of runs that was begun or resumed last; None without any.

    A finished evaluation (``rollmill eval``) counts only where no other run is: it has no checkpoint, and the run that it
    evaluated is the one to read.
    """
    found = newest_first(runs, _begun_ns)
    return next(filterfalse(_is_finished_evaluation, found), next(iter(found), None))


def newest_first(runs: Path, time_of: Callable[[Path], int], name: str = "*") -> list[Path]:
    """Run directories by a time of their resolved recipes; ``name``: of one run, or a pattern."""
    found = []
    for resolved in runs.glob(f"{name}/{RESOLVED}"):
        with suppress(OSError):  # it was removed meanwhile
            found.append((time_of(resolved), resolved.parent))
    return [run_dir for _, run_dir in sorted(found, reverse=True)]


def _begun_ns(resolved: Path) -> int:
    """When the processes of a run were started last; each launch writes their ids."""
    try:
        return max(resolved.stat().st_mtime_ns, run_files.pids(resolved.parent).stat().st_mtime_ns)
    except FileNotFoundError:
        return resolved.stat().st_mtime_ns


def _is_finished_evaluation(run_dir: Path) -> bool:
    if not ended(run_dir):
        return False
    try:
        return load_resolved(run_dir).run.steps == 0
    except ConfigError:
        return False  # damaged, or of another version: the command that reads it tells


def run_or_newest(run: Path | None) -> Path:
    """``run``, or the newest run below `runs` where none is named. Raises ``ConfigError`` without any."""
    if run is not None:
        return run
    newest = newest_run()
    if newest is None:
        raise ConfigError(
            "there is no run in ./runs: name the directory of a run, or start one with `rollmill run RECIPE`"
        )
    return newest
