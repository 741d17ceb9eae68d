"""PPO's clipped surrogate, with clip-higher and dual clip. ``grpo`` is this loss over group advantages.

    r = exp(l - b)
    loss = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_higher) A)
    dual clip: where A < 0, loss = min(loss, -c_clip A)

Sources: PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729), clip-higher (DAPO, arXiv 2503.14476), GRPO (arXiv
2402.03300). Traps: dual clip affects only negative advantages; with A > 0 the loss has an upper bound anyway.
"""

from __future__ import annotations

import torch

from services.common.config.training.losses import ClipSettings
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, log_ratio, masked


def ppo_clip(tokens: TokenBatch, config: ClipSettings) -> PolicyLoss:
    """Clip against the behaviour policy. All shapes [num_tokens]."""
    return clipped_surrogate(tokens, tokens.behaviour, config)


def clipped_surrogate(tokens: TokenBatch, old: torch.Tensor, config: ClipSettings) -> PolicyLoss:
    """The surrogate against any ``old`` log-probabilities (behaviour or proximal). All shapes [num_tokens]."""
    ratio = log_ratio(tokens.logprobs, old, config.log_ratio_clamp).exp()
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1.0 - config.eps_clip, 1.0 + config.upper_clip) * tokens.advantages
    loss = torch.maximum(plain, clipped)
    counts = {"clipped_tokens": (tokens.mask & (clipped > plain)).sum()}
    if config.c_clip is not None:
        ceiling = -config.c_clip * tokens.advantages
        over = (tokens.advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        counts["dual_clipped_tokens"] = (tokens.mask & over).sum()
    return PolicyLoss(per_token=masked(loss, tokens.mask), counts=counts)
