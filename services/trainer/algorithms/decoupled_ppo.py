"""Decoupled PPO: clip against the proximal policy, weigh by how far that is from the behaviour policy.

    loss = w * clipped_surrogate(l against p),   w = exp(p - b), no gradient
    tokens with w > importance_cap are dropped: zero loss, still in the denominator

p is recomputed by the trainer at step start. Source: arXiv 2110.00641 and AReaL (arXiv 2505.24298).
Trap: the cap drops; truncating at the cap instead is ``tis``.
"""

from __future__ import annotations

import torch

from services.common.config.losses import DecoupledPpo, M2poMask
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, log_ratio, masked
from services.trainer.algorithms.ppo_clip import clipped_surrogate


def decoupled_ppo(tokens: TokenBatch, config: DecoupledPpo | M2poMask) -> PolicyLoss:
    """All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    weight = log_ratio(proximal, tokens.behaviour, config.log_ratio_clamp).exp()
    dropped = weight > config.importance_cap
    weight = torch.where(dropped, torch.zeros_like(weight), weight)
    return PolicyLoss(
        per_token=masked(weight * surrogate.per_token, tokens.mask),
        counts=surrogate.counts | {"dropped_tokens": (tokens.mask & dropped).sum()},
        left_out=dropped,
    )
