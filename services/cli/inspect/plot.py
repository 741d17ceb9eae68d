"""The numbers of a run's pictures, from its metrics, and ``rollmill plot``, which draws them: the curves of one run or several,
of a single run also where the time went, and the fates of its sampled tokens, from the journal.

``curves`` is what ``rollmill plot`` draws and the page shows. Runs that differ in the seed alone are one curve with a band.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from services.cli.console import pyplot
from services.cli.inspect.fate import Fate, Fates, Tally, read_fates
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

Json = dict[str, Any]
Points = list[tuple[float, float]]

_OF_ONE_RUN = ("id", "dir", "seed")  # keys of ``run`` that differ between runs of one recipe
_OF_ONE_MACHINE = ("port", "rendezvous_port", "ports", "endpoint", "node")
_GRID = 200  # points of a band
MOST_POINTS = 400  # of a line: more than a panel has pixels for

STEP, SECONDS, TOKENS = "training step", "seconds since the start of the run", "trained tokens"
REWARD = "mean reward of training rollouts"


class Line(NamedTuple):
    """One metric in a panel."""

    key: str
    label: str = ""
    style: str = "-"
    only_if_any: bool = False  # left out where it is 0 in every step


class Panel(NamedTuple):
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
        y="mean |difference of log-probabilities|, nats",
    ),
    Panel(
        "staleness",
        (Line(StepKey.STALENESS_MEAN, "mean"), Line(StepKey.STALENESS_MAX, "largest of a batch", ":")),
        y="age of the oldest token, versions",
    ),
    Panel("throughput", (), x=SECONDS, y="sampled tokens per second"),  # of the run, not of a policy
)  # fmt: skip


class Runs(NamedTuple):
    """Runs that are drawn as one."""

    label: str
    rows: Sequence[list[Row]]
    """Of each run."""


def grouped(runs: Mapping[Path, list[Row]]) -> list[Runs]:
    """The runs, those together that differ in nothing but the seed; one without a recipe stands alone. ``runs``: the rows of
    the metrics by directory."""
    by_settings: dict[str, list[Path]] = {}
    for run_dir in runs:
        try:
            recipe = json.loads((run_dir / RESOLVED).read_text())
        except (OSError, json.JSONDecodeError):
            settings = str(run_dir)
        else:
            recipe["run"] = {key: value for key, value in recipe.get("run", {}).items() if key not in _OF_ONE_RUN}
            settings = json.dumps(_without_places(recipe), sort_keys=True)
        by_settings.setdefault(settings, []).append(run_dir)
    found = []
    for same in by_settings.values():
        others = len(same) - 1
        label = same[0].name + (f" and {others} other seed{'s' if others > 1 else ''}" if others else "")
        found.append(Runs(label, [runs[run_dir] for run_dir in same]))
    return found


def _without_places(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _without_places(value) for key, value in tree.items() if key not in _OF_ONE_MACHINE}
    return tree


def curves(runs: Mapping[Path, list[Row]]) -> Json:
    """``groups``: runs that differ in the seed alone. ``panels``: each with ``lines`` of ``x``, ``y`` and, of several seeds, the
    ``low`` and ``high`` of their band; ``points``, the evaluations; ``marks``, the steps at which ``run.until`` held."""
    groups = grouped(runs)
    panels: list[Json] = []
    for panel in PANELS:
        lines = [
            {"group": number, "policy": policy, "label": line.label, "style": line.style, **drawn}
            for number, group in enumerate(groups)
            for policy, line, points in _curves_of(panel, group, alone=len(groups) == 1)
            if (drawn := _line(points))["x"]
        ]
        panels.append({**panel._asdict(), "lines": lines, "points": [], "marks": []})
    for number, group in enumerate(groups):
        panels[0]["points"] += _evaluations(number, group)
        for rows in group.rows:  # the step after which run.until held: there is no training beyond those that had begun
            reached = [row for row in rows if row["kind"] == RowKind.THRESHOLD]
            panels[0]["marks"] += [{"x": row["step"], "label": row["wanted"]} for row in reached[-1:]]
    return {"groups": [{"label": group.label, "seeds": len(group.rows)} for group in groups], "panels": panels}


def _curves_of(panel: Panel, group: Runs, *, alone: bool) -> Iterator[tuple[str, Line, list[Points]]]:
    """Policy, metric, and a curve for each run. ``alone``: no other runs are beside these."""
    if not panel.lines:
        yield "", Line(""), [throughput_of(rows) for rows in group.rows]
    by_run = [training_steps(rows) for rows in group.rows]
    for policy in dict.fromkeys(policy for steps in by_run for policy in steps):
        steps = [of_run[policy] for of_run in by_run if policy in of_run]
        for line in (*panel.lines, *(part_lines(steps) if panel is PANELS[0] and alone else ())):
            if not line.only_if_any or any(row.get(line.key) for run in steps for row in run):
                yield policy, line, [_points_of(run, line.key, panel.x) for run in steps]


def _points_of(steps: list[Row], key: str, x: str) -> Points:
    """A metric of training steps against ``STEP``, ``SECONDS`` or ``TOKENS``."""
    if x == STEP:
        at = [row["step"] for row in steps]
    elif x == SECONDS:
        at = [row.get(StepKey.ELAPSED_S, 0.0) for row in steps]
    else:
        at = list(accumulate(row.get(StepKey.NUM_TRAINED_TOKENS, 0.0) for row in steps))
    return [(place, row[key]) for place, row in zip(at, steps, strict=True) if row.get(key) is not None]


def throughput_of(rows: Sequence[Row]) -> Points:
    """Sampled tokens per second by seconds."""
    start = rows[0]["time"] if rows else 0.0
    key = ThroughputKey.TOKENS_PER_S
    found = [row for row in rows if row["kind"] == RowKind.THROUGHPUT and row.get(key) is not None]
    return [(row["time"] - start, row[key]) for row in found]


def part_lines(runs: Sequence[list[Row]]) -> list[Line]:
    """The rewards of roles and attempts, where there are several, and those of the sources of a mixture."""
    roles = sorted({key for steps in runs for row in steps for key in row if key.startswith(ROLE_REWARD)})
    found = [(key, key.removeprefix(ROLE_REWARD)) for key in roles] if len(roles) > 1 else []
    sources = dict.fromkeys(source for steps in runs for row in steps for source in sources_in(row))
    found += [(source_key(source, StepKey.ROLLOUT_REWARD_MEAN), f"source {source}") for source in sources]
    styles = (":", "-.", "--")
    return [Line(key, label, styles[n % 3]) for n, (key, label) in enumerate(found)]


def _line(runs: Sequence[Points]) -> Json:
    """One curve, or the band of several. Two runs of which only one has values are one line."""
    found = band(runs)
    if found is not None:
        return found
    points = thinned(next((points for points in runs if points), []))
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def band(runs: Sequence[Points]) -> Json | None:
    """The mean, the lowest and the highest of curves, over the range that at least two of them cover; None with fewer than
    two. Between its points a curve is a line."""
    arrays = [np.asarray(sorted(points), dtype=float) for points in runs if points]
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
    found = {"x": x, "y": np.nanmean(values, 0), "low": np.nanmin(values, 0), "high": np.nanmax(values, 0)}
    return {name: of.tolist() for name, of in found.items()}


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """The lowest and the highest point of every stretch, so that no peak is lost; all of a short curve.

    >>> thinned([(0, 1.0), (1, 9.0), (2, 2.0), (3, 0.0)], most=2)
    [(1, 9.0), (3, 0.0)]
    """
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // most)
    stretches = (points[at : at + size] for at in range(0, len(points), size))
    ends = ({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))} for part in stretches)
    return [point for part in ends for point in sorted(part)]


def _evaluations(number: int, group: Runs) -> Iterator[Json]:
    """At the newest version that played, with the 95% interval of the mean where one data set was evaluated: the mean over
    several has none of its own."""
    for row in (row for rows in group.rows for row in rows):
        if row["kind"] == RowKind.EVALUATION and row["versions"] and row["mean_reward"] is not None:
            of_one = row["datasets"][0]["mean_reward"] if len(row["datasets"]) == 1 else {}
            yield {
                "group": number,
                "label": row["name"].partition("/")[2] or row["name"],
                "x": int(max((row.get("newest_versions") or row["versions"]).values())),
                "y": row["mean_reward"],
                "low": of_one.get("low"),
                "high": of_one.get("high"),
            }


LEAST_SHARE = 0.02  # of a segment of its own; smaller ones are one
SMALL = "other"
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


def newest_shares(rows: Iterable[Row]) -> Shares:
    """Component -> activity -> share of its time, of the newest accounts. A replica's records and weights have accounts of
    their own, parallel to its slots, and are left out."""
    shares: Shares = {}
    for row in rows:
        if row["kind"] in (RowKind.ACCOUNTS, RowKind.SUMMARY):
            shares = row.get("shares") or shares
    return {name: of_one for name, of_one in shares.items() if not is_records(name) and not is_weights(name)}


def kind_of(activity: str) -> str:
    """``work``, ``wait`` or ``idle``.

    >>> kind_of("generating -> engine/model0"), kind_of("waiting for reward -> envgateway"), kind_of("starting")
    ('work', 'wait', 'idle')
    """
    name = activity.partition(" -> ")[0]
    if name.startswith(_WORK):
        return "work"
    return "idle" if name in _IDLE else "wait"


class Segment(NamedTuple):
    """A part of the bar of a component."""

    kind: str
    activity: str
    share: float


def segments_of(shares: Mapping[str, float]) -> list[Segment]:
    """Work first, larger ones first; small ones of a kind are one."""
    found: list[Segment] = []
    for kind in ("work", "wait", "idle"):
        of_kind = sorted(((s, a) for a, s in shares.items() if kind_of(a) == kind), reverse=True)
        found += [Segment(kind, activity, share) for share, activity in of_kind if share >= LEAST_SHARE]
        small = sum(share for share, _ in of_kind if share < LEAST_SHARE)
        if small > 0.001:
            found.append(Segment(kind, SMALL, small))
    return found


# --- the picture

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
    found, alone = curves(rows), run_dirs[0] if len(run_dirs) == 1 else None
    shares = newest_shares(rows[alone]) if alone else {}  # several would need a picture each
    fates = read_fates(alone) if alone and run_files.journal(alone).is_dir() else Fates()
    heights = [8.4, *([0.9 + 0.44 * len(shares)] if shares else []), *[3.2] * len(fates.policies)]
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
        for part, policy in zip(below, fates.policies, strict=True):
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
        from matplotlib.ticker import EngFormatter

        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
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
    for group, label in sorted({(point["group"], point["label"]) for point in points}):
        of_kind, place = [p for p in points if (p["group"], p["label"]) == (group, label)], kinds.index(label)
        known = [
            (p["y"] if p["low"] is None else p["low"], p["y"], p["y"] if p["low"] is None else p["high"])
            for p in of_kind
        ]
        ax.errorbar(
            [p["x"] for p in of_kind], [y for _, y, _ in known],
            yerr=[[max(0.0, y - low) for low, y, _ in known], [max(0.0, high - y) for _, y, high in known]],
            capsize=2, elinewidth=0.8, markersize=4.5, marker="os^D"[place % 4], linestyle="none",
            color=f"C{place + 1 if alone else group}", label=f"evaluation {label}" if alone or group == 0 else None,
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
            told = f"{share:.0%} {activity.replace(' -> ', ' → ')}"
            wrap = textwrap.TextWrapper(max(room, 2), max_lines=3, placeholder=" …", break_long_words=False)
            lines = wrap.wrap(told)
            if any(len(line) > room for line in lines):
                lines = []
            ax.text(left + share / 2, place, "\n".join(lines), ha="center", va="center", fontsize=6.5)
            left += share
    ax.set_yticks(range(len(shares)), sorted(shares, reverse=True), fontsize=8)
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.5, len(shares) - 0.5)
    ax.xaxis.set_major_formatter("{x:.0%}")
    ax.set_xlabel(
        "share of the component's time   (green: work; orange: waits for the component behind the arrow; grey: nothing to do)"
    )
    ax.set_title("where the time went")
    ax.grid(False)


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
    **dict.fromkeys((fate for fate in Fate if fate.in_flight), "#dddddd"),
}


def draw_fates(ax: Any, steps: dict[int, Tally], of: str) -> None:
    """The shares of the sampled tokens by training step."""
    first, last = min(steps), max(steps)
    bottom = np.zeros(last - first + 1)
    for fate, colour in _COLOURS.items():
        top = bottom.copy()
        for step, tally in steps.items():
            top[step - first] += tally.tokens[fate] / max(1, tally.tokens.total())
        if (top > bottom).any():
            edges, label = np.arange(first, last + 2) - 0.5, "in flight" if fate.in_flight else fate.label
            ax.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=label)
            bottom = top
    ax.set(xlim=(first - 0.5, last + 0.5), ylim=(0, 1), title=f"fates of the sampled tokens{of}")
    ax.set(xlabel="training step in which the rollout was issued", ylabel="share of its tokens")
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(False)
    labels = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))  # each once
    ax.legend(
        labels.values(), labels, reverse=True, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )
