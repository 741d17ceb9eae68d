"""``rollmill plot``: a picture of one run, or several: their curves; of a single run also where the time went, and the fates
of its sampled tokens, from the journal.

Reads ``metrics/orchestrator.jsonl`` of each run directory, during the run or later.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from services.cli.console import percent_axis, pyplot, thousands_axis
from services.cli.inspect.curves import SECONDS, SMALL, TOKENS, Json, Shares, curves, newest_shares, segments_of
from services.cli.inspect.fate import Fate, Fates, Tally, read_fates
from services.cli.inspect.run_state import read_metrics, training_steps
from services.common import run_files

COLUMNS, ROWS = 4, 3  # one place more than there are panels, for the explanation
STYLE: dict[str, Any] = {
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
_FEW_POINTS = 10  # are shown as points: a line of two looks like a trend


def plot_runs(run_dirs: Sequence[Path], output: Path) -> Path | None:
    """Draw the runs into a PNG; returns its path, or None when no run has finished a training step."""
    rows = {run_dir: read_metrics(run_dir) for run_dir in run_dirs}
    if not any(training_steps(of_one) for of_one in rows.values()):
        return None
    found = curves(run_dirs, rows.__getitem__)
    shares: Shares = {}
    fates: Fates | None = None
    if len(run_dirs) == 1:  # several would need a picture each
        shares = newest_shares(rows[run_dirs[0]])
        if run_files.journal(run_dirs[0]).is_dir():
            fates = read_fates(run_dirs[0])
    heights = [8.4, *([0.9 + 0.44 * len(shares)] if shares else []), *[3.2] * (len(fates.policies) if fates else 0)]
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(16, sum(heights)), layout="constrained")
        # Grids of their own: the legends of fates are next to their bars, and would move the columns above apart.
        above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
        places = list(above.subplots(ROWS, COLUMNS).flat)
        for ax, panel in zip(places, found["panels"], strict=False):
            _draw_panel(ax, panel, alone=len(found["groups"]) == 1)
        _explain(places[-1], found["groups"])
        above.suptitle(", ".join(group["label"] for group in found["groups"]), fontsize=12)
        if shares:
            draw_time(below.pop(0).subplots(), shares)
        for part, policy in zip(below, fates.policies if fates else (), strict=True):
            assert fates is not None
            of = "" if len(fates.policies) == 1 else f" of {policy}"
            draw_fates(part.subplots(), fates.steps(policy), of)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=100)
        plt.close(figure)
    return output


def _draw_panel(ax: Any, panel: Json, *, alone: bool) -> None:
    """Of one run a colour for each policy; of several a colour for each, and the second policy and later ones are dashed."""
    ax.set_title(panel["title"])
    ax.set_xlabel(panel["x"])
    ax.set_ylabel(textwrap.fill(panel["y"], 34))
    if panel["x"] != SECONDS:
        ax.xaxis.get_major_locator().set_params(integer=True)
    if panel["x"] == TOKENS:  # labels of six digits overlap
        ax.xaxis.set_major_formatter(thousands_axis())
    policies = list(dict.fromkeys(line["policy"] for line in panel["lines"]))
    for line in panel["lines"]:
        place, style = policies.index(line["policy"]), line["style"]
        names = [line["policy"]] if alone and len(policies) > 1 else []
        names += [line["label"]] if line["label"] and (alone or (line["group"] == 0 and place == 0)) else []
        color = f"C{place if alone else line['group']}"
        ax.plot(
            line["x"], line["y"], linestyle="--" if place and not alone and style == "-" else style, color=color,
            marker="o" if len(line["x"]) <= _FEW_POINTS else None, markersize=3, label=", ".join(names) or None,
        )  # fmt: skip
        if "low" in line:
            ax.fill_between(line["x"], line["low"], line["high"], color=color, alpha=0.18, linewidth=0)
    _draw_evaluations(ax, panel["points"], alone)
    for mark in panel["marks"]:
        ax.axvline(mark["x"], color="0.4", linestyle="--", linewidth=1, label=mark["label"])
    if panel["from_zero"]:  # after everything is drawn: it ends the choice of limits by what is
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    if panel["x"] in (SECONDS, TOKENS):
        ax.set_xlim(left=0.0)
    if names := ax.get_legend_handles_labels()[1]:
        legend = ax.legend(fontsize=7, framealpha=0.7, loc="best")
        if not alone:  # the runs are explained once, and here the kinds of lines
            for handle in legend.legend_handles:
                if hasattr(handle, "set_color"):
                    handle.set_color("0.3")


def _draw_evaluations(ax: Any, points: Sequence[Json], alone: bool) -> None:
    """Points with the 95% interval of their mean. No line joins them: nothing is known in between."""
    kinds = sorted({point["label"] for point in points})
    for (group, label), found in groupby(
        sorted(points, key=lambda p: (p["group"], p["label"])), key=lambda p: (p["group"], p["label"])
    ):
        of_kind, place = list(found), kinds.index(label)
        bars = [
            [max(0.0, sign * (p["y"] - p[end])) if p[end] is not None else 0.0 for p in of_kind]
            for sign, end in ((1, "low"), (-1, "high"))
        ]
        ax.errorbar(
            [p["x"] for p in of_kind], [p["y"] for p in of_kind], yerr=bars, capsize=2, elinewidth=0.8, markersize=4.5,
            marker="os^D"[place % 4], linestyle="none", color=f"C{place + 1 if alone else group}",
            label=f"evaluation {label}" if alone or group == 0 else None,
        )  # fmt: skip


def _explain(ax: Any, groups: Sequence[Json]) -> None:
    """The runs by colour, and how to read the picture, in the last place of the grid."""
    ax.axis("off")
    lines = [
        "points with bars: evaluations, at the newest version that played, with the 95% interval of the mean",
        "trained tokens: written by the policy, not masked",
        "fresh: sampled from the version that is trained",
    ]
    if any(group["seeds"] > 1 for group in groups):
        lines.insert(0, "line and band: mean, lowest and highest of the seeds")
    told = "\n".join(textwrap.fill(line, 44) for line in lines)
    ax.text(0.0, 0.0, told, fontsize=8, color="0.35", transform=ax.transAxes)
    if len(groups) > 1:
        for number, group in enumerate(groups):
            ax.plot([], [], color=f"C{number}", label="\n".join(textwrap.wrap(group["label"], 38)))
        ax.legend(fontsize=8, loc="upper left", frameon=False)


_CHARACTERS = 170  # across the whole bar, at the size of the labels
_COLORS = {
    "work": ("#3a9b5c", "#5fb57c", "#86cba0"),
    "wait": ("#e58a3c", "#eda667", "#f3c193"),
    "idle": ("#cfcfcf", "#dedede"),
}


def draw_time(ax: Any, shares: Shares) -> None:
    """One bar for each component, work first, then waits by their cause. An activity has the same shade in all bars."""
    for place, component in enumerate(sorted(shares, reverse=True)):
        left = 0.0
        for kind, activity, share in segments_of(shares[component]):
            shade = place if activity == SMALL else sum(activity.encode())
            color = _COLORS[kind][shade % len(_COLORS[kind])]
            ax.barh(place, share, left=left, height=0.82, color=color, edgecolor="white", linewidth=1.2)
            room = int(share * _CHARACTERS)
            lines = textwrap.wrap(
                f"{share:.0%} {activity.replace(' -> ', ' → ')}", max(room, 1), break_long_words=False
            )
            if len(lines) > 3 or any(len(line) > room for line in lines):
                lines = lines[:1] if room >= 4 and len(lines[0]) <= room else []
            ax.text(left + share / 2, place, "\n".join(lines), ha="center", va="center", fontsize=6.5)
            left += share
    ax.set_yticks(range(len(shares)), sorted(shares, reverse=True), fontsize=8)
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.5, len(shares) - 0.5)
    ax.xaxis.set_major_formatter(percent_axis())
    ax.set_xlabel(
        "share of the component's time   (green: work; orange: waits for the component behind the arrow; grey: nothing to do)"
    )
    ax.set_title("where the time went")
    ax.grid(False)


MOST_BARS = 100

# From the bottom of a bar to its top: trained, lost because of age, left out by a filter, still open.
_COLOURS = {
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


def draw_fates(ax: Any, steps: dict[int, Tally], of: str) -> None:
    """The shares of the sampled tokens by training step, in at most ``MOST_BARS`` bins of equal width."""
    ax.set_title(f"fates of the sampled tokens{of}")
    ax.set_xlabel("training step in which the rollout was issued")
    ax.set_ylabel("share of its tokens")
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(percent_axis())
    ax.grid(False)
    if not steps:
        return
    first, last = min(steps), max(steps)
    width = -(-(last - first + 1) // MOST_BARS)
    bins = [Tally() for _ in range(first, last + 1, width)]
    for step, tally in steps.items():
        bins[(step - first) // width].add(tally)
    middles = [first + place * width + (width - 1) / 2 for place in range(len(bins))]
    bottom = [0.0] * len(bins)
    parts = [({fate}, fate.label, colour) for fate, colour in _COLOURS.items()]
    for fates, label, colour in (*parts, ({fate for fate in Fate if fate.in_flight}, "in flight", "#dddddd")):
        shares = [sum(tally.tokens[fate] for fate in fates) / max(1, tally.sampled_tokens) for tally in bins]
        if any(shares):
            ax.bar(middles, shares, width=width, bottom=bottom, color=colour, label=label, linewidth=0)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    ax.set_xlim(first - 0.5, first + len(bins) * width - 0.5)
    ax.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = ax.get_legend_handles_labels()
    # As they are stacked: the uppermost first.
    ax.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
