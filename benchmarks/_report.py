"""What every benchmark prints last: one JSON object with name, ours, theirs, ratio and spread, and where it was measured.

``cores`` are those that the benchmark ran on, ``load`` is the machine's average over a minute when it began, of whatever
else ran there included: no figure should be read without the two. ``left_out`` names what could not be measured on this
machine, and why. Shared by the scripts of this folder; it measures nothing itself.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.cores import num_cores

EVERYTHING = "everything"  # the key of ``left_out`` when nothing was measured

# When this module is imported, which is when a script begins: later they are those of the measurement itself.
_CORES, _LOAD = num_cores(), os.getloadavg()[0]


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the smallest and largest value relative to it."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / 2 / middle if middle else 0.0


def report(
    name: str, ours: float | None, theirs: float | None, ratio: float | None, spread: float | None, **extra: Any
) -> None:
    """Print the result as the last line of standard output."""
    report_facts(name, ours=ours, theirs=theirs, ratio=ratio, spread=spread, **extra)


def report_facts(name: str, *, left_out: Mapping[str, str] | None = None, cores: float = _CORES, **facts: Any) -> None:
    """The same for what is no comparison of two figures.

    ``left_out`` has the reason by what was not measured. ``cores`` is given by a script that pins its processes.
    """
    line = {"name": name, **facts, "cores": cores, "load": _LOAD, "left_out": dict(left_out or {})}
    print(json.dumps({key: _rounded(value) for key, value in line.items()}), flush=True)


def report_nothing(name: str, reason: str) -> None:
    """Nothing can be measured on this machine."""
    report(name, None, None, None, None, left_out={EVERYTHING: reason})


def _rounded(value: Any) -> Any:
    """Four significant digits, also inside containers: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
