"""The state of a run from its directory alone, and how its weight versions reached the replicas (``rollmill weights``).

A run is finished, stopped, interrupted, starting or running. Transfers are in ``metrics/orchestrator.jsonl``, where the
orchestrator keeps the reports of replicas.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import filterfalse
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console

from services.cli.console import (
    FittingTable,
    columns,
    format_bytes,
    format_reward,
    format_seconds,
    say,
    source_words,
)
from services.cli.inspect.checkpoints import policies_of
from services.cli.inspect.run_state import (
    Row,
    check_run_directory,
    ended,
    launcher_lock,
    processes_left,
    read_metrics,
    read_rows,
)
from services.common import run_files
from services.common.checkpoints import checkpoints_directory, steps
from services.common.config.loading import RESOLVED, load_resolved
from services.common.errors import ConfigError
from services.common.records import TRANSFER_STAGES, WeightTransfer
from services.common.telemetry.metrics import ReportedTransfer, RowKind, StepKey
from services.common.weights.snapshot import Encoding
from services.orchestrator.config import RunLock, Settings
from services.orchestrator.evaluation import kind_of, played_by

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
        reward = "" if self.reward is None else f", rollout reward {self.reward:.3f}"
        held = f" ({self.held_by})" if self.held_by else ""
        told = [f"{self.run_dir}: {self.state}{held}", f"  trained: {steps or 'no step yet'}{reward}"]
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
        for step in steps(checkpoints_directory(run_dir, policy))[-1:]:
            found.checkpoints[policy] = step
            # A step whose version was not published any more is trained all the same.
            found.steps[policy] = max(found.steps.get(policy, 0), step)
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
        if row["kind"] == RowKind.TRAINING_STEP:
            found.steps[row["policy"]] = row["step"]
            found.sources[row["policy"]] = source_words(row)
            found.reward = row.get(StepKey.ROLLOUT_REWARD_MEAN, found.reward)
        elif row["kind"] == RowKind.EVALUATION:
            name = row["name"] + played_by(row["name"], row.get("versions", {}), row.get("newest_versions", {}))
            failed = f"; {row['num_failed']} failed" if row.get("num_failed") else ""
            told = f"{name}: {format_reward(row['mean_reward'])}{failed}"
            scores.setdefault(kind_of(row["name"]), []).append(told)
    found.evaluations = [line for told in scores.values() for line in dict.fromkeys((told[0], told[-1]))]
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
    with suppress(ConfigError):  # damaged, or of another version: the command that reads it tells
        return bool(ended(run_dir)) and load_resolved(run_dir).run.steps == 0
    return False


class Arrival(NamedTuple):
    """A transfer of a weight version, the replica that reports it, and its row of the metrics."""

    replica: str
    transfer: WeightTransfer
    row: Row

    @property
    def serving_s(self) -> float:
        """From the first question to the engine serving the version; encoding happens within the fetch."""
        found = self.transfer
        return found.fetch_s + found.verify_s + found.write_s + found.pause_s


def arrivals(rows: Iterable[Row]) -> list[Arrival]:
    """The transfers in rows of metrics, failed ones included, oldest first."""
    reports = [(ReportedTransfer.from_row(row), row) for row in rows if row["kind"] == RowKind.WEIGHT_TRANSFER]
    found = [Arrival(report.replica, report.transfer, row) for report, row in reports]
    return sorted(found, key=lambda one: one.transfer.started_at)


def read_transfers(run_dir: Path, *, policy: str | None = None, replica: str | None = None) -> list[Arrival]:
    """Transfers of a run; ``ConfigError`` without any report."""
    found = arrivals(read_metrics(run_dir))
    if not found:
        raise ConfigError(
            f"{run_dir} has no weight transfers yet: replicas report them when they take a version; scripted engines "
            "take none"
        )
    chosen = [one for one in found if policy in (None, one.transfer.policy) and replica in (None, one.replica)]
    if not chosen:
        known = sorted({f"{one.transfer.policy} at {one.replica}" for one in found})
        raise ConfigError(f"no weight transfer matches; there are transfers of {', '.join(known)}")
    return chosen


def show(found: Sequence[Arrival], console: Console, last: int) -> None:
    """Print one line per policy and replica, then the last transfers, then failures."""
    console.print(_summary(found))
    console.print(_newest(found, last))
    failed = [one for one in found if one.transfer.error]
    for replica, transfer, _ in failed[-last:]:
        told = f"failed {transfer.policy} version {transfer.version} at {replica}: {transfer.error}"
        say(console, told, "red")
    if len(failed) > last:
        console.print(f"{len(failed) - last} earlier failures are not shown; --last shows more")


def summarise(found: Iterable[Arrival]) -> list[Row]:
    """One row per policy and replica: counts, bytes, and medians of the stages over completed transfers."""
    groups: dict[tuple[str, str], list[Arrival]] = defaultdict(list)
    for one in found:
        groups[one.transfer.policy, one.replica].append(one)
    summaries = []
    for (policy, replica), members in sorted(groups.items()):
        arrived = [one.transfer for one in members if not one.transfer.error]
        deltas = [one for one in arrived if one.encoding == Encoding.DELTA]
        summaries.append(
            {
                "policy": policy,
                "replica": replica,
                "num_full": len(arrived) - len(deltas),
                "num_delta": len(deltas),
                "num_failed": len(members) - len(arrived),
                "bytes": sum(one.payload_size_bytes for one in arrived),
                "saved_bytes": sum(one.full_size_bytes - one.payload_size_bytes for one in arrived),
                "bits_per_change": _median(one.bits_per_change for one in deltas if one.num_changes),
                **{stage: _median(getattr(one, stage) for one in arrived) for stage in TRANSFER_STAGES},
                "serving_s": _median(one.serving_s for one in members if not one.transfer.error),
            }
        )
    return summaries


def _summary(found: Sequence[Arrival]) -> FittingTable:
    table = FittingTable(
        columns(
            "policy:1 | replica | >full | >delta | >failed | >sent | >saved:2 | >bits/change:3 | >fetch:4 | >verify:5 | "
            ">write:6 | >pause | >serving"
        ),
        title="weights by replica (medians)",
    )
    for row in summarise(found):
        times = (row[stage] for stage in (*TRANSFER_STAGES[1:], "serving_s"))
        table.add_row(
            *(str(row[name]) for name in ("policy", "replica", "num_full", "num_delta", "num_failed")),
            *(format_bytes(row[name]) for name in ("bytes", "saved_bytes")),
            "" if row["bits_per_change"] is None else f"{row['bits_per_change']:.1f}",
            *("" if seconds is None else format_seconds(seconds) for seconds in times),
        )
    return table


def _newest(found: Sequence[Arrival], last: int) -> FittingTable:
    table = FittingTable(
        columns(
            "policy:3 | version | replica | how:2 | from:9 | >bytes | >changed:5 | >bits/change:4 | >encode:6 | >fetch | "
            ">verify:7 | >write:8 | >pause"
        ),
        title=f"last {min(last, len(found))} of {len(found)} transfers",
    )
    for replica, one, _ in found[-last:]:
        base = "" if one.base_version is None else f"{one.base_version} → "
        how = [
            " ".join(part for part in (one.encoding, one.transport) if part),
            ", ".join(one.sources),
            format_bytes(one.payload_size_bytes),
            f"{one.num_changes:,}",
            f"{one.bits_per_change:.1f}" if one.encoding == Encoding.DELTA and one.num_changes else "",
            *(format_seconds(getattr(one, stage)) for stage in TRANSFER_STAGES),
        ]
        table.add_row(
            one.policy, f"{base}{one.version}", replica, *(["[red]failed[/red]", *[""] * 9] if one.error else how)
        )
    return table


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
