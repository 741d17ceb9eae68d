"""Ratios, table and picture of the race, from the rows of its result file. Pure but for writing the picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._race_arms import CHANGED_TRL, OURS, RECIPES, TRL
from benchmarks._race_curves import GOAL, Chunk, windows
from benchmarks._report import median_and_spread
from services.cli.console import pyplot
from services.cli.inspect.plot import STYLE

Row = Mapping[str, Any]

SMOOTHED = 512  # rollouts that a point of a drawn curve is the mean of
COLORS = {"isolated": "C0", "inprocess": "C2", "isolated-grpo": "C1", "trl": "C3", "changed": "C4"}
LABELS = {
    "isolated": "Rollmill, isolated",
    "inprocess": "Rollmill, in process",
    "isolated-grpo": "Rollmill, isolated, GRPO's advantages",
}
# The keys: our arm, and the settings of TRL that it is compared with.
PAIRS: Mapping[str, tuple[str, Iterable[str]]] = {
    "": ("isolated", TRL),
    "_inprocess": ("inprocess", TRL),
    "_grpo": ("isolated-grpo", TRL),
    "_changed": ("isolated", CHANGED_TRL),
    "_changed_inprocess": ("inprocess", CHANGED_TRL),
}


def best_trl(rows: Sequence[Row], task: str, arms: Iterable[str] = tuple(TRL)) -> str | None:
    """The setting of TRL with the least seconds to the hit, a run that was cut off counting with its end."""
    seconds: dict[str, float] = {}
    for arm in arms:
        of_arm = [_reached(row, "wall_s") for row in rows if row["task"] == task and row["arm"] == arm]
        if of_arm:
            seconds[arm] = statistics.fmean(of_arm)
    return min(seconds, key=lambda arm: seconds[arm], default=None)


def ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """``<task>[_inprocess][_cpu]_ratio`` with its spread over seeds: seconds of TRL's best setting over ours.

    ``_grpo``: with GRPO's advantages on both sides. ``_changed``: with the reward as advantage on both sides.

    A ratio with a run of TRL that was cut off is a lower bound, one with a run of ours an upper bound: ``cut_off``
    names the runs. Where both were cut off there is none.
    """
    found: dict[str, Any] = {}
    by_cell = {(row["task"], row["arm"], row["seed"]): row for row in rows}
    for task in RECIPES:
        for name_of_pair, (arm, settings) in PAIRS.items():
            theirs = best_trl(rows, task, settings)
            seeds = [s for (t, a, s) in by_cell if (t, a) == (task, arm) and (task, theirs, s) in by_cell]
            for what, suffix in (("wall_s", ""), ("cpu_s", "_cpu")):
                pairs = [(by_cell[task, str(theirs), seed], by_cell[task, arm, seed]) for seed in seeds]
                values = [_reached(a, what) / _reached(b, what) for a, b in pairs if _has_hit(a) or _has_hit(b)]
                name = f"{task}{name_of_pair}{suffix}_ratio"
                found[name], found[f"{name}_spread"] = median_and_spread(values) if values else (None, None)
    found["best_trl"] = {task: best_trl(rows, task) for task in RECIPES}
    found["cut_off"] = sorted(f"{row['task']} {row['arm']} seed {row['seed']}" for row in rows if not _has_hit(row))
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per task and arm, seconds to the hit as median and range over seeds."""
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["task"], row["arm"]].append(row)
    lines = [
        f"| task | side | runs | wall to {GOAL:g}, s | CPU to {GOAL:g}, s | rollouts | rollouts per CPU second |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, arm), of_cell in sorted(cells.items()):
        wall, cpu = (_range(of_cell, what) for what in ("wall_s", "cpu_s"))
        rollouts = statistics.median(row["rollouts"] for row in of_cell)
        rate = statistics.median(row["rollouts"] / row["end_cpu_s"] for row in of_cell)
        lines.append(f"| {task} | {_label(arm)} | {len(of_cell)} | {wall} | {cpu} | {rollouts:,.0f} | {rate:.0f} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Two lines of panels, one per task: reward over seconds, and over CPU seconds, with the range over seeds."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(RECIPES), 2, figsize=(12, 8), layout="constrained", squeeze=False)
        for line, task in zip(axes, RECIPES, strict=True):
            for ax, what, told in zip(line, ("wall_s", "cpu_s"), ("seconds", "CPU seconds"), strict=True):
                for arm in (*OURS, best_trl(rows, task), best_trl(rows, task, CHANGED_TRL)):
                    of_cell = [row for row in rows if row["task"] == task and row["arm"] == arm]
                    if of_cell and arm is not None:
                        _band(ax, of_cell, lambda chunk, what=what: getattr(chunk, what), arm)
                ax.axhline(GOAL, color="0.6", linewidth=0.8, linestyle=":")
                ax.set(title=RECIPES[task], xlabel=f"{told} since version 0", ylabel="reward, sampled", ylim=(0, 1))
                ax.set_xlim(left=0)
                if ax.get_legend_handles_labels()[0]:
                    ax.legend(fontsize=8, loc="lower right")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def chunks_of(row: Row) -> list[Chunk]:
    return [Chunk(wall_s=wall, cpu_s=cpu, num=num, reward=reward) for wall, cpu, num, reward in row["chunks"]]


def _band(ax: Any, rows: Sequence[Row], of: Callable[[Chunk], float], arm: str) -> None:
    """The mean over seeds as long as all of them last, and their range."""
    import numpy as np

    curves = [[(of(chunk), mean) for chunk, mean in windows(chunks_of(row), SMOOTHED)] for row in rows]
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    grid = np.linspace(max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves), 200)
    values = np.array([np.interp(grid, *zip(*curve, strict=True)) for curve in curves])  # [num_seeds, 200]
    color = COLORS.get(arm, COLORS["changed" if arm in CHANGED_TRL else "trl"])
    ax.fill_between(grid, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    ax.plot(grid, values.mean(axis=0), color=color, label=_label(arm))


def _label(arm: str) -> str:
    told = arm.removeprefix("trl-").replace("x", " × ").replace("-2t", ", two threads").replace("-reward", ", changed")
    return LABELS.get(arm) or f"TRL, {told}"


def _has_hit(row: Row) -> bool:
    return row["hit_wall_s"] is not None


def _reached(row: Row, what: str) -> float:
    """To the hit, or to the end of a run that was cut off."""
    return float(row["hit_" + what] or row["end_" + what])


def _range(rows: Sequence[Row], what: str) -> str:
    values = sorted(_reached(row, what) for row in rows)
    sign = "> " if any(row["hit_" + what] is None for row in rows) else ""
    told = f"{sign}{statistics.median(values):.1f}"
    return told if len(values) == 1 else f"{told} ({values[0]:.1f} to {values[-1]:.1f})"
