"""REINFORCE: loss = -A l.

With ``advantage: reinforce`` and ``batch_normalize_advantages`` this is the core of REINFORCE++ (arXiv 2501.03262).
Trap: this loss assumes on-policy data, and neither corrects nor bounds the effect of stale tokens.
"""

from __future__ import annotations

from services.common.config.training.losses import Reinforce
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked


def reinforce(tokens: TokenBatch, config: Reinforce) -> PolicyLoss:
    """The REINFORCE loss. All shapes [num_tokens]."""
    return PolicyLoss(per_token=masked(-tokens.advantages * tokens.logprobs, tokens.mask))
