"""Rejection masks: remove tokens or sequences on which the trainer's policy and the engine's differ too much.

With x = p - b (proximal, at step start, against behaviour), per token:

    ratio       exp(x), kept within [lower, upper]
    k2          x^2 / 2, kept up to upper
    k3          exp(x) - 1 - x: KL(behaviour || proximal), unbiased on what the engine sampled
    k3_reverse  exp(-x) - 1 + x

At the level of a sequence, the criterion uses the sum, mean or maximum of log ratios or estimates over its tokens, and the
mask keeps or removes the whole sequence. A token must meet all criteria. Sources: IcePop (Ling team, arXiv 2510.18855), masked
importance sampling ("When speed kills stability", Liu, Li et al., 2025). Trap: with stale data x also contains the change of
the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from services.common.config.training.algorithm import RejectionConfig
from services.trainer.algorithms.base import masked, sequence_lengths

_CRITERIA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ratio": lambda x: x,  # compared in log space
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(x) - x,
    "k3_reverse": lambda x: torch.expm1(-x) + x,
}


def kept_by(
    criteria: Seq[RejectionConfig],
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    mask: torch.Tensor,
    sequence_index: torch.Tensor,
    num_sequences: int,
    clamp: float,
) -> torch.Tensor:
    """The loss mask without the rejected tokens. [num_tokens] each -> [num_tokens] bool"""
    x = (proximal - behaviour).clamp(-clamp, clamp)
    kept = mask
    for config in criteria:
        value = _CRITERIA[config.criterion](x)
        if config.level == "sequence":
            value = _reduced(value, mask, sequence_index, num_sequences, config.reduce)[sequence_index]
        lower, upper = config.bounds
        kept = kept & (value >= lower) & (value <= upper)
    return kept


def _reduced(
    values: torch.Tensor, mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int, how: str
) -> torch.Tensor:
    """Reduce values over the masked tokens of each sequence. [num_tokens] -> [num_sequences]"""
    if how == "max":
        lowest = torch.where(mask, values, values.new_full((), -torch.inf))
        start = values.new_full((num_sequences,), -torch.inf)
        return start.scatter_reduce(0, sequence_index, lowest, "amax")
    sums = values.new_zeros(num_sequences).index_add(0, sequence_index, masked(values, mask))
    return sums if how == "sum" else sums / sequence_lengths(mask, sequence_index, num_sequences).clamp(min=1)
