"""Input and result of policy losses: flat tensors over tokens, one entry per token. Checks the results and adds them up.

A loss is a pure function ``(TokenBatch, settings) -> PolicyLoss``, independent of models, packing, ranks and
denominators: the loss returns one number per token. A wrong result ends the run before the optimizer's step.
``aggregate`` reduces the numbers of all tokens to one, with the minibatch's *global* denominators:

    token_mean     sum over tokens / trained tokens of the minibatch
    sequence_mean  sum over sequences of their mean / sequences of the minibatch
    constant       sum over tokens / (sequences of the minibatch * constant_denominator)    (Dr. GRPO)
    sum            sum over tokens / constant_denominator

The result is this micro-batch's share: shares add up over micro-batches and ranks to the minibatch's loss. So the
gradient does not depend on packing or on ranks, and a rank without tokens contributes an exact zero.

Also per-token estimators of KL(policy || reference) from tokens sampled by the policy (Schulman, 2020).

With x = l - ref:   k1 = x,   k2 = x^2 / 2,   k3 = exp(-x) - 1 + x,   k3_straight_through = k3 with the gradient of k2

Traps: k1 is unbiased as a value, but in a loss its expected gradient is zero; k2's gradient is the right one on
policy; k3 is unbiased, never negative, and grows like exp when the policy leaves a token the reference likes: one token at
x = -20 takes the whole update, unless the estimate is clamped. The gradient of k3 is not that of the KL (arXiv 2510.01555); the
straight-through form reports k3 and follows k2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from services.common.config.training.algorithm import AlgorithmConfig
from services.common.errors import ConfigError
from services.common.records.types import MinibatchTotals

RESERVED_COUNTS = {"trained_tokens", "fresh_tokens", "first_tokens"}  # of the step: denominators of shares
# Prefixes of the counts of the audit and the step.
RESERVED_PREFIXES = ("zero_gradient", "advantage_", "sole_choice", "left_out", "value_clipped")

KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(-x) + x,
    "k3_straight_through": lambda x: 0.5 * x.square() + (torch.expm1(-x) + x - 0.5 * x.square()).detach(),
}


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
    left_out: torch.Tensor | None = None  # [num_tokens] bool, tokens that a cap or rejection removes from the loss


LossFunction = Callable[[TokenBatch, Any], PolicyLoss]  # the second is the loss's own settings class


class LossError(ConfigError):
    """A policy loss returned an unusable result; the message names the loss, the step and the expected result."""


def check_shape(result: object, tokens: TokenBatch, where: str) -> None:
    """Check type, shape and names of a loss's result. ``where`` names loss and step.

    Raises:
        LossError: the result is no ``PolicyLoss`` of one floating-point number per token that depends on the policy, or has
            a count with a reserved name.
    """
    expected = f"a PolicyLoss whose per_token is a floating-point tensor of shape {list(tokens.logprobs.shape)}"
    if not isinstance(result, PolicyLoss):
        raise LossError(f"{where} returned a {type(result).__name__}; expected {expected}")
    per_token = result.per_token
    if not isinstance(per_token, torch.Tensor):
        raise LossError(f"{where} returned a per_token of type {type(per_token).__name__}; expected {expected}")
    if per_token.shape != tokens.logprobs.shape or not per_token.is_floating_point():
        raise LossError(
            f"{where} returned a per_token of shape {list(per_token.shape)} and {per_token.dtype}; expected {expected}"
        )
    if tokens.logprobs.requires_grad and not per_token.requires_grad:
        raise LossError(f"{where} returned a per_token that does not depend on tokens.logprobs; expected {expected}")
    left_out = result.left_out
    if left_out is not None and not isinstance(left_out, torch.Tensor):
        raise LossError(
            f"{where} returned a left_out of type {type(left_out).__name__}; expected a bool tensor of shape "
            f"{list(tokens.logprobs.shape)}, or none"
        )
    if left_out is not None and (left_out.shape != tokens.logprobs.shape or left_out.dtype != torch.bool):
        raise LossError(
            f"{where} returned a left_out of shape {list(left_out.shape)} and {left_out.dtype}; expected a bool tensor of "
            f"shape {list(tokens.logprobs.shape)}, or none"
        )
    for name in result.counts:
        if not name.endswith("_tokens") or name in RESERVED_COUNTS or name.startswith(RESERVED_PREFIXES):
            raise LossError(
                f"{where} returned a count named {name!r}; expected names that end in _tokens, and none of "
                f"{', '.join(sorted(RESERVED_COUNTS))}, and no beginning {' or '.join(RESERVED_PREFIXES)}"
            )


def num_not_finite(per_token: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """Number of trained tokens with a NaN or infinite loss, despite finite inputs. [] int64"""
    finite = tokens.logprobs.isfinite() & tokens.behaviour.isfinite() & tokens.advantages.isfinite()
    return (tokens.mask & finite & ~per_token.isfinite()).sum()


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


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    sequence_index: torch.Tensor,
    num_sequences: int,
    totals: MinibatchTotals,
    config: AlgorithmConfig,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce losses of tokens. [num_tokens] -> []

    Sums are over ``mask``, lengths of sequences over ``counted`` (default: the mask); ``totals`` are those of the whole
    minibatch, over all ranks.
    """
    values = masked(per_token, mask)
    if config.loss_aggregation == "token_mean":
        return values.sum() / max(totals.num_trained_tokens, 1)
    if config.loss_aggregation == "sequence_mean":
        lengths = (
            sequence_lengths(mask if counted is None else counted, sequence_index, num_sequences)
            .clamp(min=1)
            .to(values.dtype)
        )
        return (values / lengths[sequence_index]).sum() / max(totals.num_sequences, 1)
    assert config.constant_denominator is not None
    per = max(totals.num_sequences, 1) if config.loss_aggregation == "constant" else 1
    return values.sum() / (per * config.constant_denominator)


def kl_per_token(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    estimator: str,
    clamp: float = 20.0,
    clamp_estimate: float | None = None,
) -> torch.Tensor:
    """The estimate per token. [num_tokens] each -> [num_tokens]

    ``clamp`` bounds l - ref before exp, ``clamp_estimate`` the estimate.
    """
    estimate = KL_ESTIMATORS[estimator]((logprobs - reference).clamp(-clamp, clamp))
    return estimate if clamp_estimate is None else estimate.clamp(-clamp_estimate, clamp_estimate)
