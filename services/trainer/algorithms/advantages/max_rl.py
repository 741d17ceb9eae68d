"""MaxRL: rewards over the group's mean reward, which weighs hard prompts by 1 / p (arXiv 2602.02710, algorithm 1).

    A = (R - mean) / mean,   0 where no rollout of the group was rewarded

With rewards of 0 and 1 this advantage estimates the gradient of log p(right), the likelihood, truncated at an order that
the group size sets; RLOO estimates the gradient of p. Rewards between 0 and 1 are allowed and count as shares; negative
rewards have no likelihood and are refused. Plain numpy, float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequestError

Floats = npt.NDArray[np.float64]


def max_rl_advantages(rewards: Floats, means: Floats) -> Floats:
    """One advantage per sequence, from its reward and its whole group's mean reward. [num_sequences] each

    Raises:
        InvalidRequestError: a reward is below 0 or above 1.
    """
    outside = (rewards < 0.0) | (rewards > 1.0) | (means < 0.0)
    if outside.any():
        raise InvalidRequestError(
            f"algorithm.advantage: max_rl needs rewards from 0 to 1, got {float(rewards[np.argmax(outside)]):g}: write another "
            "advantage, or a binary reward"
        )
    return np.divide(rewards - means, means, out=np.zeros_like(rewards), where=means > 0.0)
