"""Numbers of any magnitude: finite inputs give finite results."""

from __future__ import annotations

import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from services.common import errors

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MOST = errors.MOST
TINY = 5e-324


@given(st.lists(FLOATS, min_size=2, max_size=20))
@example([MOST, MOST])
@example([MOST, -MOST])
@example([MOST, -MOST, -MOST])
@example([TINY, 0.0])
@example([1e200, 1e-200])
def test_mean_deviation_and_total_are_finite_for_all_finite_floats(values: list[float]) -> None:
    mean, deviation = errors.mean_and_deviation(values)
    assert math.isfinite(mean) and 0.0 <= deviation <= MOST
    assert min(values) <= mean <= max(values) or math.isclose(mean, max(values)) or math.isclose(mean, min(values))
    assert errors.mean(values) == mean
    assert math.isfinite(errors.total(values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_ordinary_numbers_have_the_plain_formulas_to_the_bit(values: list[float]) -> None:
    mean = math.fsum(values) / len(values)
    if max(map(abs, values)) > 1e-100:
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        assert errors.mean_and_deviation(values) == (mean, deviation)


@given(st.lists(st.floats(-1e150, 1e150), min_size=2, max_size=8), st.sampled_from([-600, 500]))
def test_scaling_by_a_power_of_two_scales_mean_and_deviation(values: list[float], exponent: int) -> None:
    values = [value / 1e150 for value in values]
    moved = [math.ldexp(value, exponent) for value in values]
    mean, deviation = errors.mean_and_deviation(moved)
    expected = statistics.fmean(values), statistics.stdev(values)
    assert math.ldexp(mean, -exponent) == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert math.ldexp(deviation, -exponent) == pytest.approx(expected[1], rel=1e-9, abs=1e-12)


def test_what_is_no_number_is_none() -> None:
    assert errors.finite(float("nan")) == 0.0
    assert (errors.finite(math.inf), errors.finite(-math.inf)) == (MOST, -MOST)
