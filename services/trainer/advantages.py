"""Computes one advantage per sequence from rewards and stamped group statistics. numpy, float64.

    grpo       (R - mean) / (std + eps)
    dr_grpo    R - mean                       (arXiv 2503.20783: no std; use with a constant denominator)
    rloo       (R - mean) * N / (N - 1)       (equals R minus the mean of the others; 0 for a singleton)
    reinforce  R
    gae        R                              (the reward that ``credit`` spreads over tokens)
    pass_at_k, max_rl                         from shares of right rollouts, at the functions

With ``deviation: batch`` grpo divides by the deviation of all rewards of the global batch instead (arXiv 2508.08221).
A group whose rewards differ by no more than rounding has advantage 0 exactly, in all but ``reinforce``: .1, .1, .1 have a
mean of .10000000000000002, which a division by their std would turn into -.8.

R is the reward after all shaping, clip((R + bias) * scale) included; mean, std (N - 1; 1 for a singleton) and N were
stamped over the R of the *whole* advantage group when it completed, because minibatches and ranks may cut groups. Every
trained token of a sequence gets the sequence's advantage (outcome reward: GAE with gamma = lambda = 1 and no values).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from services.common.config.algorithm import AlgorithmConfig
from services.common.errors import InvalidRequestError
from services.common.records import TrainingSequence
from services.trainer.losses import clamped

Floats = npt.NDArray[np.float64]
EQUAL = 1e-12  # deviation of a group, relative to its mean, that counts as rounding
LARGEST = 2.0**480  # larger numbers are mistakes; the sum of 2**60 such squares is finite


@np.errstate(over="ignore")  # ``_finite`` replaces overflows by the nearest float
def sequence_advantages(sequences: Seq[TrainingSequence], config: AlgorithmConfig) -> Floats:
    """One advantage per sequence, before any batch normalisation; finite for all finite rewards. [num_sequences]"""
    rewards = np.array([s.sequence.reward for s in sequences], dtype=np.float64)
    means = np.array([s.group_mean for s in sequences], dtype=np.float64)
    size = np.array([s.group_size for s in sequences], dtype=np.float64)
    if config.advantage == "pass_at_k":
        assert config.pass_k is not None
        return pass_at_k_advantages(rewards, means, size, config.pass_k, config.advantage_eps)
    if config.advantage == "max_rl":
        return max_rl_advantages(rewards, means)
    if config.advantage in ("reinforce", "gae"):
        return rewards
    deviations = np.array([s.group_std for s in sequences], dtype=np.float64)
    centred = _finite(rewards - means)
    centred[deviations <= EQUAL * np.abs(means)] = 0.0
    if config.advantage == "dr_grpo" or config.deviation == "batch":
        return centred
    if config.advantage == "rloo":
        return _finite(centred * size / np.maximum(size - 1.0, 1.0))
    return _finite(centred / (deviations + config.advantage_eps))


def _finite(values: Floats) -> Floats:
    """Each number, or the nearest finite float."""
    return np.clip(values, -sys.float_info.max, sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums that ranks add up to get the mean and the deviation of all their numbers."""

    count: float
    total: float
    total_squares: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def deviation(self, kind: Literal["population", "sample"] = "population") -> float:
        """Standard deviation over n, or over n - 1; 0 of fewer than two numbers."""
        spread = max(self.total_squares - self.count * self.mean**2, 0.0)
        return math.sqrt(spread / max(self.count - (kind == "sample"), 1.0))

    def divisor(self, config: AlgorithmConfig) -> float:
        """The divisor of ``batch_normalize_advantages``."""
        return self.deviation(config.normalize_deviation) + config.advantage_eps

    @classmethod
    def of(cls, values: Floats, weights: Floats) -> Moments:
        """The moments of values, each repeated ``weights`` times (for the tokens of a sequence). Values are limited so that the
        sum of squares is finite."""
        values = np.clip(values, -LARGEST, LARGEST)
        return cls(float(weights.sum()), float((values * weights).sum()), float((values**2 * weights).sum()))


def normalize(advantages: Floats, moments: Moments, config: AlgorithmConfig) -> Floats:
    """(A - mean) / (std + eps) with the moments of the global batch. [num_sequences]"""
    if not moments.count:
        return advantages
    with np.errstate(over="ignore"):
        return _finite((advantages - moments.mean) / moments.divisor(config))


def scaled_by_source(advantages: Floats, sequences: Seq[TrainingSequence]) -> Floats:
    """Each advantage times the factor of its source of tasks (``advantage_scale``). [num_sequences]"""
    with np.errstate(over="ignore"):
        return _finite(advantages * np.array([s.advantage_scale for s in sequences], dtype=np.float64))


def reward_moments(sequences: Seq[TrainingSequence]) -> Moments:
    """The moments of the rewards of these sequences. Added up over ranks, they are the input of ``over_batch_deviation``."""
    rewards = np.array([s.sequence.reward for s in sequences], dtype=np.float64)
    return Moments.of(rewards, np.ones_like(rewards))


def over_batch_deviation(centred: Floats, rewards: Moments, config: AlgorithmConfig) -> Floats:
    """R - mean of the group, over the deviation (n - 1) of all rewards of the global batch. [num_sequences]"""
    with np.errstate(over="ignore"):
        return _finite(centred / (rewards.deviation("sample") + config.advantage_eps))


