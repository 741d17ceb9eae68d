"""TIS: truncated importance sampling of the gap between engine and trainer.

    w = exp(p - b), of a token or of its sequence, within [importance_floor, importance_cap]
    loss = w * clipped_surrogate(l against p),   no gradient through the weight

The trainer recomputes p at step start. ``importance_normalize`` divides w by its mean over the minibatch. Sources: "Your
efficient RL framework secretly brings you off-policy RL training" (Yao et al., 2025); sequence level: "When speed kills
stability" (Liu, Li et al., 2025). Trap: with stale data exp(p - b) also contains the change of the policy.
"""

from __future__ import annotations

from services.common.config.training.losses import Tis
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked
from services.trainer.algorithms.losses.importance import importance_weights, outside, truncated
from services.trainer.algorithms.losses.ppo_clip import clipped_surrogate


def tis(tokens: TokenBatch, config: Tis) -> PolicyLoss:
    """The TIS loss. All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    raw = importance_weights(proximal, tokens.behaviour, tokens, config.importance_level, config.log_ratio_clamp)
    weights = truncated(raw, config)
    if tokens.mean_weight is not None:
        weights = weights / tokens.mean_weight
    return PolicyLoss(
        per_token=masked(weights * surrogate.per_token, tokens.mask),
        counts=surrogate.counts | {"truncated_tokens": (tokens.mask & outside(raw, config)).sum()},
    )
