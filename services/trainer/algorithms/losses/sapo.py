"""SAPO: a soft gate on the ratio instead of a clip (arXiv 2511.20347).

    r = exp(l - b), of a token or, with sapo_level: sequence, of the mean over its sequence (A then too is a mean)
     tau = sapo_tau_positive where A > 0, else sapo_tau_negative
    loss = -(4 / tau) sigmoid(tau (r - 1)) A

The gradient is that of -w A l with w = r sech^2(tau (r - 1) / 2): the plain policy gradient at r = 1, fading smoothly to both
sides instead of a hard clip, faster for a larger tau. Negative advantages get the larger tau, because they raise all other
tokens of the vocabulary. Trap: the loss is not 0 at r = 1 but -2 A / tau; only its gradient has a meaning.
"""

from __future__ import annotations

import torch

from services.common.config.training.losses import Sapo
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked, sequence_means

FADED_BELOW = 0.5  # share of the gradient at r = 1 below which a token counts as clipped


def sapo(tokens: TokenBatch, config: Sapo) -> PolicyLoss:
    """The SAPO loss. All shapes [num_tokens]."""
    d, advantages = tokens.logprobs - tokens.behaviour, tokens.advantages
    if config.sapo_level == "sequence":
        axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        d = sequence_means(d, *axes)[tokens.sequence_index]
        advantages = sequence_means(advantages, *axes)[tokens.sequence_index]
    ratio = d.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()
    positive = advantages > 0
    # Not torch.where of two numbers: its result is float32 before any conversion.
    tau = torch.full_like(ratio, config.sapo_tau_negative).masked_fill(positive, config.sapo_tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    faded = 4.0 * gate.detach() * (1.0 - gate.detach()) < FADED_BELOW
    return PolicyLoss(
        per_token=masked(-(4.0 / tau) * gate * advantages, tokens.mask),
        counts={"faded_tokens": (tokens.mask & faded).sum()},
    )
