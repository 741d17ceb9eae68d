"""``rollmill plot``: pictures of one run, or several: curves, where the time went, and the fates of rollouts.

Reads ``metrics/orchestrator.jsonl`` of each run directory, during the run or later. Runs that differ in the seed alone are
one curve with a band. For a single run it also plots where the time went and the fates of rollouts, from the journal.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from services.cli.console import percent_axis, pyplot, thousands_axis
from services.cli.inspect.fate import Band, Fate, Fates, Tally, read_fates
from services.cli.inspect.run_state import Row, read_metrics, training_steps
from services.common import run_files
from services.common.config.loading import RESOLVED
from services.common.telemetry.accounts import ActivityName, is_records, is_weights
from services.common.telemetry.metrics import (
    ROLE_REWARD,
    RowKind,
    StepKey,
    ThroughputKey,
    TrainerKey,
    source_key,
    sources_in,
)

Points = list[tuple[float, float]]

_OF_ONE_RUN = ("id", "dir", "seed")  # keys of ``run`` that differ between runs of one recipe
_OF_ONE_MACHINE = ("port", "rendezvous_port", "ports", "endpoint", "node")
_GRID = 200  # points of a band


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs that are drawn as one."""

    label: str
    rows: Sequence[list[Row]]
    """Of each run."""


def grouped(run_dirs: Sequence[Path], read: Callable[[Path], list[Row]] = read_metrics) -> list[Runs]:
    """The runs, those together that differ in nothing but the seed."""
    by_settings: dict[str, list[Path]] = {}
    for run_dir in run_dirs:
        by_settings.setdefault(_settings(run_dir), []).append(run_dir)
    return [Runs(_label(dirs), [read(run_dir) for run_dir in dirs]) for dirs in by_settings.values()]


def _label(run_dirs: Sequence[Path]) -> str:
    others = len(run_dirs) - 1
    return run_dirs[0].name + (f" and {others} other seed{'s' if others > 1 else ''}" if others else "")


def _settings(run_dir: Path) -> str:
    """What must be equal; of a run without a recipe, its directory."""
    try:
        recipe = json.loads((run_dir / RESOLVED).read_text())
    except (OSError, json.JSONDecodeError):
        return str(run_dir)
    recipe["run"] = {key: value for key, value in recipe.get("run", {}).items() if key not in _OF_ONE_RUN}
    return json.dumps(_without_places(recipe), sort_keys=True)


def _without_places(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _without_places(value) for key, value in tree.items() if key not in _OF_ONE_MACHINE}
    return tree


@dataclass(frozen=True, slots=True)
class SeedBand:
    """The mean of several curves, and the lowest and highest of them, where at least two have values."""

    x: Any  # [num_points]
    mean: Any  # [num_points]
    low: Any  # [num_points]
    high: Any  # [num_points]


def band(curves: Sequence[Points]) -> SeedBand | None:
    """The band of curves over the range that at least two of them cover; None with fewer than two. Between its points a curve
    is a line."""
    arrays = [np.asarray(sorted(points), dtype=float) for points in curves if points]
    if len(arrays) < 2:
        return None
    begin = sorted(curve[0, 0] for curve in arrays)[1]
    end = sorted(curve[-1, 0] for curve in arrays)[-2]
    if end < begin:
        return None
    x = np.unique(np.concatenate([np.linspace(begin, end, _GRID), [begin, end]]))
    values = np.stack([np.interp(x, curve[:, 0], curve[:, 1], left=np.nan, right=np.nan) for curve in arrays])
    held = (~np.isnan(values)).sum(axis=0) > 1  # curves may leave a gap between them
    x, values = x[held], values[:, held]
    return SeedBand(x, np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0))


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
        ax.xaxis.set_major_formatter(thousands_axis())


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
    found += [(source_key(source, StepKey.ROLLOUT_REWARD_MEAN), f"source {source}") for source in sources]
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


