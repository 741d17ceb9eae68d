"""avg@k and pass@k with intervals."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.scores import estimate, overall, pass_at_k, score


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


def test_wilson_interval_of_independent_items() -> None:
    found = estimate([1.0] * 8 + [0.0] * 2)
    assert (found.low, found.high) == (pytest.approx(0.490, abs=0.02), pytest.approx(0.943, abs=0.02))


def test_samples_of_one_item_are_no_observations_of_their_own() -> None:
    """Four equal samples per item say no more than one."""
    once = score("d", ["x"] * 4, [[1.0], [0.0], [1.0], [1.0]], [False] * 4, 1.0).mean_reward
    fourfold = score("d", ["x"] * 4, [[1.0] * 4, [0.0] * 4, [1.0] * 4, [1.0] * 4], [False] * 4, 1.0).mean_reward
    assert once == fourfold


def test_failed_items_are_named_and_count_as_wrong() -> None:
    found = score("d", ["one", "two"], [[1.0, 1.0], [0.0, 1.0]], [False, True], 1.0)
    assert found.failed == ("two",)
    assert found.mean_reward.value == 0.75
    assert [(k, share.value) for k, share in found.pass_at] == [(1, 0.75), (2, 1.0)]


def test_a_part_of_a_reward_is_no_pass() -> None:
    found = score("d", ["one"], [[0.5, 0.9]], [False], 1.0)
    assert (found.mean_reward.value, found.pass_at[0][1].value) == (0.7, 0.0)


def test_overall_counts_each_dataset_once() -> None:
    small = score("small", [""], [[1.0]], [False], 1.0)
    large = score("large", [""] * 9, [[0.0]] * 9, [False] * 9, 1.0)
    assert overall([small, large]) == 0.5


def test_rewards_beyond_a_share_get_a_plain_interval() -> None:
    found = estimate([2.0, -1.0])
    assert found.value == 0.5
    assert math.isclose(found.high - found.value, found.value - found.low)
