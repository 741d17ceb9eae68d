"""The panels of ``rollmill plot`` as numbers: a line for each policy and metric, or the mean and the band of seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from services.cli.inspect.pictures.panels import (
    PANELS,
    THROUGHPUT,
    Panel,
    curves_of,
    newest_version,
    throughput_of,
)
from services.cli.inspect.pictures.seeds import Points, Runs, band, grouped
from services.cli.inspect.run_state import Row
from services.common.telemetry.metrics import RowKind

MOST_POINTS = 400  # of a line: more than a panel has pixels for

Json = dict[str, Any]


def curves(run_dirs: Sequence[Path], read: Callable[[Path], list[Row]]) -> Json:
    """``groups``: runs that differ in the seed alone; ``panels``, each with lines, and the evaluations as points."""
    groups = grouped(run_dirs, read)
    return {
        "groups": [{"label": group.label, "seeds": len(group.rows)} for group in groups],
        "panels": [
            *(_panel(panel, groups) for panel in PANELS),
            _described(
                THROUGHPUT, [_line(n, "", "", [throughput_of(r) for r in g.rows]) for n, g in enumerate(groups)]
            ),
        ],
    }


def _described(panel: Panel, lines: list[Json], points: Sequence[Json] = ()) -> Json:
    found = [line for line in lines if line["x"]]
    return {
        "title": panel.title, "x": panel.x, "y": panel.y.replace("\n", " "), "from_zero": panel.from_zero,
        "lines": found, "points": list(points),
    }  # fmt: skip


def _panel(panel: Panel, groups: Sequence[Runs]) -> Json:
    lines = [
        _line(number, policy, line.label, found, line.style)
        for number, group in enumerate(groups)
        for policy, line, found in curves_of(panel, group, alone=len(groups) == 1)
    ]
    rewards = panel is PANELS[0]
    points = [point for n, group in enumerate(groups) for point in _evaluations(n, group)] if rewards else []
    return _described(panel, lines, points)


def _line(group: int, policy: str, label: str, curves: Sequence[Points], style: str = "-") -> Json:
    """``low`` and ``high`` are missing of a single run. Two runs of which only one has values are one line."""
    facts: Json = {"group": group, "policy": policy, "label": label, "style": style}
    found = band(curves)
    if found is None:
        points = thinned(next((points for points in curves if points), []))
        return {**facts, "x": [p[0] for p in points], "y": [p[1] for p in points]}
    return {
        **facts,
        "x": found.x.tolist(), "y": found.mean.tolist(), "low": found.low.tolist(), "high": found.high.tolist(),
    }  # fmt: skip


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
            ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
            kept += sorted(ends)
    return kept


def _evaluations(number: int, group: Runs) -> Iterator[Json]:
    """With the 95% interval of the mean, where one data set was evaluated."""
    for row in (row for rows in group.rows for row in rows):
        if row["kind"] != RowKind.EVALUATION or not row["versions"] or row["mean_reward"] is None:
            continue
        of_one = row["datasets"][0]["mean_reward"] if len(row["datasets"]) == 1 else {}
        yield {
            "group": number,
            "label": row["name"].partition("/")[2] or row["name"],
            "x": newest_version(row),
            "y": row["mean_reward"],
            "low": of_one.get("low"),
            "high": of_one.get("high"),
        }
