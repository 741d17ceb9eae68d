"""REINFORCE: loss = -A l.

With ``advantage: reinforce`` and ``batch_normalize_advantages`` this is the core of REINFORCE++ (arXiv 2501.03262).
Trap: it takes the data for on-policy; nothing corrects or bounds what stale tokens do.
"""

from __future__ import annotations

from services.common.config.losses import Reinforce
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, masked


def reinforce(tokens: TokenBatch, config: Reinforce) -> PolicyLoss:
    """All shapes [num_tokens]."""
    return PolicyLoss(per_token=masked(-tokens.advantages * tokens.logprobs, tokens.mask))
