"""Per-token estimators of KL(policy || reference) from tokens sampled by the policy (Schulman, 2020).

With x = l - ref:   k1 = x,   k2 = x^2 / 2,   k3 = exp(-x) - 1 + x,   k3_straight_through = k3 with the gradient of k2

Traps: k1 is unbiased as a value, but in a loss its expected gradient is zero; k2's gradient is the right one on
policy; k3 is unbiased, never negative, and grows like exp when the policy leaves a token the reference likes: one token at
x = -20 takes the whole update, unless the estimate is clamped. The gradient of k3 is not that of the KL (arXiv 2510.01555); the
straight-through form reports k3 and follows k2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(-x) + x,
    "k3_straight_through": lambda x: 0.5 * x.square() + (torch.expm1(-x) + x - 0.5 * x.square()).detach(),
}


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
