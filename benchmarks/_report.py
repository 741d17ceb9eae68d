"""What every benchmark prints last: one JSON object with name, ours, theirs, ratio and spread.

Shared by the scripts of this folder; it measures nothing itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the smallest and largest value relative to it."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / 2 / middle if middle else 0.0


def report(name: str, ours: float, theirs: float, ratio: float, spread: float, **extra: Any) -> None:
    """Print the result as the last line of standard output."""
    line = {"name": name, "ours": ours, "theirs": theirs, "ratio": ratio, "spread": spread, **extra}
    print(json.dumps({key: _rounded(value) for key, value in line.items()}), flush=True)


def _rounded(value: Any) -> Any:
    """Four significant digits, also inside containers: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
