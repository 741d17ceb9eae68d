"""TIS: truncated importance sampling of the gap between engine and trainer.

    loss = min(exp(p - b), importance_cap) * clipped_surrogate(l against p),   no gradient through the weight

p is recomputed by the trainer at step start. Source: "Your efficient RL framework secretly brings you off-policy RL
training" (Yao et al., 2025). Trap: with stale data exp(p - b) also carries the policy's own movement.
"""

from __future__ import annotations

from services.common.config.losses import Tis
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, log_ratio, masked
from services.trainer.algorithms.ppo_clip import clipped_surrogate


def tis(tokens: TokenBatch, config: Tis) -> PolicyLoss:
    """All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    weight = log_ratio(proximal, tokens.behaviour, config.log_ratio_clamp).exp()
    truncated = tokens.mask & (weight > config.importance_cap)
    return PolicyLoss(
        per_token=masked(weight.clamp(max=config.importance_cap) * surrogate.per_token, tokens.mask),
        counts=surrogate.counts | {"truncated_tokens": truncated.sum()},
    )
