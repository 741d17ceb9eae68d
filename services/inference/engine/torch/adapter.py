"""The tensors of a LoRA adapter beside a decoder's fused matrices, which stay those of the base.

Several engines of one process may compute on one base, each with its own adapter: nothing here writes into the model.
Independent of requests, caches and versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.common.errors import ModelMismatchError
from services.common.weights.manifest import PEFT_PREFIX, A, B


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in the type and on the device of its decoder; updates write into its tensors."""

    tensors: Mapping[str, torch.Tensor]  # by their names in PEFT's files
    scale: float

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        """A copy of its own."""
        tensors = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in self.tensors.items()}
        return Adapter(tensors=tensors, scale=self.scale)


@dataclass(frozen=True, slots=True)
class _Target:
    columns: slice  # of the fused output
    low: torch.Tensor  # [rank, inputs]
    high: torch.Tensor  # [outputs, rank]


class LowRank:
    """The adapters of the modules whose outputs lie side by side in one fused matrix."""

    def __init__(self, targets: Sequence[_Target], scale: float) -> None:
        self._targets = targets
        self._scale = scale

    @classmethod
    def of(cls, adapter: Adapter | None, modules: Sequence[tuple[str, torch.nn.Linear]]) -> LowRank:
        """``modules`` with their names, in the order of the fused matrix."""
        targets: list[_Target] = []
        begin = 0
        for name, module in modules:
            columns = slice(begin, begin + module.out_features)
            begin = columns.stop
            if adapter is not None and f"{PEFT_PREFIX}{name}.{A}" in adapter.tensors:
                low, high = (adapter.tensors[f"{PEFT_PREFIX}{name}.{factor}"] for factor in (A, B))
                targets.append(_Target(columns, low, high))
        return cls(targets, 0.0 if adapter is None else adapter.scale)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters' products to the output of the base, in place. [n, outputs], [n, inputs]"""
        for target in self._targets:
            out[:, target.columns].addmm_(F.linear(x, target.low), target.high.t(), alpha=self._scale)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """W + scale B A as a new matrix; the given one without adapters. [outputs, inputs]"""
        if not self._targets:
            return weight
        whole = weight.clone()
        for target in self._targets:
            whole[target.columns].addmm_(target.high, target.low, alpha=self._scale)
        return whole


def check_used(adapter: Adapter, modules: Sequence[str]) -> None:
    """Raise ``ModelMismatchError`` for a target outside the modules that the decoder computes."""
    known = {f"{PEFT_PREFIX}{name}.{factor}" for name in modules for factor in (A, B)}
    if unknown := sorted(adapter.tensors.keys() - known):
        raise ModelMismatchError(
            f"the torch engine cannot apply the adapter of {unknown[0].removeprefix(PEFT_PREFIX)}: it knows adapters of "
            "attention and MLP projections"
        )
