"""DPPO and IPO: a trust region in probability instead of in the ratio (arXiv 2602.04879; prime-rl's default loss).

    r = exp(l - b),   change = exp(l) - exp(b), a one-sample estimate of the total variation
    loss = -r A + behaviour_penalty (l - b)^2

    dppo  the first term ends where A > 0 and change > probability_high, or A < 0 and change < -probability_low
    ipo   it ends where |change| > probability_threshold, whatever the sign of A

A ratio of 2 at probability .001 moves almost nothing, at .5 almost everything: the clip of PPO binds for rare tokens and is loose
for frequent ones. The penalty stays on every token, also where the first term has ended. Trap: there is no bound on r itself.
"""

from __future__ import annotations

import torch

from services.common.config.losses import Dppo, Ipo
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, log_ratio, masked


def dppo(tokens: TokenBatch, config: Dppo) -> PolicyLoss:
    """All shapes [num_tokens]."""
    change = _change(tokens)
    ended = torch.where(tokens.advantages > 0, change > config.probability_high, change < -config.probability_low)
    return _loss(tokens, ended, config)


def ipo(tokens: TokenBatch, config: Ipo) -> PolicyLoss:
    """All shapes [num_tokens]."""
    return _loss(tokens, _change(tokens).abs() > config.probability_threshold, config)


def _change(tokens: TokenBatch) -> torch.Tensor:
    return tokens.logprobs.detach().exp() - tokens.behaviour.exp()


def _loss(tokens: TokenBatch, ended: torch.Tensor, config: Dppo | Ipo) -> PolicyLoss:
    d = log_ratio(tokens.logprobs, tokens.behaviour, config.log_ratio_clamp)
    loss = config.behaviour_penalty * d.square() - masked(d.exp() * tokens.advantages, ~ended)
    return PolicyLoss(
        per_token=masked(loss, tokens.mask), counts={"ended_tokens": (tokens.mask & ended).sum()}, left_out=ended
    )
