"""CISPO: weigh by the truncated ratio, let every token keep its gradient (MiniMax-M1, arXiv 2506.13585).

    w = exp(l - b), of a token or of its sequence, within [importance_floor, importance_cap]
    loss = -w A l,   no gradient through the weight

A truncated token keeps its gradient, with a bounded weight. The paper has no lower bound: small ratios fade by themselves.
With ``importance_level: sequence`` this is REINFORCE with truncated importance sampling of whole sequences.
"""

from __future__ import annotations

from services.common.config.training.losses import Cispo
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked
from services.trainer.algorithms.losses.importance import importance_weights, outside, truncated


def cispo(tokens: TokenBatch, config: Cispo) -> PolicyLoss:
    """The CISPO loss. All shapes [num_tokens]."""
    weights = importance_weights(
        tokens.logprobs.detach(), tokens.behaviour, tokens, config.importance_level, config.log_ratio_clamp
    )
    loss = -truncated(weights, config) * tokens.advantages * tokens.logprobs
    count = (tokens.mask & outside(weights, config)).sum()
    return PolicyLoss(per_token=masked(loss, tokens.mask), counts={"truncated_tokens": count})
