"""What every policy loss takes and returns: flat tensors over tokens, one entry per token.

A loss is a pure function ``(TokenBatch, settings) -> PolicyLoss``. It knows nothing about models, packing,
ranks or denominators: it gives one number per token, and ``aggregation`` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegion:
    """M2PO's bounds on the log ratio. The clip's epsilons follow: 1 - exp(log_low) and exp(log_high) - 1."""

    log_low: torch.Tensor  # [] <= 0
    log_high: torch.Tensor  # [] >= 0
    mean_second_moment: torch.Tensor  # [] over the tokens the region may bind, before any is dropped

    @property
    def eps_low(self) -> torch.Tensor:
        return -torch.expm1(self.log_low)

    @property
    def eps_high(self) -> torch.Tensor:
        return torch.expm1(self.log_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The tokens of one micro-batch, flat. Masked-out entries may hold any finite number."""

    logprobs: torch.Tensor  # [num_tokens] of the policy being trained; carries the gradient
    behaviour: torch.Tensor  # [num_tokens] from the engine that sampled the token
    advantages: torch.Tensor  # [num_tokens]
    mask: torch.Tensor  # [num_tokens] bool, true on trained tokens
    sequence_index: torch.Tensor  # [num_tokens] int64 in [0, num_sequences)
    num_sequences: int
    proximal: torch.Tensor | None = None  # [num_tokens] recomputed at step start, where the loss needs it
    trust_region: TrustRegion | None = None  # of the whole minibatch, where the loss needs it
    mean_weight: torch.Tensor | None = None  # [] of the whole minibatch's truncated weights, where the loss needs it

    def require_proximal(self) -> torch.Tensor:
        assert self.proximal is not None, "this loss needs proximal log-probabilities"
        return self.proximal


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """One loss per token. ``counts`` are sums over the masked tokens, so that they add up over micro-batches."""

    per_token: torch.Tensor  # [num_tokens], zero where masked out
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: torch.Tensor | None = None  # [num_tokens] bool, what a cap or rejection takes out of the loss altogether


LossFunction = Callable[[TokenBatch, Any], PolicyLoss]  # the second is the loss's own settings class


def log_ratio(new: torch.Tensor, old: torch.Tensor, clamp: float) -> torch.Tensor:
    """new - old, clamped so that exp never overflows. [num_tokens]"""
    return (new - old).clamp(-clamp, clamp)


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` where ``mask``, exact zeros elsewhere (a product would let an infinity through as NaN)."""
    return torch.where(mask, values, torch.zeros_like(values))


def sequence_means(
    values: torch.Tensor, mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Mean of the masked values of each sequence, 0 for a sequence without any. [num_sequences]"""
    sums = values.new_zeros(num_sequences).index_add(0, sequence_index, masked(values, mask))
    return sums / sequence_lengths(mask, sequence_index, num_sequences).clamp(min=1).to(values.dtype)


def sequence_lengths(mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Number of masked tokens of each sequence. [num_sequences] int64"""
    return torch.zeros(num_sequences, dtype=torch.int64, device=mask.device).index_add(0, sequence_index, mask.long())
