"""The value head's loss: half the squared error to the return, clipped around the value at step start.

    loss_t = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2       (PPO, arXiv 1707.06347 and its code)

The larger of the two counts, so a value outside its interval has a gradient only on the side away from the return. Without
``clip`` this is the plain squared error.
"""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each token, mask of the clipped tokens). [num_tokens] each; ``values`` carry the gradient."""
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(values, dtype=torch.bool)
    inside = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    clipped_error = (inside - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), clipped_error > error
