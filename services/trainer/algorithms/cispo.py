"""CISPO: weigh by the truncated ratio, let every token keep its gradient (MiniMax-M1, arXiv 2506.13585).

    loss = -min(exp(l - b), importance_cap) * A * l,   no gradient through the weight

A clipped token still teaches, with a bounded weight. Trap: there is no lower bound; small ratios fade by themselves.
"""

from __future__ import annotations

from services.common.config.losses import Cispo
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, log_ratio, masked


def cispo(tokens: TokenBatch, config: Cispo) -> PolicyLoss:
    """All shapes [num_tokens]."""
    weight = log_ratio(tokens.logprobs, tokens.behaviour, config.log_ratio_clamp).exp().detach()
    truncated = tokens.mask & (weight > config.importance_cap)
    loss = -weight.clamp(max=config.importance_cap) * tokens.advantages * tokens.logprobs
    return PolicyLoss(per_token=masked(loss, tokens.mask), counts={"truncated_tokens": truncated.sum()})
