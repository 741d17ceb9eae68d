"""Sums, means and deviations of numbers of any magnitude: finite in, finite out, without errors.

Numbers near 1e308 are rare, and are mistakes; but a mean that raises ends a process, and one that is infinite spoils
all values computed from it. Within 2**-500 .. 2**500 the results are those of the plain formulas, to the bit. Beyond,
the numbers are scaled by a power of two first, and a result that no float holds becomes the largest one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

MOST = sys.float_info.max
SAFE = 500  # exponent of two up to which squares and sums of many squares are finite


def finite(value: float) -> float:
    """The nearest finite number; 0 for NaN.

    >>> finite(math.inf) == MOST, finite(1.5)
    (True, 1.5)
    """
    return min(max(value, -MOST), MOST) if value == value else 0.0


def scaled(values: Sequence[float]) -> tuple[Sequence[float], int]:
    """The values times 2**-exponent, so that their squares can be added up; exponent 0 where they can as they are."""
    largest = max(map(abs, values), default=0.0)
    exponent = math.frexp(largest)[1] if largest else 0
    if abs(exponent) <= SAFE:
        return values, 0
    return [math.ldexp(value, -exponent) for value in values], exponent


def unscaled(value: float, exponent: int) -> float:
    """value times 2**exponent, or the largest float of its sign."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(MOST, value)


def total(values: Iterable[float]) -> float:
    """
    >>> total([1e308, 1e308]) == MOST, total([0.5, 0.25])
    (True, 0.75)
    """
    listed, exponent = scaled(list(values))
    return unscaled(math.fsum(listed), exponent)


def mean(values: Iterable[float]) -> float:
    """Of at least one number.

    >>> mean([1e308, 1e308, -1e308, -1e308])
    0.0
    """
    listed, exponent = scaled(list(values))
    return unscaled(math.fsum(listed) / len(listed), exponent)


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (N - 1) of at least two numbers.

    >>> mean_and_deviation([1.0, 0.0, 0.0, 1.0])
    (0.5, 0.5773502691896257)
    """
    listed, exponent = scaled(list(values))
    centre = math.fsum(listed) / len(listed)
    spread = math.sqrt(math.fsum((value - centre) ** 2 for value in listed) / (len(listed) - 1))
    return unscaled(centre, exponent), unscaled(spread, exponent)
