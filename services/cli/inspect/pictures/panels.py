"""The panels of curves in the picture of runs: reward by step, time and tokens, loss, KL, entropy, and so on."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from services.cli.console import thousands
from services.cli.inspect.pictures.seeds import Points, Runs, band
from services.cli.inspect.run_state import Row, training_steps
from services.common.telemetry.metrics import (
    ROLE_REWARD,
    RowKind,
    SourceKey,
    StepKey,
    ThroughputKey,
    TrainerKey,
    source_key,
    sources_in,
)

STEP, SECONDS, TOKENS = "training step", "seconds since the start of the run", "trained tokens"
REWARD = "mean reward of training rollouts"
_FEW_POINTS = 10


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a panel."""

    key: str
    label: str = ""
    style: str = "-"
    only_if_any: bool = False  # left out where it is 0 in every step


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    x: str = STEP
    y: str = ""
    from_zero: bool = True


PANELS = (
    Panel("reward by step", (Line(StepKey.ROLLOUT_REWARD_MEAN),), y=REWARD),
    Panel("reward by time", (Line(StepKey.ROLLOUT_REWARD_MEAN),), x=SECONDS, y=REWARD),
    Panel("reward by tokens", (Line(StepKey.ROLLOUT_REWARD_MEAN),), x=TOKENS, y=REWARD),
    Panel("response length", (Line(StepKey.RESPONSE_TOKENS_MEAN),), y="trained tokens of a sequence"),
    Panel("loss", (Line(TrainerKey.LOSS.in_row),), y="mean over minibatches", from_zero=False),
    Panel("entropy", (Line(TrainerKey.ENTROPY.in_row),), y="nats per token"),
    Panel("gradient norm", (Line(TrainerKey.GRAD_NORM.in_row),), y="before clipping, mean of updates"),
    Panel(
        "KL divergence",
        (
            Line(TrainerKey.KL_REFERENCE.in_row, "policy from the reference model", only_if_any=True),
            Line(TrainerKey.MISMATCH_KL.in_row, "engine from trainer, stale tokens too", ":"),
        ),
        y="nats per token",
    ),
    Panel(
        "engine against trainer",
        (
            Line(TrainerKey.MISMATCH_ABS.in_row, "all tokens (stale ones differ)"),
            Line(TrainerKey.MISMATCH_FRESH_ABS.in_row, "fresh tokens (should be near 0)", ":"),
        ),
        y="mean |difference of\nlog-probabilities|, nats",
    ),
    Panel(
        "staleness",
        (Line(StepKey.STALENESS_MEAN, "mean"), Line(StepKey.STALENESS_MAX, "largest of a batch", ":")),
        y="age of the oldest token, versions",
    ),
)  # fmt: skip


THROUGHPUT = Panel("throughput", (), x=SECONDS, y="sampled tokens per second")


def draw_panels(axes: Any, groups: Sequence[Runs]) -> None:
    """``axes``: a grid with a place for each of ``PANELS`` and two more, for throughput and the explanation."""
    places = list(axes.flat)
    alone = len(groups) == 1
    for ax, panel in zip(places, PANELS, strict=False):
        _frame(ax, panel)
        for number, group in enumerate(groups):
            _draw_group(ax, panel, group, number, alone)
    for number, group in enumerate(groups):
        _draw_evaluations(places[0], group, number, alone)
        _draw_threshold(places[0], group)
    _draw_throughput(places[len(PANELS)], groups)
    for ax, panel in zip(places, PANELS, strict=False):
        if panel.from_zero:  # after everything is drawn: it ends the choice of limits by what is
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        if panel.x != STEP:
            ax.set_xlim(left=0.0)
        if names := ax.get_legend_handles_labels()[1]:
            if len(names) > 2:  # no place inside is free of curves: make one below them
                low, high = ax.get_ylim()
                ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
                ax.set_ylim(low - 0.08 * len(names) * (high - low), high)
                ax.set_yticks(ticks)
            legend = ax.legend(fontsize=7, framealpha=0.7, loc="lower right" if len(names) > 2 else "best")
            if not alone:  # the runs are explained once, and here the kinds of lines
                for handle in legend.legend_handles:
                    if hasattr(handle, "set_color"):
                        handle.set_color("0.3")
    _explain(places[len(PANELS) + 1], groups)