def max_rl_advantages(rewards: Floats, means: Floats) -> Floats:
    """MaxRL: rewards over the group's mean reward, which weighs hard prompts by 1 / p (arXiv 2602.02710, algorithm 1).

        A = (R - mean) / mean,   0 where no rollout of the group was rewarded

    With rewards of 0 and 1 this advantage estimates the gradient of log p(right), the likelihood, truncated at an order that
    the group size sets; RLOO estimates the gradient of p. Rewards between 0 and 1 are allowed and count as shares; negative
    rewards have no likelihood and are refused.

    One advantage per sequence, from its reward and its whole group's mean reward. [num_sequences] each

    Raises:
        InvalidRequestError: a reward is below 0 or above 1.
    """
    outside = (rewards < 0.0) | (rewards > 1.0) | (means < 0.0)
    if outside.any():
        raise InvalidRequestError(
            f"algorithm.advantage: max_rl needs rewards from 0 to 1, got {float(rewards[np.argmax(outside)]):g}: write another "
            "advantage, or a binary reward"
        )
    return np.divide(rewards - means, means, out=np.zeros_like(rewards), where=means > 0.0)


def pass_at_k_advantages(rewards: Floats, means: Floats, sizes: Floats, k: int, eps: float) -> Floats:
    """Pass@k training: the advantage of a rollout when k of them are scored together by their best (arXiv 2508.10751).

    Over all subsets of k of a group's N rollouts, W of them wrong, a subset's reward being 1 when any of it is right:

        mean   = 1 - C(W, k) / C(N, k)                              pass@k of the group
        std    = sqrt(mean (1 - mean))
        right    (1 - mean) / (std + eps)
        wrong    (1 - mean - C(W - 1, k - 1) / C(N - 1, k - 1)) / (std + eps)

    so the advantage of each rollout is the mean over the subsets with this rollout. k = 1 is GRPO with the population deviation.
    A group with fewer than k wrong rollouts has advantage 0: every subset passes.

    One advantage per sequence, from its reward and its whole group's mean reward and size. [num_sequences] each

    In a group smaller than k, because rollouts failed, k is the size of the group.

    Raises:
        InvalidRequestError: a reward is neither 0 nor 1.
    """
    right = np.rint(means * sizes)
    not_binary = (rewards != 0.0) & (rewards != 1.0) | (np.abs(means * sizes - right) > 1e-6)
    if not_binary.any():
        reward = float(rewards[np.argmax(not_binary)])
        raise InvalidRequestError(
            f"algorithm.advantage: pass_at_k needs rewards of 0 or 1, and a group has others (a reward of {reward:g}): "
            "write another advantage, or a binary reward"
        )
    pairs = zip(rewards.tolist(), right.tolist(), sizes.tolist(), strict=True)
    found = [
        _advantage(reward == 1.0, int(size) - int(num_right), int(size), k, eps) for reward, num_right, size in pairs
    ]
    return np.array(found, dtype=np.float64)


def _advantage(is_right: bool, wrong: int, size: int, k: int, eps: float) -> float:
    k = min(k, size)
    failing = comb(wrong, k) / comb(size, k)  # of all subsets
    failing_with_it = 0.0 if is_right else comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    std = float(np.sqrt(failing * (1.0 - failing)))
    return (failing - failing_with_it) / (std + eps)


# --- Computes advantages of tokens: discounted sums to the end of a sequence, GAE over a value model, and distillation.


def discounted_sums(values: torch.Tensor, sequence_index: torch.Tensor, factor: float) -> torch.Tensor:
    """Sum from each token to the end of its sequence, discounted by ``factor`` per step. [num_tokens] float64

    By doubling: after round k a token holds the sum over the next 2^k tokens, so n tokens take log2(n) rounds of one
    addition each.

    >>> discounted_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), 0.5).tolist()
    [2.0, 2.0, 4.0]
    """
    sums = values.double()
    reach, weight = 1, factor
    while reach < len(sums) and weight != 0.0:
        same = sequence_index[reach:] == sequence_index[:-reach]  # tokens of one sequence are neighbours
        ahead = torch.where(same, sums[reach:], torch.zeros_like(sums[reach:]))
        sums = torch.cat([sums[:-reach] + weight * ahead, sums[-reach:]])
        reach, weight = 2 * reach, weight * weight
    return sums


def at_last_token(per_token: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
    """``per_token`` at the last token of each sequence, the place of an outcome reward, and 0 elsewhere. [num_tokens]

    >>> at_last_token(torch.tensor([3.0, 3.0, 5.0]), torch.tensor([0, 0, 1])).tolist()
    [0.0, 3.0, 5.0]
    """
    return torch.where(_is_last(sequence_index), per_token, torch.zeros_like(per_token))


def gae(
    rewards: torch.Tensor, values: torch.Tensor, sequence_index: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of the trained tokens, before any whitening. [num_tokens] float64 each

    >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    >>> [t.tolist() for t in gae(rewards, values, torch.tensor([0, 0]), 1.0, 1.0)]
    [[0.5, 0.75], [1.0, 1.0]]
    """
    exact = values.double()
    following = torch.cat([exact[1:], exact.new_zeros(min(len(exact), 1))])
    following = torch.where(_is_last(sequence_index), torch.zeros_like(exact), following)
    errors = rewards.double() + gamma * following - exact
    advantages = discounted_sums(errors, sequence_index, gamma * gae_lambda)
    return advantages, advantages + exact


def _is_last(sequence_index: torch.Tensor) -> torch.Tensor:
    """Whether a token is the last trained one of its sequence. [num_tokens] bool"""
    last = torch.ones_like(sequence_index, dtype=torch.bool)
    last[:-1] = sequence_index[1:] != sequence_index[:-1]
    return last


def distillation_advantages(
    advantages: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    coefficient: float,
    task_coefficient: float,
) -> torch.Tensor:
    """Advantages with the teacher's term, bounded so that one token cannot dominate an update. All shapes [num_tokens]."""
    return task_coefficient * advantages + coefficient * clamped(teacher - student.detach())
