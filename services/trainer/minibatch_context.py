"""What a loss must know about a whole minibatch, over all micro-batches and ranks, before its first gradient.

    kept tokens (m2po_mask) -> denominators -> M2PO's trust region

Taken over the minibatch, so that the gradient depends neither on packing nor on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.losses import M2po, M2poMask
from services.common.types import MinibatchTotals
from services.trainer.algorithms import Algorithm
from services.trainer.algorithms.base import TrustRegion, log_ratio
from services.trainer.algorithms.m2po import binding_second_moments, trust_region
from services.trainer.algorithms.m2po_mask import gap_second_moments, keep_limit, kept_tokens
from services.trainer.micro_batches import MicroTensors
from services.trainer.sharding import Ranks

Logprobs = Seq[torch.Tensor]  # one [num_targets] per micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchContext:
    """Statistics of one minibatch, the same on every rank but for ``masks``, which are of this rank's micro-batches."""

    totals: MinibatchTotals  # the denominators
    masks: Seq[torch.Tensor]  # the tokens that the loss sees, one [num_targets] bool per micro-batch
    region: TrustRegion | None = None


def minibatch_context(
    algorithm: Algorithm,
    config: AlgorithmConfig,
    micro_batches: Seq[MicroTensors],
    totals: MinibatchTotals,
    ranks: Ranks,
    *,
    current: Logprobs | None,
    proximal: Logprobs | None,
) -> MinibatchContext:
    """A collective where the algorithm asks for one. ``current`` and ``proximal`` are given where it needs them."""
    masks = [torch.ones_like(m.target_positions, dtype=torch.bool) for m in micro_batches]
    if algorithm.needs_keep_mask:
        assert proximal is not None and isinstance(config, M2poMask)
        trios = list(zip(micro_batches, proximal, masks, strict=True))
        gaps = [gap_second_moments(m.behaviour, p, mask) for m, p, mask in trios]
        limit = keep_limit(ranks.gather(torch.cat(gaps)), config.m2po_threshold)
        masks = [kept_tokens(m.behaviour, p, mask, limit) for m, p, mask in trios]
        kept = torch.tensor(sum(int(mask.sum()) for mask in masks), dtype=torch.int64, device=ranks.device)
        totals = replace(totals, num_trained_tokens=int(ranks.sum(kept)))
    region = None
    if algorithm.needs_trust_region:
        assert current is not None and isinstance(config, M2po)
        moments = [
            binding_second_moments(log_ratio(logprobs, m.behaviour, config.log_ratio_clamp), m.advantages, mask)
            for m, logprobs, mask in zip(micro_batches, current, masks, strict=True)
        ]
        region = trust_region(ranks.gather(torch.cat(moments)), config.m2po_threshold)
    return MinibatchContext(totals=totals, masks=masks, region=region)
