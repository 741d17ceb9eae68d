"""AReaL's variant of M2PO: drop the tokens that are furthest from the behaviour policy, then decoupled PPO.

    m = (b - p)^2 over all masked tokens, no sign test; drop the largest until the mean of the rest is < threshold.

The dropped tokens leave the loss mask *and* the denominator of a token mean (in ``m2po`` they stay in the denominator).
Computed over the minibatch, all micro-batches and ranks. Source: AReaL (public repository), after arXiv 2510.01161.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.losses.m2po import largest_kept


def gap_second_moments(behaviour: torch.Tensor, proximal: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """m over the masked tokens. [num_tokens] each -> [mask.sum()]"""
    return (behaviour - proximal)[mask].square()


def keep_limit(second_moments: torch.Tensor, threshold: float) -> torch.Tensor:
    """The largest m that stays in a whole minibatch; infinity when all stay. [n] -> []"""
    limit = largest_kept(second_moments, threshold)
    return second_moments.new_full((), float("inf")) if limit is None else limit


def kept_tokens(
    behaviour: torch.Tensor, proximal: torch.Tensor, mask: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """The loss mask without the dropped tokens. [num_tokens] each -> [num_tokens] bool"""
    return mask & ((behaviour - proximal).square() <= limit)
