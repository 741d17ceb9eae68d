"""Statistics of a whole minibatch, over all micro-batches and ranks, that a loss needs before its first gradient.

    tokens that are kept (rejection, m2po_mask) -> denominators -> M2PO's trust region, mean weight

Computed over the minibatch, so that the gradient depends neither on packing nor on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from services.common.config.training.algorithm import AlgorithmConfig
from services.common.config.training.losses import M2po, M2poMask, Tis
from services.common.records.types import MinibatchTotals
from services.trainer.algorithms import Algorithm
from services.trainer.algorithms.base import TokenBatch, TrustRegion, log_ratio, sequence_lengths
from services.trainer.algorithms.losses.importance import importance_weights, truncated, weight_sum
from services.trainer.algorithms.losses.m2po import binding_second_moments, trust_region
from services.trainer.algorithms.masks.m2po_mask import gap_second_moments, keep_limit, kept_tokens
from services.trainer.algorithms.masks.rejection import kept_by
from services.trainer.ranks.sharding import Ranks
from services.trainer.step.micro_batches import MicroTensors

Logprobs = Seq[torch.Tensor]  # one [num_targets] per micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchContext:
    """Statistics of one minibatch, the same on every rank but for ``masks`` and ``counted``: those of this rank's micro-batches."""

    totals: MinibatchTotals  # the denominators
    masks: Seq[torch.Tensor]  # the tokens that the loss sees, one [num_targets] bool per micro-batch
    counted: Seq[torch.Tensor]  # those that count in a sequence's length
    num_kept: int  # tokens that the loss sees, over all ranks
    region: TrustRegion | None = None
    mean_weight: torch.Tensor | None = None  # []

    def tokens(
        self, index: int, batch: MicroTensors, logprobs: torch.Tensor, proximal: torch.Tensor | None
    ) -> TokenBatch:
        """The loss's input for the micro-batch ``index``."""
        return TokenBatch(
            logprobs=logprobs,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            mask=self.masks[index],
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            proximal=proximal,
            trust_region=self.region,
            mean_weight=self.mean_weight,
        )


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
    """Compute the context, by collectives if the settings ask for them.

    ``current`` and ``proximal`` are present if the algorithm needs them.
    """
    everything = [torch.ones_like(m.sequence_index, dtype=torch.bool) for m in micro_batches]
    masks: Seq[torch.Tensor] = everything
    counted, num_kept = everything, totals.num_trained_tokens
    if config.rejection:
        assert proximal is not None
        masks = [
            kept_by(config.rejection, p, m.behaviour, mask, m.sequence_index, m.num_sequences, config.log_ratio_clamp)
            for m, p, mask in zip(micro_batches, proximal, masks, strict=True)
        ]
    if isinstance(config, M2poMask):
        assert proximal is not None
        trios = list(zip(micro_batches, proximal, masks, strict=True))
        gaps = [gap_second_moments(m.behaviour, p, mask) for m, p, mask in trios]
        limit = keep_limit(ranks.gather(torch.cat(gaps)), config.m2po_threshold)
        masks = [kept_tokens(m.behaviour, p, mask, limit) for m, p, mask in trios]
    if masks is not everything:
        num_kept, num_sequences = _kept(micro_batches, masks, ranks)
        if isinstance(config, M2poMask) or config.rejection_denominator == "kept":
            counted = list(masks)
            totals = replace(totals, num_trained_tokens=num_kept)
        if config.rejection and config.rejection_denominator == "kept":
            totals = replace(totals, num_sequences=num_sequences)
    context = MinibatchContext(totals=totals, masks=masks, counted=counted, num_kept=num_kept)
    if algorithm.needs_trust_region:
        assert current is not None and isinstance(config, M2po)
        moments = [
            binding_second_moments(log_ratio(logprobs, m.behaviour, config.log_ratio_clamp), m.advantages, mask)
            for m, logprobs, mask in zip(micro_batches, current, masks, strict=True)
        ]
        context = replace(context, region=trust_region(ranks.gather(torch.cat(moments)), config))
    if isinstance(config, Tis) and config.importance_normalize:
        assert proximal is not None
        context = replace(context, mean_weight=_mean_weight(context, config, micro_batches, proximal, ranks))
    return context


def _kept(micro_batches: Seq[MicroTensors], masks: Seq[torch.Tensor], ranks: Ranks) -> tuple[int, int]:
    """Numbers of kept tokens, and of sequences with at least one kept token, over all ranks."""
    found = torch.zeros(2, dtype=torch.int64, device=ranks.device)
    for m, mask in zip(micro_batches, masks, strict=True):
        lengths = sequence_lengths(mask, m.sequence_index, m.num_sequences)
        found += torch.stack([lengths.sum(), (lengths > 0).sum()])
    tokens, sequences = ranks.sum(found).tolist()
    return int(tokens), int(sequences)


def _mean_weight(
    context: MinibatchContext, config: Tis, micro_batches: Seq[MicroTensors], proximal: Logprobs, ranks: Ranks
) -> torch.Tensor:
    """Mean of the truncated weights over tokens, or over sequences for weights of sequences. []"""
    level, clamp = config.importance_level, config.log_ratio_clamp
    found = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for index, (m, p) in enumerate(zip(micro_batches, proximal, strict=True)):
        tokens = context.tokens(index, m, p, p)
        weights = truncated(importance_weights(p, m.behaviour, tokens, level, clamp), config)
        found += weight_sum(weights, tokens, level)
    total, count = ranks.sum(found).unbind()
    return (total / count.clamp(min=1.0)).to(proximal[0].dtype)
