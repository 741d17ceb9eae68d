"""Decoupled PPO: clip against the proximal policy, weigh by the ratio of the proximal to the behaviour policy.

    loss = w * clipped_surrogate(l against p),   w = exp(p - b) of a token or of its sequence, no gradient
    tokens with w outside [importance_floor, importance_cap] are dropped: zero loss, still in the denominator

The trainer recomputes p at step start. Source: arXiv 2110.00641 and AReaL (arXiv 2505.24298). With both bounds this is
IcePop (arXiv 2510.18855), with ``importance_level: sequence`` masked importance sampling of sequences ("When speed kills
stability", Liu, Li et al., 2025), with ``none`` PPO against the proximal policy. Trap: the bounds drop tokens; ``tis``
truncates at them.
"""

from __future__ import annotations

from services.common.config.training.losses import DecoupledPpo, M2poMask
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked
from services.trainer.algorithms.losses.importance import importance_weights, outside
from services.trainer.algorithms.losses.ppo_clip import clipped_surrogate


def decoupled_ppo(tokens: TokenBatch, config: DecoupledPpo | M2poMask) -> PolicyLoss:
    """The decoupled PPO loss. All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    weights = importance_weights(proximal, tokens.behaviour, tokens, config.importance_level, config.log_ratio_clamp)
    dropped = outside(weights, config)
    return PolicyLoss(
        per_token=masked(weights * surrogate.per_token, tokens.mask & ~dropped),
        counts=surrogate.counts | {"dropped_tokens": (tokens.mask & dropped).sum()},
        left_out=dropped,
    )
