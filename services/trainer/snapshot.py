"""Writes the current weights into a snapshot file: cast from the master weights, tied weights once.

The only place where torch tensors become published bytes. The trainer blocks for the copy; serving is the publisher
process's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.models import named_weights
from services.common.weights.manifest import Manifest, TensorSpec
from services.common.weights.snapshot_file import DEFAULT_DIRECTORIES, SnapshotWriter
from services.trainer.model import PolicyModel
from services.trainer.sharding import Ranks, full_weights

# Integers of the same width: numpy has no bfloat16, and bits are what is published.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """A sealed snapshot file."""

    path: Path
    manifest: Manifest


def write_snapshot(
    model: PolicyModel,
    ranks: Ranks,
    *,
    run_id: str,
    policy: str,
    version: int,
    dtype: str,
    directories: Sequence[Path] = DEFAULT_DIRECTORIES,
) -> WrittenSnapshot | None:
    """A collective; None on ranks other than the first. ``SnapshotSpaceError`` when no directory has room."""
    kind: torch.dtype = getattr(torch, dtype)
    weights = full_weights(model.causal_lm, ranks, kind)
    if not ranks.is_first:
        for _ in weights:  # takes part in gathering
            pass
        return None
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))
        for name, tensor in named_weights(model.causal_lm).items()
    ]
    with SnapshotWriter.create(
        run_id=run_id, policy=policy, version=version, specs=specs, directories=directories
    ) as writer:
        entries = {entry.name: entry for entry in writer.tensors}
        for name, tensor in weights:
            assert tensor is not None
            bits = writer.bits(entries[name])
            bits[:] = tensor.contiguous().view(-1).view(_BITS[kind]).numpy().view(bits.dtype)
            del bits  # the map cannot be let go while a view on it lives
        return WrittenSnapshot(writer.path, writer.seal())
