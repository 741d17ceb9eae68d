"""From per-token losses to one number, with the minibatch's *global* denominators.

    token_mean     sum over tokens / trained tokens of the minibatch
    sequence_mean  sum over sequences of their mean / sequences of the minibatch
    constant       sum over tokens / (sequences of the minibatch * constant_denominator)    (Dr. GRPO)
    sum            sum over tokens / constant_denominator

The result is this micro-batch's share: shares add up over micro-batches and ranks to the minibatch's loss. So the
gradient does not depend on packing or on ranks, and a rank without tokens contributes an exact zero.
"""

from __future__ import annotations

import torch

from services.common.config.algorithm import AlgorithmConfig
from services.common.types import MinibatchTotals
from services.trainer.algorithms.base import masked, sequence_lengths


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    sequence_index: torch.Tensor,
    num_sequences: int,
    totals: MinibatchTotals,
    config: AlgorithmConfig,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_tokens] -> []. Sums are over ``mask``, lengths of sequences over ``counted`` (the mask where it is not given); ``totals`` are
    of the whole minibatch, over all ranks."""
    values = masked(per_token, mask)
    if config.loss_aggregation == "token_mean":
        return values.sum() / max(totals.num_trained_tokens, 1)
    if config.loss_aggregation == "sequence_mean":
        lengths = (
            sequence_lengths(mask if counted is None else counted, sequence_index, num_sequences)
            .clamp(min=1)
            .to(values.dtype)
        )
        return (values / lengths[sequence_index]).sum() / max(totals.num_sequences, 1)
    assert config.constant_denominator is not None
    per = max(totals.num_sequences, 1) if config.loss_aggregation == "constant" else 1
    return values.sum() / (per * config.constant_denominator)
