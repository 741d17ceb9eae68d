"""``millrace plot``: what happened in one run, or in several on one picture.

Reads ``metrics/orchestrator.jsonl`` of each run directory, so it also works while a run is going and after it. One run
alone also shows what became of its rollouts, from its journal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.cli import drawing
from services.cli.fate.picture import draw_fates
from services.cli.fate.reading import Fates, read_fates
from services.cli.rows import Row, read_metrics

Points = list[tuple[float, float]]


def training_steps(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of training steps by policy; of a step told twice (after a recovery) the last counts."""
    steps: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "training_step":
            steps[row["policy"]][row["step"]] = row
    return {policy: [by_step[s] for s in sorted(by_step)] for policy, by_step in steps.items()}


def plot_runs(run_dirs: Sequence[Path], output: Path) -> Path | None:
    """Draw the runs into a PNG; returns its path, or None when no run has finished a training step."""
    runs = {run_dir.name: read_metrics(run_dir) for run_dir in run_dirs}
    if not any(training_steps(rows) for rows in runs.values()):
        return None
    fates = _fates(run_dirs)
    num_policies = 0 if fates is None else len(fates.policies)
    pyplot = drawing.pyplot()
    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure(figsize=(14, 7 + 3.2 * num_policies), layout="constrained")
        # Of their own: the legends of fates stand beside their bars, and would move the columns above apart.
        above, *below = figure.subfigures(
            1 + num_policies, 1, height_ratios=[7.0, *[3.2] * num_policies], squeeze=False
        ).ravel()
        axes = above.subplots(2, 3)
        for index, (name, rows) in enumerate(runs.items()):
            _draw_run(axes, name, rows, color=f"C{index}", alone=len(runs) == 1)
        for ax in axes.flat:
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=8)
        if fates is not None:
            draw_fates([part.subplots(1, 2, width_ratios=[2.4, 1.0]) for part in below], fates)
        above.suptitle(", ".join(runs), fontsize=12)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=110)
        pyplot.close(figure)
    return output


def _fates(run_dirs: Sequence[Path]) -> Fates | None:
    """Of one run alone that has a journal; several would need a picture each."""
    if len(run_dirs) != 1 or not (run_dirs[0] / "journal").is_dir():
        return None
    return read_fates(run_dirs[0])


_STYLE: dict[str, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "lines.linewidth": 1.8,
}


def _draw_run(axes: Any, name: str, rows: list[Row], color: str, alone: bool) -> None:
    by_policy = training_steps(rows)
    has_roles = len({(policy, role) for policy, steps in by_policy.items() for role in _roles(steps)}) > 1
    for number, (policy, steps) in enumerate(by_policy.items()):
        _draw_policy(
            axes,
            steps,
            label=policy if alone else f"{name} {policy}",
            color=f"C{number}" if alone else color,
            style="-" if number == 0 or alone else "--",
            roles=_roles(steps) if alone and has_roles else [],
        )
    _draw_evaluations(axes[0, 0], name, rows, color, alone)
    _draw_throughput(axes, rows, "" if alone else f"{name} ", color, "C1" if alone else color)


def _draw_policy(axes: Any, steps: list[Row], *, label: str, color: str, style: str, roles: list[str]) -> None:
    """What training steps say of one policy; the lines of ``roles`` stand beside its reward."""

    def line(place: tuple[int, int], title: str, key: str, what: str = "", style: str = style) -> None:
        _line(axes[place], title, "training step", _series(steps, key), f"{label} {what}".rstrip(), color, style)

    line((0, 0), "reward", "rollout_reward_mean", "rollouts")
    for number, role in enumerate(roles):
        line((0, 0), "reward", role, role.removeprefix("rollout_reward/"), (":", "-.", "--")[number % 3])
    line((0, 1), "response length (tokens)", "response_tokens_mean")
    line((0, 2), "staleness (versions)", "staleness_mean", "mean")
    line((0, 2), "staleness (versions)", "staleness_max", "max", ":")
    mismatch = "engine–trainer mismatch, mean |ℓ − b|"
    line((1, 2), mismatch, "trainer/mismatch_abs", "all tokens")
    line((1, 2), mismatch, "trainer/mismatch_fresh_abs", "fresh tokens only", ":")


def _draw_throughput(axes: Any, rows: list[Row], prefix: str, color: str, color_of_replicas: str) -> None:
    start = rows[0]["time"] if rows else 0.0
    throughput = [row for row in rows if row["kind"] == "throughput"]

    def line(place: tuple[int, int], title: str, key: str, what: str, color: str = color, style: str = "-") -> None:
        _line(axes[place], title, "seconds", _over_time(throughput, key, start), f"{prefix}{what}", color, style)

    line((1, 0), "tokens per second", "tokens_per_s", "sampled")
    line((1, 1), "idle share", "trainer_idle_share", "trainer")
    line((1, 1), "idle share", "replica_idle_share", "replicas", color_of_replicas, "--")


def _roles(steps: list[Row]) -> list[str]:
    """Keys of the rewards by role and attempt."""
    return sorted({key for row in steps for key in row if key.startswith("rollout_reward/")})


def _draw_evaluations(ax: Any, name: str, rows: list[Row], color: str, alone: bool) -> None:
    """Evaluations as markers at the version that they measured, one line per sampling; bars are the 95% interval of their
    change from the first, paired by tasks."""
    by_sampling: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "evaluation" and row["versions"]:
            by_sampling[row["name"].partition("/")[2]].append(row)
    for number, (sampling, found) in enumerate(sorted(by_sampling.items())):
        found.sort(key=lambda row: max(row["versions"].values()))
        changes = [row.get("difference") or dict.fromkeys(("value", "low", "high"), 0.0) for row in found]
        has_bars = any(row.get("difference") for row in found)
        ax.errorbar(
            [max(row["versions"].values()) for row in found],
            [row["mean_reward"] for row in found],
            yerr=[[c["value"] - c["low"] for c in changes], [c["high"] - c["value"] for c in changes]]
            if has_bars
            else None,
            capsize=3,
            elinewidth=1,
            marker="os^D"[number % 4],
            linestyle=":",
            color=f"C{number + 1}" if alone else color,
            label=f"{'' if alone else name + ' '}evaluation {sampling}{', 95% of the change' if has_bars else ''}",
        )


def _line(ax: Any, title: str, xlabel: str, points: Points, label: str, color: str, style: str) -> None:
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    if points:
        ax.plot([p[0] for p in points], [p[1] for p in points], style, color=color, label=label)


def _series(steps: list[Row], key: str) -> Points:
    return [(row["step"], row[key]) for row in steps if row.get(key) is not None]


def _over_time(rows: list[Row], key: str, start: float) -> Points:
    return [(row["time"] - start, row[key]) for row in rows if row.get(key) is not None]