def _frame(ax: Any, panel: Panel) -> None:
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    if panel.x != SECONDS:
        ax.xaxis.get_major_locator().set_params(integer=True)
    if panel.x == TOKENS:  # labels of six digits overlap
        ax.xaxis.set_major_formatter(thousands())


def _draw_group(ax: Any, panel: Panel, group: Runs, number: int, alone: bool) -> None:
    """Each policy of the runs; the second and later ones of a comparison are dashed."""
    found = list(curves_of(panel, group, alone=alone))
    policies = list(dict.fromkeys(policy for policy, _, _ in found))
    for policy, line, curves in found:
        place = policies.index(policy)
        names = [policy] if alone and len(policies) > 1 else []
        first = alone or (number == 0 and place == 0)
        style = "--" if place and not alone and line.style == "-" else line.style
        label = ", ".join([*names, *([line.label] if line.label and first else [])])
        _curve(ax, curves, f"C{place if alone else number}", style, label)


def curves_of(panel: Panel, group: Runs, *, alone: bool) -> Iterator[tuple[str, Line, list[Points]]]:
    """Policy, metric, and a curve for each run. ``alone``: no other runs are beside these."""
    by_run = [training_steps(rows) for rows in group.rows]
    for policy in dict.fromkeys(policy for steps in by_run for policy in steps):
        steps = [of_run[policy] for of_run in by_run if policy in of_run]
        for line in (*panel.lines, *(part_lines(steps) if panel is PANELS[0] and alone else ())):
            if not line.only_if_any or any(row.get(line.key) for run in steps for row in run):
                yield policy, line, [points_of(run, line.key, panel.x) for run in steps]


def _curve(ax: Any, curves: Sequence[Points], color: str, style: str, label: str) -> None:
    """One curve, or the mean of several in the band of their extremes."""
    found = band(curves)
    if found is None:
        points = next((points for points in curves if points), [])
        if points:
            ax.plot([p[0] for p in points], [p[1] for p in points], style, color=color, label=label or None)
        return
    ax.plot(found.x, found.mean, style, color=color, label=label or None)
    ax.fill_between(found.x, found.low, found.high, color=color, alpha=0.18, linewidth=0)


_X: dict[str, Callable[[list[Row]], list[float]]] = {
    STEP: lambda steps: [row["step"] for row in steps],
    SECONDS: lambda steps: [row.get(StepKey.ELAPSED_S, 0.0) for row in steps],
    TOKENS: lambda steps: list(accumulate(row.get(StepKey.NUM_TRAINED_TOKENS, 0.0) for row in steps)),
}


def points_of(steps: list[Row], key: str, x: str) -> Points:
    """A metric of training steps against ``STEP``, ``SECONDS`` or ``TOKENS``."""
    return [(at, row[key]) for at, row in zip(_X[x](steps), steps, strict=True) if row.get(key) is not None]


def part_lines(runs: Sequence[list[Row]]) -> list[Line]:
    """The rewards of roles and attempts, where there are several, and those of the sources of a mixture."""
    roles = sorted({key for steps in runs for row in steps for key in row if key.startswith(ROLE_REWARD)})
    found = [(key, key.removeprefix(ROLE_REWARD)) for key in roles] if len(roles) > 1 else []
    sources = dict.fromkeys(source for steps in runs for row in steps for source in sources_in(row))
    found += [(source_key(source, SourceKey.ROLLOUT_REWARD_MEAN), f"source {source}") for source in sources]
    styles = (":", "-.", "--")
    return [Line(key, label, styles[n % 3]) for n, (key, label) in enumerate(found)]