LEAST_SHARE = 0.02  # of a segment of its own; smaller ones are one
_MOST_LINES = 3
_CHARACTERS = 170  # across the whole bar, at the size of the labels
_COLORS = {
    "work": ("#3a9b5c", "#5fb57c", "#86cba0"),
    "wait": ("#e58a3c", "#eda667", "#f3c193"),
    "idle": ("#cfcfcf", "#dedede"),
}
_WORK = (
    ActivityName.TRAINING, ActivityName.REPLAYING, ActivityName.PUBLISHING, ActivityName.CHECKPOINTING,
    ActivityName.EXPORTING, ActivityName.PREPARING_PAYLOAD, ActivityName.SENDING_WEIGHTS, ActivityName.RUNNING_WORKFLOW,
    ActivityName.GENERATING, ActivityName.SCORING, ActivityName.RUNNING_REWARD, ActivityName.FETCHING,
    ActivityName.VERIFYING, ActivityName.CHANGING_WEIGHTS, ActivityName.PLAYING_EPISODES, ActivityName.RUNNING_PROGRAMS,
    ActivityName.JUDGING_PROGRAMS, ActivityName.COMPUTING_REWARDS,
)  # fmt: skip
_IDLE = (
    ActivityName.IDLE, ActivityName.STARTING, ActivityName.PAUSED, ActivityName.FINISHED, ActivityName.NOT_ASKED,
    ActivityName.DRAINING, ActivityName.WAITING_FOR_CALLS, ActivityName.RUN_ENDED, ActivityName.NOTHING_TO_DO,
)  # fmt: skip

Shares = Mapping[str, Mapping[str, float]]


def plot_time(run_dir: Path, output: Path) -> Path | None:
    """Draw the last accounts of a run into a PNG; returns its path, or None when there are none."""
    shares = newest_shares(read_metrics(run_dir))
    if not shares:
        return None
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(15, 1.2 + 0.5 * len(shares)), layout="constrained")
    draw_time(ax, shares, f"{run_dir.name}: where the time went")
    figure.savefig(output, dpi=100)
    plt.close(figure)
    return output


def newest_shares(rows: Iterable[Row]) -> Shares:
    """Component -> activity -> share of its time, of the newest accounts. A replica's records and weights have accounts of
    their own, parallel to its slots, and are left out."""
    shares: Shares = {}
    for row in rows:
        if row["kind"] in (RowKind.ACCOUNTS, RowKind.SUMMARY):
            shares = row.get("shares") or shares
    return {name: of_one for name, of_one in shares.items() if not is_records(name) and not is_weights(name)}


def draw_time(ax: Any, shares: Shares, title: str) -> None:
    """One bar for each component, work first, then waits by their cause."""
    for place, component in enumerate(sorted(shares, reverse=True)):
        left = 0.0
        for kind, activity, share in segments_of(shares[component]):
            shade = _COLORS[kind][place % len(_COLORS[kind])] if activity == _SMALL else _shade(kind, activity)
            ax.barh(place, share, left=left, height=0.82, color=shade, edgecolor="white", linewidth=1.2)
            ax.text(left + share / 2, place, _fitting(activity, share), ha="center", va="center", fontsize=6.5)
            left += share
    ax.set_yticks(range(len(shares)), sorted(shares, reverse=True), fontsize=8)
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.5, len(shares) - 0.5)
    ax.xaxis.set_major_formatter(percent_axis())
    ax.set_xlabel(
        "share of the component's time   (green: work; orange: waits for the component behind the arrow; grey: nothing to do)"
    )
    ax.set_title(title)
    ax.grid(False)


_SMALL = "other"


def kind_of(activity: str) -> str:
    """``work``, ``wait`` or ``idle``.

    >>> kind_of("generating -> engine/model0"), kind_of("waiting for reward -> envgateway"), kind_of("starting")
    ('work', 'wait', 'idle')
    """
    name = activity.partition(" -> ")[0]
    if name.startswith(_WORK):
        return "work"
    return "idle" if name in _IDLE else "wait"


