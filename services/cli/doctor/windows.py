"""Compares the beginning of a series with its end. Knows nothing about runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_POINTS = 10  # with fewer there is no telling a change from noise
FIRST_MOST = 16  # a long run may learn within its first steps, and they are the beginning that counts
_LEAST_WINDOW = 4
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Change:
    """Means of the first and the last points, and the 95% interval of their difference."""

    first: float
    last: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g}, change {self.last - self.first:+.3f} ({self.low:+.3f}..{self.high:+.3f})"


def windows(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first eighth of the points (4 to 16) and the last quarter (at least 4)."""
    first = min(FIRST_MOST, max(_LEAST_WINDOW, len(values) // 8))
    return values[:first], values[-max(_LEAST_WINDOW, len(values) // 4) :]


def change(values: Sequence[float]) -> Change | None:
    """The change of a series; None with fewer than ``LEAST_POINTS`` points.

    The noise of a point is estimated from successive differences (von Neumann, 1941), which a trend does not enlarge.
    """
    if len(values) < LEAST_POINTS:
        return None
    first, last = windows(values)
    differences = [after - before for before, after in itertools.pairwise(values)]
    variance = statistics.fmean(d * d for d in differences) / 2
    half = _Z * math.sqrt(variance * (1 / len(first) + 1 / len(last)))
    begin, end = statistics.fmean(first), statistics.fmean(last)
    return Change(begin, end, end - begin - half, end - begin + half)


def medians(values: Sequence[float]) -> tuple[float, float] | None:
    """Medians of the first and the last points, which one odd step does not move; None with too few points."""
    if len(values) < LEAST_POINTS:
        return None
    first, last = windows(values)
    return statistics.median(first), statistics.median(last)
