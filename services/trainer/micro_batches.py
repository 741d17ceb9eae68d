"""Checks a rank's share of a batch, and gives its micro-batches as device tensors with the statistics that a loss needs.

The orchestrator checks records when they arrive, but may not know the vocabulary of a model on another machine yet. The
check here finds unknown ids before an embedding looks them up. A fault on one rank raises on every rank.

Every rank has the same number of micro-batches. The RL step and the supervised step use the tensors; a loss needs the
statistics, over all micro-batches and ranks, before its first gradient:

    tokens that are kept (rejection, m2po_mask) -> denominators -> M2PO's trust region, mean weight

Computed over the minibatch, so that the gradient depends neither on packing nor on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from services.common.config.algorithm import AlgorithmConfig, M2po, M2poMask, Tis
from services.common.errors import InvalidRequestError
from services.common.records import MinibatchTotals, RankBatch, TrainingSequence
from services.trainer.losses import (
    Algorithm,
    TokenBatch,
    TrustRegion,
    binding_second_moments,
    clamped,
    gap_second_moments,
    importance_weights,
    keep_limit,
    kept_by,
    kept_tokens,
    sequence_lengths,
    truncated,
    trust_region,
    weight_sum,
)
from services.trainer.model.attention import Documents
from services.trainer.model.logprobs import Drawn, KeptBlocks, Targets
from services.trainer.model.policy_model import PolicyModel, Scorer
from services.trainer.packing import Document, MicroBatch, dummy_micro_batch, pack
from services.trainer.ranks import Ranks

Logprobs = Seq[torch.Tensor]  # one [num_targets] per micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroTensors:
    """A micro-batch on the device. Per-target tensors hold the trained tokens only."""

    token_ids: torch.Tensor  # [num_tokens]
    position_ids: torch.Tensor  # [num_tokens]
    documents: Documents
    targets: Targets
    behaviour: torch.Tensor  # [num_targets]
    advantages: torch.Tensor  # [num_targets]
    weight_versions: torch.Tensor  # [num_targets]
    mixed_cache: torch.Tensor  # [num_targets] bool
    sequence_index: torch.Tensor  # [num_targets] in [0, num_sequences)
    num_sequences: int
    is_dummy: bool
    num_given_tokens: int  # of the sequences, tokens that several begin with counted for each
    drawn: Drawn | None = None  # None: every target from the whole vocabulary, at the recipe's temperature
    old_values: torch.Tensor | None = None  # [num_targets] of the value head at step start
    returns: torch.Tensor | None = None  # [num_targets] that the value head is fitted to
    teacher: torch.Tensor | None = None  # [num_targets] log-probabilities of the model that is distilled

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the forward pass."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        return self.targets.num_targets

    @classmethod
    def from_packed(cls, batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> MicroTensors:
        floats: Any = partial(torch.as_tensor, dtype=dtype, device=device)
        kept = None if batch.kept is None else KeptBlocks.on(batch.kept, device)
        temperatures = None if batch.temperatures is None else floats(batch.temperatures)
        has_own = kept is not None or temperatures is not None
        drawn = Drawn(kept=kept, temperatures=temperatures) if has_own else None
        return cls(
            token_ids=torch.as_tensor(batch.token_ids, device=device),
            position_ids=torch.as_tensor(batch.position_ids, device=device),
            documents=Documents(batch.branches, device),
            targets=Targets.of(batch.predecessors, batch.target_ids, device, distinct=drawn is None),
            behaviour=floats(batch.behaviour),
            advantages=floats(batch.advantages),
            weight_versions=torch.as_tensor(batch.weight_versions, device=device),
            mixed_cache=torch.as_tensor(batch.mixed_cache, device=device),
            sequence_index=torch.as_tensor(batch.document_index, device=device),
            num_sequences=batch.num_documents,
            is_dummy=batch.is_dummy,
            num_given_tokens=batch.num_given_tokens,
            drawn=drawn,
            teacher=None if batch.teacher is None else floats(batch.teacher),
        )


def logprob_dtype(model: PolicyModel) -> torch.dtype:
    """The type of log-probabilities and of all values compared with them: float64 for float64 models, else float32."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


