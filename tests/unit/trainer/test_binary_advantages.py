"""Pass@k and MaxRL against definitions that share no code with them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.trainer.advantages import max_rl_advantages, pass_at_k_advantages

REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9)


def statistics(rewards: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.array(rewards)
    return values, np.full(len(values), values.mean()), np.full(len(values), float(len(values)))


def by_enumeration(rewards: list[float], k: int, eps: float) -> list[float]:
    """Reference: scores every subset of k by its best; a rollout's advantage is the mean over its subsets."""
    subsets = list(combinations(range(len(rewards)), min(k, len(rewards))))
    scores = np.array([max(rewards[i] for i in subset) for subset in subsets])
    found = []
    for i in range(len(rewards)):
        own = np.array([score for score, subset in zip(scores, subsets, strict=True) if i in subset])
        found.append((own.mean() - scores.mean()) / (scores.std() + eps))
    return found


@given(rewards=REWARDS, k=st.integers(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], k: int) -> None:
    found = pass_at_k_advantages(*statistics(rewards), k, 1e-5)
    assert found.tolist() == pytest.approx(by_enumeration(rewards, k, 1e-5), abs=1e-9)


def test_pass_at_k_refuses_rewards_without_right_and_wrong() -> None:
    with pytest.raises(InvalidRequestError, match=r"rewards of 0 or 1.*a reward of 0\.5"):
        pass_at_k_advantages(*statistics([0.5, 1.0]), 2, 1e-5)
    with pytest.raises(InvalidRequestError, match="rewards of 0 or 1"):  # a sibling's, which shows in the mean
        pass_at_k_advantages(np.array([1.0]), np.array([0.75]), np.array([2.0]), 2, 1e-5)


@given(rewards=REWARDS)
def test_max_rl_is_the_mean_over_the_right_ones_minus_the_mean_over_all(rewards: list[float]) -> None:
    """The estimator of arXiv 2602.02710: sum over right of S / K minus sum of S / N, for any scores S."""
    scores = np.random.default_rng(31).normal(size=len(rewards))
    found = max_rl_advantages(*statistics(rewards)[:2])
    right = scores[np.array(rewards) == 1.0]
    expected = right.mean() - scores.mean() if len(right) else 0.0
    assert (found * scores).mean() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_max_rl_refuses_rewards_that_are_no_share_of_right_ones(reward: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"from 0 to 1, got {reward}"):
        max_rl_advantages(*statistics([reward, 1.0])[:2])
