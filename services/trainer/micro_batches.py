"""From packed numpy arrays to device tensors, and the same number of micro-batches on every rank.

Shared by the RL step and the supervised step. It knows nothing about losses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from services.trainer.attention import Documents
from services.trainer.drawn import Drawn, KeptBlocks
from services.trainer.model import PolicyModel
from services.trainer.packing import Document, MicroBatch, dummy_micro_batch, pack
from services.trainer.sharding import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroTensors:
    """A micro-batch on the device. Per-target tensors hold the trained tokens only."""

    token_ids: torch.Tensor  # [num_tokens]
    position_ids: torch.Tensor  # [num_tokens]
    documents: Documents
    target_positions: torch.Tensor  # [num_targets]
    behaviour: torch.Tensor  # [num_targets]
    advantages: torch.Tensor  # [num_targets]
    weight_versions: torch.Tensor  # [num_targets]
    mixed_cache: torch.Tensor  # [num_targets] bool
    sequence_index: torch.Tensor  # [num_targets] in [0, num_sequences)
    num_sequences: int
    is_dummy: bool
    drawn: Drawn | None = None  # None: every target from the whole vocabulary, at the recipe's temperature
    old_values: torch.Tensor | None = None  # [num_targets] of the value head at step start
    returns: torch.Tensor | None = None  # [num_targets] that the value head is fitted to
    teacher: torch.Tensor | None = None  # [num_targets] log-probabilities of the model that is distilled

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        return len(self.target_positions)

    @classmethod
    def from_packed(cls, batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> MicroTensors:
        targets = batch.target_positions
        return cls(
            token_ids=torch.as_tensor(batch.token_ids, device=device),
            position_ids=torch.as_tensor(batch.position_ids, device=device),
            documents=Documents.from_offsets(batch.offsets, device),
            target_positions=torch.as_tensor(targets, device=device),
            behaviour=torch.as_tensor(batch.behaviour[targets], dtype=dtype, device=device),
            advantages=torch.as_tensor(batch.advantages[targets], dtype=dtype, device=device),
            weight_versions=torch.as_tensor(batch.weight_versions[targets], device=device),
            mixed_cache=torch.as_tensor(batch.mixed_cache[targets], device=device),
            sequence_index=torch.as_tensor(batch.document_index[targets], device=device),
            num_sequences=batch.num_documents,
            is_dummy=batch.is_dummy,
            drawn=_drawn(batch, device, dtype),
            teacher=None
            if batch.teacher is None
            else torch.as_tensor(batch.teacher[targets], dtype=dtype, device=device),
        )


def _drawn(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Drawn | None:
    kept = temperatures = None
    if batch.kept is not None:
        kept = KeptBlocks.on(batch.kept.select(batch.loss_mask), device)
    if batch.temperatures is not None:
        temperatures = torch.as_tensor(batch.temperatures[batch.loss_mask], dtype=dtype, device=device)
    return None if kept is None and temperatures is None else Drawn(kept=kept, temperatures=temperatures)


def logprob_dtype(model: PolicyModel) -> torch.dtype:
    """The type of log-probabilities and everything compared with them: float64 for float64 models, else float32."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


def pack_for_ranks(
    minibatches: Seq[Seq[Document]], max_tokens: int, ranks: Ranks, dtype: torch.dtype
) -> list[list[MicroTensors]]:
    """Pack each minibatch; ranks with fewer micro-batches get dummies, so that every forward pass has its peers."""
    packed = [pack(documents, max_tokens) for documents in minibatches]
    counts = ranks.max(torch.tensor([len(p) for p in packed], dtype=torch.int64, device=ranks.device)).tolist()
    for micro_batches, count in zip(packed, counts, strict=True):
        micro_batches.extend(dummy_micro_batch() for _ in range(count - len(micro_batches)))
    return [[MicroTensors.from_packed(m, ranks.device, dtype) for m in micro_batches] for micro_batches in packed]


def forward(model: PolicyModel, batch: MicroTensors, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) of the trained tokens. [num_targets] each"""
    logprobs, entropy, _ = forward_with_values(model, batch, temperature)
    return logprobs, entropy


def forward_with_values(
    model: PolicyModel, batch: MicroTensors, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log-probabilities, entropies, values) of the trained tokens; None without a value head. [num_targets] each"""
    logprobs, entropy, *values = model(
        batch.token_ids, batch.position_ids, batch.documents, batch.target_positions, temperature, batch.drawn
    )
    return logprobs, entropy, values[0] if values else None