def segments_of(shares: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """(kind, activity, share), work first, larger ones first; small ones of a kind are one."""
    found: list[tuple[str, str, float]] = []
    for kind in _COLORS:
        of_kind = sorted(((s, a) for a, s in shares.items() if kind_of(a) == kind), reverse=True)
        found += [(kind, activity, share) for share, activity in of_kind if share >= LEAST_SHARE]
        small = sum(share for share, _ in of_kind if share < LEAST_SHARE)
        if small > 0.001:
            found.append((kind, _SMALL, small))
    return found


def _shade(kind: str, activity: str) -> str:
    """The same activity has the same shade in all bars."""
    return _COLORS[kind][sum(activity.encode()) % len(_COLORS[kind])]


def _fitting(activity: str, share: float) -> str:
    """As much of "43% waiting for rollouts → replica/a" as fits into the segment, on up to three lines."""
    room = int(share * _CHARACTERS)
    text = f"{share:.0%} {activity.replace(' -> ', ' → ')}"
    lines = textwrap.wrap(text, max(room, 1), break_long_words=False)
    if len(lines) <= _MOST_LINES and all(len(line) <= room for line in lines):
        return "\n".join(lines)
    return f"{share:.0%}" if room >= 4 else ""


MOST_BARS = 100
IN_FLIGHT = "in flight"
UNFINISHED = (Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.CANCELLED)

# From the bottom of a bar to its top: trained, lost because of age, left out by a filter, still open.
COLOURS = {
    Fate.TRAINED: "#3a9b5c",
    Fate.MASKED: "#b5dcb0",
    Fate.TOO_OLD: "#d1495b",
    Fate.TRUNCATED: "#e58a3c",
    Fate.SURPLUS: "#8d6a9f",
    Fate.RESAMPLED_AWAY: "#a8c5e8",
    Fate.EQUAL_REWARDS: "#5b8fc7",
    Fate.LEFT_OVER: "#bcbcbc",
    Fate.CANCELLED: "#9a9a9a",
    Fate.UNKNOWN: "#000000",
}
_GREY = "#dddddd"


def draw_fates(rows: Iterable[tuple[Any, Any]], found: Fates) -> None:
    """``rows``: for each policy, in order, the axes by step and those by length."""
    for (by_step, by_length), policy in zip(rows, found.policies, strict=True):
        of = "" if len(found.policies) == 1 else f" of {policy}"
        _draw_steps(by_step, found.steps(policy), of)
        _draw_lengths(by_length, found.lengths[policy].bands(), found.lengths[policy].means())


def _draw_steps(ax: Any, steps: dict[int, Tally], of: str) -> None:
    ax.set_title(f"fates of the sampled tokens{of}")
    ax.set_xlabel("training step in which the rollout was issued")
    ax.set_ylabel("share of its tokens")
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(percent_axis())
    bins = _binned(steps)
    if not bins:
        return
    width = bins[0][1]
    middles = [first + (width - 1) / 2 for first, _, _ in bins]
    bottom = [0.0] * len(bins)
    for fate, colour in (*COLOURS.items(), (None, _GREY)):
        shares = [_share(tally, fate) for _, _, tally in bins]
        if any(shares):
            label = IN_FLIGHT if fate is None else fate.label
            ax.bar(middles, shares, width=width, bottom=bottom, color=colour, label=label, linewidth=0)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    lost = [sum(t.rollouts[f] for f in UNFINISHED) / max(1, t.issued_rollouts) for _, _, t in bins]
    if any(lost):
        ax.plot(middles, lost, "k:", linewidth=1.5, label="rollouts without an end\n(share of rollouts)")
    ax.set_xlim(bins[0][0] - 0.5, bins[-1][0] + width - 0.5)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(False)
    handles, labels = ax.get_legend_handles_labels()
    # As they are stacked: the uppermost first.
    ax.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _binned(steps: dict[int, Tally]) -> list[tuple[int, int, Tally]]:
    """(first step, steps, their sum) of at most ``MOST_BARS`` bins of equal width."""
    if not steps:
        return []
    first, last = min(steps), max(steps)
    width = -(-(last - first + 1) // MOST_BARS)
    bins: list[tuple[int, int, Tally]] = []
    for start in range(first, last + 1, width):
        whole = Tally()
        for step in range(start, start + width):
            if step in steps:
                whole.add(steps[step])
        bins.append((start, width, whole))
    return bins


def _share(tally: Tally, fate: Fate | None) -> float:
    """Of the sampled tokens; None is all that is in flight."""
    if not tally.sampled_tokens:
        return 0.0
    if fate is not None:
        return tally.tokens[fate] / tally.sampled_tokens
    return sum(count for f, count in tally.tokens.items() if f.in_flight) / tally.sampled_tokens


def _draw_lengths(ax: Any, bands: list[Band], means: tuple[float, float] | None) -> None:
    ax.set_title("by length" + (f", length bias {means[0] / means[1]:.3f}" if means else ""))
    ax.set_xlabel("quantiles of the length, in sampled tokens")
    ax.set_ylabel("share of the sequences")
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(percent_axis())
    bottom = [0.0] * len(bands)
    for fate, colour in COLOURS.items():
        shares = [band.fates[fate] / band.num_sequences for band in bands]
        if any(shares):
            ax.bar(range(len(bands)), shares, width=0.8, bottom=bottom, color=colour, linewidth=0)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for place, band in enumerate(bands):
        inside = band.trained_share > 0.12
        ax.text(
            *(place, band.trained_share / 2 if inside else band.trained_share + 0.02),
            f"{band.trained_share:.0%}",
            ha="center",
            va="center" if inside else "bottom",
            fontsize=9,
            color="white" if inside else "black",
        )
    spans = ["–".join(dict.fromkeys((_short(b.shortest), _short(b.longest)))) for b in bands]
    ax.set_xticks(range(len(bands)), [f"{b.name}\n{span}" for b, span in zip(bands, spans, strict=True)], fontsize=8)
    ax.grid(False)


def _short(tokens: int) -> str:
    """
    >>> _short(999), _short(1257), _short(52_000)
    ('999', '1.3k', '52k')
    """
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / 1000:.1f}k" if tokens < 10_000 else f"{tokens / 1000:.0f}k"


COLUMNS, ROWS = 4, 3
_STYLE: dict[str, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
}


def plot_runs(run_dirs: Sequence[Path], output: Path) -> Path | None:
    """Draw the runs into a PNG; returns its path, or None when no run has finished a training step."""
    groups = grouped(run_dirs)
    if not any(training_steps(rows) for group in groups for rows in group.rows):
        return None
    fates = _fates(run_dirs)
    shares = newest_shares(groups[0].rows[0]) if len(run_dirs) == 1 else {}
    heights = [
        8.4,
        *([0.9 + 0.44 * len(shares)] if shares else []),
        *[3.2] * (0 if fates is None else len(fates.policies)),
    ]
    plt = pyplot()
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(16, sum(heights)), layout="constrained")
        # Grids of their own: the legends of fates are next to their bars, and would move the columns above apart.
        above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
        draw_panels(above.subplots(ROWS, COLUMNS), groups)
        if shares:
            draw_time(below.pop(0).subplots(), shares, "where the time went")
        if fates is not None:
            draw_fates([part.subplots(1, 2, width_ratios=[2.4, 1.0]) for part in below], fates)
        above.suptitle(", ".join(group.label for group in groups), fontsize=12)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=100)
        plt.close(figure)
    return output


def _fates(run_dirs: Sequence[Path]) -> Fates | None:
    """Of one run alone that has a journal; several would need a picture each."""
    if len(run_dirs) != 1 or not run_files.journal(run_dirs[0]).is_dir():
        return None
    return read_fates(run_dirs[0])
