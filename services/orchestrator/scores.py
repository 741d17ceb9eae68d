"""What an evaluation says in numbers: avg@k and pass@k with 95% intervals, per dataset and overall. Pure functions.

An item is one task with the rewards of its samples; a failed sample has one, too, so no denominator ever shrinks.
Intervals are Wilson's over items: samples of one item are not independent, so the number of observations is the one that
a share with the same standard error between items would need, at least the number of items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964  # 95%, two-sided


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScore:
    """One dataset of an evaluation pass. Rewards are means in their own unit; pass@k are shares in [0, 1]."""

    name: str
    num_items: int
    samples_per_item: int
    mean_reward: Estimate
    pass_at: tuple[tuple[int, Estimate], ...]  # (k, pass@k), k = 1, 2, 4, ... up to the samples
    failed: tuple[str, ...]  # task ids with a failed sample, in order


def score(
    name: str, task_ids: Sequence[str], rewards: Sequence[Sequence[float]], failed: Sequence[bool], pass_reward: float
) -> DatasetScore:
    """``rewards``: (items, samples), every item with the same number; ``failed``: whether an item had a failed sample."""
    num_samples = len(rewards[0])
    passed = [sum(reward >= pass_reward for reward in item) for item in rewards]
    ks = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return DatasetScore(
        name=name,
        num_items=len(rewards),
        samples_per_item=num_samples,
        mean_reward=estimate([math.fsum(item) / num_samples for item in rewards]),
        pass_at=tuple((k, estimate([pass_at_k(num_samples, count, k) for count in passed])) for k in ks),
        failed=tuple(task_id for task_id, has_failed in zip(task_ids, failed, strict=True) if has_failed),
    )


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., arXiv 2107.03374.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate(items: Sequence[float]) -> Estimate:
    """Mean over items with its interval; shares get Wilson's, which never leaves [0, 1] and is never empty.

    >>> estimate([1.0, 0.0, 1.0, 1.0]).value
    0.75
    """
    count = len(items)
    mean = math.fsum(items) / count
    error = math.sqrt(math.fsum((item - mean) ** 2 for item in items) / (count - 1) / count) if count > 1 else 0.0
    if min(items) < 0.0 or max(items) > 1.0:
        return Estimate(mean, mean - _Z * error, mean + _Z * error)
    observations = max(float(count), mean * (1.0 - mean) / error**2) if error else float(count)
    spread = _Z**2 / observations
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(mean * (1.0 - mean) / observations + spread / (4 * observations)) / (1 + spread)
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def overall(scores: Sequence[DatasetScore]) -> float:
    """Mean reward over datasets, each counted once, however large.

    >>> overall([])
    0.0
    """
    return math.fsum(found.mean_reward.value for found in scores) / len(scores) if scores else 0.0
