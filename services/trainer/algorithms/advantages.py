"""From rewards and stamped group statistics to one advantage per sequence. numpy, float64.

    grpo       (R - mean) / (std + eps)
    dr_grpo    R - mean                       (arXiv 2503.20783: no std; use with a constant denominator)
    rloo       (R - mean) * N / (N - 1)       (equals R minus the mean of the others; 0 for a singleton)
    reinforce  R

A group whose rewards differ by no more than rounding has advantage 0 exactly, in all but ``reinforce``: .1, .1, .1 have a
mean of .10000000000000002, which a division by their std would turn into -.8.

R is the reward after all shaping, clip((R + bias) * scale) included; mean, std (N - 1; 1 for a singleton) and N were
stamped over the R of the *whole* advantage group when it completed, because minibatches and ranks may cut groups. Every
trained token of a sequence gets the sequence's advantage (outcome reward: GAE with gamma = lambda = 1 and no values).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from services.common.config.algorithm import AlgorithmConfig
from services.common.types import TrainingSequence

Floats = npt.NDArray[np.float64]

EQUAL = 1e-12  # deviation of a group, relative to its mean, that is rounding


def sequence_advantages(sequences: Seq[TrainingSequence], config: AlgorithmConfig) -> Floats:
    """One advantage per sequence, before any batch normalisation. [num_sequences]"""
    rewards = np.array([s.sequence.reward for s in sequences], dtype=np.float64)
    if config.advantage == "reinforce":
        return rewards
    means = np.array([s.group_mean for s in sequences], dtype=np.float64)
    deviations = np.array([s.group_std for s in sequences], dtype=np.float64)
    centred = rewards - means
    centred[deviations <= EQUAL * np.abs(means)] = 0.0
    if config.advantage == "dr_grpo":
        return centred
    size = np.array([s.group_size for s in sequences], dtype=np.float64)
    if config.advantage == "rloo":
        return centred * size / np.maximum(size - 1.0, 1.0)
    return centred / (deviations + config.advantage_eps)


def weighted_moments(advantages: Floats, num_trained_tokens: Floats) -> tuple[float, float, float]:
    """(tokens, sum, sum of squares) over trained tokens: what ranks add up to normalise over the global batch."""
    return (
        float(num_trained_tokens.sum()),
        float((advantages * num_trained_tokens).sum()),
        float((advantages**2 * num_trained_tokens).sum()),
    )


def normalize(advantages: Floats, tokens: float, total: float, total_squares: float, eps: float) -> Floats:
    """(A - mean) / (std + eps) with the moments of the global batch (population std). [num_sequences]"""
    if tokens == 0:
        return advantages
    mean = total / tokens
    variance = max(total_squares / tokens - mean**2, 0.0)
    return (advantages - mean) / (np.sqrt(variance) + eps)
