"""Runs of one recipe that differ in their seed alone, as one curve with a band."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.cli.inspect.run_state import Row, read_metrics
from services.common.config.reading.loading import RESOLVED

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
class Band:
    """The mean of several curves, and the lowest and highest of them, where at least two have values."""

    x: Any  # [num_points]
    mean: Any  # [num_points]
    low: Any  # [num_points]
    high: Any  # [num_points]


def band(curves: Sequence[Points]) -> Band | None:
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
    return Band(x, np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0))
