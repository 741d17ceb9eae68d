"""Importance weights between two policies: per token, or one for all tokens of a sequence.

With d = new - old over the tokens that the loss sees:

    token          exp(d)
    sequence       exp(sum of d over the sequence): the product, unbiased and of large variance
    sequence_mean  exp(mean of d over the sequence): the geometric mean, biased and of small variance

Log ratios, sums and means are clamped before exp. Token weights: "Your efficient RL framework secretly brings you off-policy RL
training" (Yao et al., 2025); sequence weights: "When speed kills stability" (Liu, Li et al., 2025); the geometric mean as in
GSPO (arXiv 2507.18071).
"""

from __future__ import annotations

import torch

from services.common.config.training.losses import ImportanceLevel, ImportanceSettings
from services.trainer.algorithms.base import TokenBatch, masked, sequence_lengths, sequence_means


def importance_weights(
    new: torch.Tensor, old: torch.Tensor, tokens: TokenBatch, level: ImportanceLevel, clamp: float
) -> torch.Tensor:
    """new / old, not truncated; ones with ``level: none``. [num_tokens] each -> [num_tokens]"""
    if level == "none":
        return torch.ones_like(new)
    d = new - old
    if level != "token":
        axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        means = sequence_means(d, *axes)
        per_sequence = means if level == "sequence_mean" else means * sequence_lengths(*axes)
        d = per_sequence[tokens.sequence_index]
    return d.clamp(-clamp, clamp).exp()


def truncated(weights: torch.Tensor, settings: ImportanceSettings) -> torch.Tensor:
    """The weights within [importance_floor, importance_cap]. [num_tokens]"""
    return weights.clamp(settings.importance_floor, settings.importance_cap)


def outside(weights: torch.Tensor, settings: ImportanceSettings) -> torch.Tensor:
    """Mask of the weights below the floor or above the cap. [num_tokens] bool"""
    return (weights < settings.importance_floor) | (weights > settings.importance_cap)


def weight_sum(weights: torch.Tensor, tokens: TokenBatch, level: ImportanceLevel) -> torch.Tensor:
    """(sum, number) of the weights of tokens, or of sequences for ``level`` sequence. [2] float64

    These add up over micro-batches and ranks, to the mean that ``importance_normalize`` divides by.
    """
    if level == "token":
        values, count = masked(weights, tokens.mask), tokens.mask.sum()
    else:
        axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        values, count = sequence_means(weights, *axes), (sequence_lengths(*axes) > 0).sum()
    return torch.stack([values.sum(dtype=torch.float64), count.double()])
