"""What a loss must return. A loss that returns something else ends the run: training never goes on from it."""

from __future__ import annotations

import torch

from services.common.errors import ConfigError
from services.trainer.algorithms.base import PolicyLoss, TokenBatch
from services.trainer.metrics import RESERVED_COUNTS, RESERVED_PREFIXES


class LossError(ConfigError):
    """A policy loss returned what cannot be trained on; the message names the loss, the step and what was expected."""


def check_shape(result: object, tokens: TokenBatch, where: str) -> None:
    """``where`` names loss and step.

    Raises:
        LossError: the result is no ``PolicyLoss`` of one floating-point number per token that depends on the policy, or has a
            count by a name that no metric can have.
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
    """Trained tokens whose loss is NaN or infinite although all that the loss was given is finite. [] int64"""
    finite = tokens.logprobs.isfinite() & tokens.behaviour.isfinite() & tokens.advantages.isfinite()
    return (tokens.mask & finite & ~per_token.isfinite()).sum()
