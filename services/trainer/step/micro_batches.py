"""Converts packed numpy arrays into device tensors, with the same number of micro-batches on every rank.

Used by the RL step and the supervised step, independent of losses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from services.trainer.data.packing import Document, MicroBatch, dummy_micro_batch, pack
from services.trainer.model.documents import Documents, Targets
from services.trainer.model.drawn import Drawn, KeptBlocks
from services.trainer.model.policy_model import PolicyModel, Scorer
from services.trainer.ranks.sharding import Ranks


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
        def floats(numbers: npt.NDArray[Any]) -> torch.Tensor:
            return torch.as_tensor(numbers, dtype=dtype, device=device)

        drawn = _drawn(batch, device, dtype)
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


def _drawn(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Drawn | None:
    kept = temperatures = None
    if batch.kept is not None:
        kept = KeptBlocks.on(batch.kept, device)
    if batch.temperatures is not None:
        temperatures = torch.as_tensor(batch.temperatures, dtype=dtype, device=device)
    return None if kept is None and temperatures is None else Drawn(kept=kept, temperatures=temperatures)


def logprob_dtype(model: PolicyModel) -> torch.dtype:
    """The type of log-probabilities and of all values compared with them: float64 for float64 models, else float32."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


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
