"""Measures the use of the device by a training step: floating-point operations, their share of the peak, memory.

Operations are those of one forward and one backward pass over the batch, counted as for "model FLOPs utilisation": 2 for
each weight of a matrix per token, the causal half of attention, twice as much backwards (as much for a frozen base, whose
weights have no gradient). Common beginnings of sequences
are computed once and count once. Recomputation (gradient checkpointing, the head's blocks) and further passes (proximal,
trust region, reference) do not count, so they lower the share.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks.sharding import Ranks
from services.trainer.step.metrics import Sums
from services.trainer.step.micro_batches import MicroTensors

_GIB = 1 << 30
_FORWARD_AND_BACKWARD = 3
_OF_A_FROZEN_BASE = 2
_SUM = "forward_flops"

# Dense peaks from the data sheets in 10^12/s: prefix of the device's name, bfloat16, float32 (not TF32).
# The first matching prefix counts, so the longer names come first.
PEAK_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("NVIDIA H100 PCIe", 756.0, 51.0),
    ("NVIDIA H100 NVL", 835.0, 60.0),
    ("NVIDIA H100", 989.0, 67.0),
    ("NVIDIA H200", 989.0, 67.0),
    ("NVIDIA A100", 312.0, 19.5),
    ("NVIDIA L40S", 362.0, 91.6),
    ("NVIDIA L4", 121.0, 30.3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """Operations of a forward pass of a dense decoder."""

    per_token: float  # the matrices of the layers
    per_target: float  # the head, which only trained tokens pass
    per_pair: float  # attention, for each token and each that it sees, itself included

    @classmethod
    def of(cls, model: PolicyModel) -> ForwardCost | None:
        """Count from the modules, sharded or not; None for experts, because a token uses only some of them."""
        weights = [parameter for layer in model.layers for parameter in layer.parameters()]
        if not weights or any(weight.ndim > 2 for weight in weights):
            return None
        config = model.causal_lm.config
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        head = model.causal_lm.get_output_embeddings().weight
        return cls(
            per_token=2.0 * sum(weight.numel() for weight in weights if weight.ndim == 2),
            per_target=2.0 * head.numel(),
            per_pair=4.0 * heads * head_dim * len(model.layers),
        )

    def flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> float:
        return self.per_token * num_tokens + self.per_target * num_targets + self.per_pair * num_pairs


def peak_flops(device: torch.device, dtype: torch.dtype, given_tflops: float | None) -> float | None:
    """The device's peak in operations per second: as given, else by its name; None for an unknown device."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(
        (
            (half if dtype != torch.float32 else full) * 1e12
            for start, half, full in PEAK_TFLOPS
            if name.startswith(start)
        ),
        None,
    )


class Usage:
    """Measures the use of the device in each training step."""

    def __init__(self, model: PolicyModel, ranks: Ranks, peak: float | None) -> None:
        self._cost = ForwardCost.of(model)
        self._passes = _FORWARD_AND_BACKWARD if model.adapter is None else _OF_A_FROZEN_BASE
        self._ranks = ranks
        self._peak = peak

    def begin(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._ranks.device)

    def add(self, batch: MicroTensors, sums: Sums) -> None:
        """Count one trained micro-batch; dummies do not count."""
        if self._cost is not None:
            flops = (
                0.0
                if batch.is_dummy
                else self._cost.flops(batch.num_tokens, batch.targets.num_distinct, batch.documents.num_pairs)
            )
            sums.add(_SUM, flops)

    def metrics(self, total: Mapping[str, float], seconds: float) -> dict[str, float | None]:
        """``tflops`` and ``mfu`` of one rank, and the largest ``memory_peak_gib`` of all ranks. A collective."""
        peak_bytes = torch.tensor(self._memory_bytes(), dtype=torch.int64, device=self._ranks.device)
        per_second = None
        if self._cost is not None:
            flops = self._passes * total.get(_SUM, 0.0)
            per_second = flops / self._ranks.world_size / max(seconds, 1e-9)
        return {
            "tflops": None if per_second is None else per_second / 1e12,
            "mfu": None if per_second is None or self._peak is None else per_second / self._peak,
            "memory_peak_gib": int(self._ranks.max(peak_bytes)) / _GIB,
        }

    def _memory_bytes(self) -> int:
        """Peak of tensors on the GPU during the step; on a CPU, the peak of resident memory since the process start."""
        if self._ranks.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._ranks.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
