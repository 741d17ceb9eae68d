"""DPPO and IPO: a trust region in probability instead of in the ratio (arXiv 2602.04879; prime-rl's default loss).

    r = exp(l - b),   change = exp(l) - exp(b), a one-sample estimate of the total variation
    loss = -r A + behaviour_penalty (l - b)^2

    dppo  no first term where A > 0 and change > probability_high, or A < 0 and change < -probability_low
    ipo   no first term where |change| > probability_threshold, for both signs of A

A ratio of 2 changes the distribution little at probability .001, and much at .5: PPO's clip is tight for rare tokens and
loose for frequent ones. The penalty applies to every token, also without the first term. Trap: r has no bound.
"""

from __future__ import annotations

import torch

from services.common.config.training.losses import Dppo, Ipo
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