def check_batch(batch: RankBatch, ranks: Ranks, vocab_size: int) -> None:
    """Check this rank's share. A collective: every rank calls this function, and all raise when one does.

    Raises:
        InvalidRequestError: the model cannot read a sequence, or the denominators are not the sums of the shares, which
            would silently scale the gradient. The metadata names the first such ``sequence_id``.
    """
    faults = [(item.sequence_id, fault) for item in batch.sequences if (fault := _fault(item, batch, vocab_size))]
    counted = [[0, 0] for _ in batch.minibatches] + [[len(faults), 0]]
    for item in batch.sequences:
        if 0 <= item.minibatch < len(batch.minibatches):
            counted[item.minibatch][0] += 1
            counted[item.minibatch][1] += item.sequence.num_trained_tokens
    *found, (num_faults, _) = ranks.sum(torch.tensor(counted, dtype=torch.int64, device=ranks.device)).tolist()
    if faults:
        sequence_id, fault = faults[0]
        raise InvalidRequestError(
            f"sequence {sequence_id} of batch {batch.training_step} of policy {batch.policy} cannot be trained: {fault} "
            f"({len(faults)} such sequences on this rank). `rollmill journal RUN` shows its record",
            sequence_id=sequence_id,
            policy=batch.policy,
            training_step=str(batch.training_step),
        )
    if num_faults:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: other ranks hold {num_faults} sequences that cannot be "
            "trained; their logs name them",
            policy=batch.policy,
            training_step=str(batch.training_step),
        )
    stated = [[t.num_sequences, t.num_trained_tokens] for t in batch.minibatches]
    if found != stated:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: headers state (sequences, trained tokens) "
            f"{stated} per minibatch, the ranks hold {found}"
        )


def _fault(item: TrainingSequence, batch: RankBatch, vocab_size: int) -> str:
    """The reason why a sequence cannot be trained; empty when there is none."""
    if not 0 <= item.minibatch < len(batch.minibatches):
        return f"its minibatch is {item.minibatch}, but the batch has {len(batch.minibatches)}"
    token_ids = item.sequence.token_ids
    unknown = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(unknown):
        return (
            f"it has the token id {unknown[0]}, and the model of {batch.policy} has ids 0 to {vocab_size - 1}: a replica "
            "has another model or tokenizer"
        )
    return ""


def check_taught(sequence_id: str, document: Document, config: AlgorithmConfig) -> None:
    """Refuse a sequence without the teacher's scores, which would silently be trained on the task alone.

    Raises:
        InvalidRequestError: the teacher did not score the sequence.
    """
    asked = config.distillation is not None and config.distillation.teacher is not None
    if asked and document.teacher is None and document.num_trained_tokens:
        raise InvalidRequestError(f"sequence {sequence_id} lacks the log-probabilities of the teacher")


def pack_for_ranks(
    minibatches: Seq[Seq[Document]], max_tokens: int, ranks: Ranks, dtype: torch.dtype
) -> list[list[MicroTensors]]:
    """Pack each minibatch. Ranks with fewer micro-batches get dummies, so that all ranks join each forward pass."""
    packed = [pack(documents, max_tokens) for documents in minibatches]
    counts = ranks.max(torch.tensor([len(p) for p in packed], dtype=torch.int64, device=ranks.device)).tolist()
    for micro_batches, count in zip(packed, counts, strict=True):
        micro_batches.extend(dummy_micro_batch() for _ in range(count - len(micro_batches)))
    return [[MicroTensors.from_packed(m, ranks.device, dtype) for m in micro_batches] for micro_batches in packed]


def forward(model: Scorer, batch: MicroTensors, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) of the trained tokens. [num_targets] each"""
    logprobs, entropy, _ = forward_with_values(model, batch, temperature)
    return logprobs, entropy


def forward_with_values(
    model: Scorer, batch: MicroTensors, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log-probabilities, entropies, values) of the trained tokens; None without a value head. [num_targets] each"""
    logprobs, entropy, *values = model(
        batch.token_ids, batch.position_ids, batch.documents, batch.targets, temperature, batch.drawn
    )
    return logprobs, entropy, values[0] if values else None


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
            kept_by(config.rejection, p, m.behaviour, mask, m.sequence_index, m.num_sequences)
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
            binding_second_moments(clamped(logprobs - m.behaviour), m.advantages, mask)
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
    level = config.importance_level
    found = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for index, (m, p) in enumerate(zip(micro_batches, proximal, strict=True)):
        tokens = context.tokens(index, m, p, p)
        weights = truncated(importance_weights(p, m.behaviour, tokens, level), config)
        found += weight_sum(weights, tokens, level)
    total, count = ranks.sum(found).unbind()
    return (total / count.clamp(min=1.0)).to(proximal[0].dtype)
