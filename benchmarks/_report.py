"""The last line of every benchmark: one JSON object with name, ours, theirs, ratio, spread and facts about the machine.

``cores`` are those that the benchmark ran on, ``load`` is the machine's average over a minute when it began, other
processes included: read no figure without the two. ``left_out`` names the parts that could not be measured on this
machine, and why. Shared by the scripts of this folder.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.system.machine import num_cores

EVERYTHING = "everything"  # the key of ``left_out`` when nothing was measured

# When this module is imported, which is when a script begins: later they are those of the measurement itself.
_CORES, _LOAD = num_cores(), os.getloadavg()[0]


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the smallest and largest value relative to the median."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / 2 / middle if middle else 0.0


def report(
    name: str, ours: float | None, theirs: float | None, ratio: float | None, spread: float | None, **extra: Any
) -> None:
    """Print the result as the last line of standard output."""
    report_facts(name, ours=ours, theirs=theirs, ratio=ratio, spread=spread, **extra)


def report_facts(name: str, *, left_out: Mapping[str, str] | None = None, cores: float = _CORES, **facts: Any) -> None:
    """The same for a result that does not compare two figures.

    ``left_out`` has the reason by part that was not measured. ``cores`` is given by a script that pins its processes.
    """
    line = {"name": name, **facts, "cores": cores, "load": _LOAD, "left_out": dict(left_out or {})}
    print(json.dumps({key: _rounded(value) for key, value in line.items()}), flush=True)


def report_nothing(name: str, reason: str) -> None:
    """This machine allows no measurement."""
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
