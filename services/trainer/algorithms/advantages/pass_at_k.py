"""Pass@k training: the advantage of a rollout when k of them are scored together by their best (arXiv 2508.10751).

Over all subsets of k of a group's N rollouts, W of them wrong, a subset's reward being 1 when any of it is right:

    mean   = 1 - C(W, k) / C(N, k)                              pass@k of the group
    std    = sqrt(mean (1 - mean))
    right    (1 - mean) / (std + eps)
    wrong    (1 - mean - C(W - 1, k - 1) / C(N - 1, k - 1)) / (std + eps)

so the advantage of each rollout is the mean over the subsets with this rollout. k = 1 is GRPO with the population deviation.
A group with fewer than k wrong rollouts has advantage 0: every subset passes. Plain numpy, float64.
"""

from __future__ import annotations

from math import comb

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequestError

Floats = npt.NDArray[np.float64]


def pass_at_k_advantages(rewards: Floats, means: Floats, sizes: Floats, k: int, eps: float) -> Floats:
    """One advantage per sequence, from its reward and its whole group's mean reward and size. [num_sequences] each

    In a group smaller than k, because rollouts failed, k is the size of the group.

    Raises:
        InvalidRequestError: a reward is neither 0 nor 1.
    """
    right = np.rint(means * sizes)
    not_binary = (rewards != 0.0) & (rewards != 1.0) | (np.abs(means * sizes - right) > 1e-6)
    if not_binary.any():
        reward = float(rewards[np.argmax(not_binary)])
        raise InvalidRequestError(
            f"algorithm.advantage: pass_at_k needs rewards of 0 or 1, and a group has others (a reward of {reward:g}): "
            "write another advantage, or a binary reward"
        )
    pairs = zip(rewards.tolist(), right.tolist(), sizes.tolist(), strict=True)
    found = [
        _advantage(reward == 1.0, int(size) - int(num_right), int(size), k, eps) for reward, num_right, size in pairs
    ]
    return np.array(found, dtype=np.float64)


def _advantage(is_right: bool, wrong: int, size: int, k: int, eps: float) -> float:
    k = min(k, size)
    failing = comb(wrong, k) / comb(size, k)  # of all subsets
    failing_with_it = 0.0 if is_right else comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    std = float(np.sqrt(failing * (1.0 - failing)))
    return (failing - failing_with_it) / (std + eps)
