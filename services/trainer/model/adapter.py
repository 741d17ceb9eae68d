"""The adapter of the model being trained: initial values, digest of the base, and the base as a model of its own.

The base is frozen: it has no gradients, no moments and no master copy, and is no part of versions and checkpoints. All
functions work on sharded models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.common.config.training.adapter import AdapterConfig
from services.common.lora import adapter_off, adapter_weights, base_weights, initial_tensor, tensor_entry
from services.common.weights.snapshot import DigestAlgorithm, TensorEntry, version_digest
from services.trainer.ranks.sharding import HostGroup, Ranks, full, local_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup:
    """The adapter that a model gets when it is loaded."""

    config: AdapterConfig
    dtype: torch.dtype  # of the adapter; the base has its own
    seed: int  # of the initial values


@torch.no_grad()
def reset_adapter(causal_lm: Any, setup: AdapterSetup) -> None:
    """Set this rank's rows of the adapter to their initial values."""
    for name, weight in adapter_weights(causal_lm).items():
        rows, first = local_rows(weight)
        if len(rows):
            rows.copy_(initial_tensor(name, tuple(weight.shape), setup.seed)[first : first + len(rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The weights below an adapter: where they were read, and their digests."""

    path: str  # directory or hub name
    digest: str  # as of a version
    dtype: str
    tensors: dict[str, str]  # name -> digest


def digest_base(causal_lm: Any, ranks: Ranks, algorithm: DigestAlgorithm, path: str) -> Base:
    """Digest the base, which was read from ``path``, on the first rank, for all. A collective; the peak of extra memory is one tensor."""
    entries: list[TensorEntry] = []
    dtype = ""
    for name, weight in base_weights(causal_lm).items():
        dtype = str(weight.dtype).removeprefix("torch.")
        whole = full(weight)  # a collective
        if ranks.is_first:
            entries.append(tensor_entry(name, whole, algorithm))
    own = version_digest(entries) if ranks.is_first else ""
    digest = HostGroup(ranks).gather(own, "learning the digest of the adapter's base")[0]
    return Base(path=path, digest=digest, dtype=dtype, tensors={entry.name: entry.digest for entry in entries})


class WithoutAdapter:
    """A model as its base: the reference of a KL term, without weights of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        with adapter_off(self._model):
            scores: tuple[torch.Tensor, ...] = self._model(*arguments)
        return scores
