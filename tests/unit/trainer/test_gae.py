"""Discounted sums and GAE equal a plain loop in float64, and do not depend on packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.advantages import at_last_token, discounted_sums, gae


def plain_gae(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one sequence, from the last token backwards, by the paper's formula."""
    advantages = [0.0] * len(rewards)
    later = 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        later = rewards[t] + gamma * following - values[t] + gamma * gae_lambda * later
        advantages[t] = later
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def flat(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rewards, values, sequence_index)"""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    index = np.repeat(np.arange(len(lengths)), lengths)
    return torch.tensor(rng.normal(size=total)), torch.tensor(rng.normal(size=total)), torch.tensor(index)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.5, 1.0)])
@given(lengths=st.lists(st.integers(1, 40), max_size=6), seed=st.integers(0, 2**31))
def test_gae_is_the_recursion_of_the_paper(gamma: float, gae_lambda: float, lengths: list[int], seed: int) -> None:
    rewards, values, index = flat(lengths, seed)
    advantages, returns = gae(rewards, values, index, gamma, gae_lambda)
    expected: tuple[list[float], list[float]] = ([], [])
    for number in range(len(lengths)):
        own = index == number
        for found, more in zip(
            expected, plain_gae(rewards[own].tolist(), values[own].tolist(), gamma, gae_lambda), strict=True
        ):
            found += more
    assert advantages.tolist() == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
    assert returns.tolist() == pytest.approx(expected[1], rel=1e-12, abs=1e-12)


@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5), seed=st.integers(0, 2**31))
def test_a_sequence_has_the_same_bits_alone_as_among_others(lengths: list[int], seed: int) -> None:
    rewards, values, index = flat(lengths, seed)
    whole, _ = gae(rewards, values, index, 0.97, 0.9)
    for number in range(len(lengths)):
        own = index == number
        alone, _ = gae(rewards[own], values[own], torch.zeros(int(own.sum()), dtype=torch.int64), 0.97, 0.9)
        assert torch.equal(whole[own], alone)


def test_an_outcome_without_values_is_discounted_by_the_tokens_that_are_left() -> None:
    """REINFORCE++ with gamma below 1: G_t = gamma^(last - t) R."""
    index = torch.tensor([0, 0, 0, 1])
    rewards = at_last_token(torch.tensor([2.0, 2.0, 2.0, -1.0]), index)
    assert rewards.tolist() == [0.0, 0.0, 2.0, -1.0]
    assert discounted_sums(rewards, index, 0.5).tolist() == [0.5, 1.0, 2.0, -1.0]
