"""The numbers of a run's pictures, from its metrics: the curves of one run or several, and where the time went.

``curves`` is what ``rollmill plot`` draws and the page shows. Runs that differ in the seed alone are one curve with a band.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from services.cli.inspect.run_state import Row, read_metrics, training_steps
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
Read = Callable[[Path], list[Row]]

_OF_ONE_RUN = ("id", "dir", "seed")  # keys of ``run`` that differ between runs of one recipe
_OF_ONE_MACHINE = ("port", "rendezvous_port", "ports", "endpoint", "node")
_GRID = 200  # points of a band
MOST_POINTS = 400  # of a line: more than a panel has pixels for

STEP, SECONDS, TOKENS = "training step", "seconds since the start of the run", "trained tokens"
REWARD = "mean reward of training rollouts"


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
        y="mean |difference of log-probabilities|, nats",
    ),
    Panel(
        "staleness",
        (Line(StepKey.STALENESS_MEAN, "mean"), Line(StepKey.STALENESS_MAX, "largest of a batch", ":")),
        y="age of the oldest token, versions",
    ),
    Panel("throughput", (), x=SECONDS, y="sampled tokens per second"),  # of the run, not of a policy
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs that are drawn as one."""

    label: str
    rows: Sequence[list[Row]]
    """Of each run."""


def grouped(run_dirs: Sequence[Path], read: Read = read_metrics) -> list[Runs]:
    """The runs, those together that differ in nothing but the seed; one without a recipe stands alone."""
    by_settings: dict[str, list[Path]] = {}
    for run_dir in run_dirs:
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
        found.append(Runs(label, [read(run_dir) for run_dir in same]))
    return found


def _without_places(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _without_places(value) for key, value in tree.items() if key not in _OF_ONE_MACHINE}
    return tree


def curves(run_dirs: Sequence[Path], read: Read = read_metrics) -> Json:
    """``groups``: runs that differ in the seed alone. ``panels``: each with ``lines`` of ``x``, ``y`` and, of several seeds, the
    ``low`` and ``high`` of their band; ``points``, the evaluations; ``marks``, the steps at which ``run.until`` held."""
    groups = grouped(run_dirs, read)
    panels = []
    for panel in PANELS:
        is_first = panel is PANELS[0]
        panels.append(
            {
                **{name: getattr(panel, name) for name in ("title", "x", "y", "from_zero")},
                "lines": [
                    {"group": number, "policy": policy, "label": line.label, "style": line.style, **drawn}
                    for number, group in enumerate(groups)
                    for policy, line, runs in _curves_of(panel, group, alone=len(groups) == 1)
                    if (drawn := _line(runs))["x"]
                ],
                "points": [point for n, group in enumerate(groups) for point in _evaluations(n, group) if is_first],
                "marks": [mark for group in groups for mark in _thresholds(group) if is_first],
            }
        )
    return {"groups": [{"label": g.label, "seeds": len(g.rows)} for g in groups], "panels": panels}


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
    kept: Points = []
    stretches = max(1, most // 2)
    for number in range(stretches):
        part = points[len(points) * number // stretches : len(points) * (number + 1) // stretches]
        if part:
            kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


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


def _thresholds(group: Runs) -> Iterator[Json]:
    """The step after which ``run.until`` held: there is no training beyond those that had begun."""
    for rows in group.rows:
        for row in [row for row in rows if row["kind"] == RowKind.THRESHOLD][-1:]:
            yield {"x": row["step"], "label": row["wanted"]}


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


def segments_of(shares: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """(kind, activity, share), work first, larger ones first; small ones of a kind are one."""
    found: list[tuple[str, str, float]] = []
    for kind in ("work", "wait", "idle"):
        of_kind = sorted(((s, a) for a, s in shares.items() if kind_of(a) == kind), reverse=True)
        found += [(kind, activity, share) for share, activity in of_kind if share >= LEAST_SHARE]
        small = sum(share for share, _ in of_kind if share < LEAST_SHARE)
        if small > 0.001:
            found.append((kind, SMALL, small))
    return found
