"""GSPO: one ratio per sequence (arXiv 2507.18071).

    s = exp(mean over the sequence's masked tokens of (l - b)),   A = masked mean of its advantages
    loss = max(-s A, -clip(s, 1 - eps_clip, 1 + eps_clip_higher) A), the same number on each of its tokens

With ``loss_aggregation: sequence_mean`` this is the paper's objective; a token mean weighs long sequences more.
Traps: the paper's epsilons are about 3e-4, a thousandth of PPO's; a sequence must lie in one micro-batch (packing
never cuts one).
"""

from __future__ import annotations

import torch

from services.common.config.training.losses import Gspo
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked, sequence_means


def gspo(tokens: TokenBatch, config: Gspo) -> PolicyLoss:
    """The GSPO loss. [num_tokens] -> [num_tokens]; in between [num_sequences]."""
    axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
    mean_log_ratio = sequence_means(tokens.logprobs - tokens.behaviour, *axes)
    ratio = mean_log_ratio.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()  # [num_sequences]
    advantages = sequence_means(tokens.advantages, *axes)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.eps_clip, 1.0 + config.eps_clip_higher) * advantages
    is_clipped = (clipped > plain)[tokens.sequence_index]
    return PolicyLoss(
        per_token=masked(torch.maximum(plain, clipped)[tokens.sequence_index], tokens.mask),
        counts={"clipped_tokens": (tokens.mask & is_clipped).sum()},
    )
