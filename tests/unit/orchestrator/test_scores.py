"""avg@k and pass@k with intervals."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.journal.entries import (
    DatasetScore,
    compared,
    difference,
    estimate,
    mean_difference,
    overall,
    overall_difference,
    overall_pass_at,
    pass_at_k,
    score,
    t_quantile,
)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(num_samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    samples = [True] * right + [False] * (num_samples - right)
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k(num_samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_interval_of_a_share_holds_it_and_stays_a_share(items: list[float]) -> None:
    found = estimate(items)
    assert 0.0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1.0
    assert found.high > found.low, "no number of items proves a share exactly"


def test_failed_items_are_named_and_count_as_wrong() -> None:
    found = score("d", ["one", "two"], [[1.0, 1.0], [1.0, 0.0]], [0, 1], 1.0)
    assert found.failed == ("two",)
    assert found.mean_reward.value == 0.75
    assert [(passed.k, passed.share.value) for passed in found.pass_at] == [(1, 0.75), (2, 1.0)]


def test_overall_counts_each_dataset_once() -> None:
    small = score("small", [""], [[1.0]], [False], 1.0)
    large = score("large", [""] * 9, [[0.0]] * 9, [False] * 9, 1.0)
    assert overall([small, large]) == 0.5


def test_rewards_beyond_a_share_get_a_plain_interval() -> None:
    found = estimate([2.0, -1.0])
    assert found.value == 0.5
    assert math.isclose(found.high - found.value, found.value - found.low)


def of_items(rewards: list[float], items: str = "digest", name: str = "d") -> DatasetScore:
    return score(name, ["x"] * len(rewards), [[r] for r in rewards], [False] * len(rewards), 1.0, items)


def test_a_difference_is_that_of_the_means_with_the_t_interval_of_the_items_differences() -> None:
    """Of 10 items three are won and one is lost: sd of the differences sqrt(3.6 / 9), t with 9 degrees of freedom 2.262."""
    base, other = of_items([0.0] * 5 + [1.0] * 5), of_items([1.0] * 3 + [0.0] * 2 + [1.0] * 4 + [0.0])
    found = difference(base, other)
    assert found is not None
    assert found.value == pytest.approx(other.mean_reward.value - base.mean_reward.value) == pytest.approx(0.2)
    half = 2.26216 * math.sqrt(3.6 / 9 / 10)
    assert (found.low, found.high) == (pytest.approx(0.2 - half, abs=1e-4), pytest.approx(0.2 + half, abs=1e-4))


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    """Over 1,000 draws of 12 items of mean difference 0.1 the share of intervals that contain this mean is 95%, within
    4 deviations."""
    draw, held = random.Random(5), 0
    for _ in range(1000):
        found = mean_difference([[draw.gauss(0.1, 1.0) for _ in range(12)]])
        assert found is not None
        held += found.low <= 0.1 <= found.high
    assert abs(held / 1000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)


def test_datasets_count_once_in_the_overall_difference_however_large() -> None:
    base = [of_items([0.0] * 4, "a", "a"), of_items([0.0] * 100, "b", "b")]
    other = [of_items([1.0, 1.0, 0.0, 0.0], "a", "a"), of_items([0.0] * 100, "b", "b")]
    found = overall_difference(base, other)
    assert found is not None and found.value == 0.25
    alone = difference(base[0], other[0])
    assert alone is not None
    # The large dataset adds no variance: half of the small one's interval remains, with its degrees of freedom.
    assert found.high - found.value == pytest.approx((alone.high - alone.value) / 2)


@pytest.mark.parametrize(
    ("base", "other"),
    [
        (of_items([1.0, 0.0], "one"), of_items([1.0, 0.0], "two")),
        (of_items([1.0, 0.0], ""), of_items([1.0, 0.0], "")),
        (of_items([1.0]), of_items([0.0])),
    ],
    ids=["other items", "items unknown", "one item"],
)
def test_what_cannot_be_paired_has_no_difference(base: DatasetScore, other: DatasetScore) -> None:
    assert difference(base, other) is None
    assert overall_difference([base], [other]) is None
    assert compared([base], [other])[0].difference is None


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (29, 2.0452), (500, 1.9647)])
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)
    assert t_quantile(1e6) == pytest.approx(1.96, abs=1e-4)


def test_where_every_sample_failed_there_is_no_score_and_no_difference() -> None:
    played = score("played", ["", "x"], [[1.0], [0.0]], [0, 1], 1.0, "digest")
    lost = score("lost", ["x", "y"], [[0.0], [0.0]], [1, 1], 1.0, "digest")
    assert (lost.mean_reward, lost.pass_at, lost.failed) == (None, (), ("x", "y"))
    assert (overall([played]), overall([lost]), overall([]), overall([played, lost])) == (0.5, None, None, None)
    assert overall_pass_at([lost], 1) is None
    assert difference(lost, played) is None and difference(played, lost) is None
