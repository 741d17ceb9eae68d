"""Decoupled PPO: clip against the proximal policy, weigh by how far that is from the behaviour policy.

    loss = w * clipped_surrogate(l against p),   w = exp(p - b) of a token or of its sequence, no gradient
    tokens with w outside [importance_floor, importance_cap] are dropped: zero loss, still in the denominator

p is recomputed by the trainer at step start. Source: arXiv 2110.00641 and AReaL (arXiv 2505.24298). With both bounds it is
IcePop (arXiv 2510.18855), with ``importance_level: sequence`` masked importance sampling of sequences ("When speed kills stability",
Liu, Li et al., 2025), with ``none`` PPO against the proximal policy. Trap: the bounds drop; truncating at them is ``tis``.
"""

from __future__ import annotations

from services.common.config.losses import DecoupledPpo, M2poMask
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked
from services.trainer.algorithms.importance import importance_weights, outside
from services.trainer.algorithms.ppo_clip import clipped_surrogate


def decoupled_ppo(tokens: TokenBatch, config: DecoupledPpo | M2poMask) -> PolicyLoss:
    """All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    weights = importance_weights(proximal, tokens.behaviour, tokens, config.importance_level, config.log_ratio_clamp)
    dropped = outside(weights, config)
    return PolicyLoss(
        per_token=masked(weights * surrogate.per_token, tokens.mask & ~dropped),
        counts=surrogate.counts | {"dropped_tokens": (tokens.mask & dropped).sum()},
        left_out=dropped,
    )
