"""Per-token estimators of KL(policy || reference) from tokens sampled by the policy (Schulman, 2020).

With x = l - ref:   k1 = x,   k2 = x^2 / 2,   k3 = exp(-x) - 1 + x

Traps: k1 is unbiased as a value, but in a loss its expected gradient is zero; k2's gradient is the right one on
policy; k3 is unbiased, never negative, and grows like exp when the policy leaves a token the reference likes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(-x) + x,
}


def kl_per_token(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str, clamp: float = 20.0) -> torch.Tensor:
    """[num_tokens] each -> [num_tokens]. ``clamp`` bounds l - ref before exp."""
    return KL_ESTIMATORS[estimator]((logprobs - reference).clamp(-clamp, clamp))