def _draw_evaluations(ax: Any, group: Runs, number: int, alone: bool) -> None:
    """Evaluations as points with the 95% interval of their mean, at the version that they measured. No line joins them:
    nothing is known in between."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in (row for rows in group.rows for row in rows):
        if row["kind"] == RowKind.EVALUATION and row["versions"] and row["mean_reward"] is not None:
            found[row["name"].partition("/")[2]].append(row)
    for place, (sampling, rows) in enumerate(sorted(found.items())):
        means = [row["mean_reward"] for row in rows]
        single = all(
            len(row["datasets"]) == 1 for row in rows
        )  # else the mean over datasets has no interval of its own
        spans = [row["datasets"][0]["mean_reward"] if single else None for row in rows]
        bars = [
            [mean - span["low"] if span else 0.0 for mean, span in zip(means, spans, strict=True)],
            [span["high"] - mean if span else 0.0 for mean, span in zip(means, spans, strict=True)],
        ]
        ax.errorbar(
            *([newest_version(row) for row in rows], means),
            yerr=[[max(0.0, bar) for bar in side] for side in bars] if single else None,
            capsize=2,
            elinewidth=0.8,
            markersize=4.5,
            marker="os^D"[place % 4],
            linestyle="none",
            color=f"C{place + 1 if alone else number}",
            label=f"evaluation {sampling}" if alone or number == 0 else None,
        )


def newest_version(row: Row) -> int:
    """The newest version that played an evaluation."""
    return int(max((row.get("newest_versions") or row["versions"]).values()))


def _draw_threshold(ax: Any, group: Runs) -> None:
    """The step after which ``run.until`` held: there is no training beyond those that had begun."""
    for rows in group.rows:
        for row in [row for row in rows if row["kind"] == RowKind.THRESHOLD][-1:]:
            ax.axvline(
                row["step"],
                color="0.4",
                linestyle="--",
                linewidth=1,
                label=row["wanted"] if rows is group.rows[0] else None,
            )


def _draw_throughput(ax: Any, groups: Sequence[Runs]) -> None:
    ax.set_title(THROUGHPUT.title)
    ax.set_xlabel(THROUGHPUT.x)
    ax.set_ylabel(THROUGHPUT.y)
    for number, group in enumerate(groups):
        curves = [throughput_of(rows) for rows in group.rows]
        few = max(map(len, curves)) <= _FEW_POINTS  # a line of two points looks like a trend
        _curve(ax, curves, f"C{number}", "o-" if few else "-", "")
    ax.set_ylim(bottom=0.0)


def throughput_of(rows: Sequence[Row]) -> Points:
    """Sampled tokens per second by seconds."""
    start = rows[0]["time"] if rows else 0.0
    key = ThroughputKey.TOKENS_PER_S
    found = [row for row in rows if row["kind"] == RowKind.THROUGHPUT and row.get(key) is not None]
    return [(row["time"] - start, row[key]) for row in found]


def _explain(ax: Any, groups: Sequence[Runs]) -> None:
    """The runs by colour, and how to read the picture, in the last place of the grid."""
    ax.axis("off")
    lines = [
        "points with bars: evaluations, at the newest version that played, with the 95% interval of the mean",
        "trained tokens: written by the policy, not masked",
        "fresh: sampled from the version that is trained",
    ]
    if any(len(group.rows) > 1 for group in groups):
        lines.insert(0, "line and band: mean, lowest and highest of the seeds")
    ax.text(
        0.0, 0.0, "\n".join(textwrap.fill(line, 44) for line in lines), fontsize=8, color="0.35", transform=ax.transAxes
    )
    if len(groups) > 1:
        for number, group in enumerate(groups):
            ax.plot([], [], color=f"C{number}", label="\n".join(textwrap.wrap(group.label, 38)))
        ax.legend(fontsize=8, loc="upper left", frameon=False)
