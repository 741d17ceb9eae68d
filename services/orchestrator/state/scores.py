"""Scores of an evaluation: avg@k, pass@k and differences with 95% intervals, per dataset and overall.

An item is one task with the rewards of its samples; a failed sample has one, too, so no denominator ever shrinks.
Intervals are Wilson's over items: samples of one item are not independent, so the number of observations is the one
that a share with the same standard error between items would need, at least the number of items. Two evaluations of the
same items are compared by the mean of the items' differences, with its t interval: the difficulty of an item and the
common random numbers of both cancel (Miller, arXiv 2411.00640, section 4). Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common import finite

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
    mean_reward: Estimate | None  # None where every sample failed: a failure is no reward
    pass_at: tuple[tuple[int, Estimate], ...]  # (k, pass@k), k = 1, 2, 4, ... up to the samples
    failed: tuple[str, ...]  # task ids with a failed sample, in order
    items: str = ""  # digest of the tasks: scores with the same one are of the same items
    item_rewards: tuple[float, ...] = ()  # mean over the samples of each item, in order
    difference: Estimate | None = None  # to the first evaluation of its kind; None for that one, or with one item


def score(
    name: str,
    task_ids: Sequence[str],
    rewards: Sequence[Sequence[float]],
    failed: Sequence[int],
    pass_reward: float,
    items: str = "",
) -> DatasetScore:
    """``rewards``: (items, samples), every item with the same number, those of its ``failed`` samples last: they never
    pass, with any reward. Where every sample failed there is no estimate."""
    num_samples = len(rewards[0])
    played = sum(failed) < num_samples * len(rewards)
    means = tuple(finite.mean(item) for item in rewards)
    passed = [
        sum(reward >= pass_reward for reward in item[: num_samples - num_failed])
        for item, num_failed in zip(rewards, failed, strict=True)
    ]
    ks = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return DatasetScore(
        name=name,
        num_items=len(rewards),
        samples_per_item=num_samples,
        mean_reward=estimate(means) if played else None,
        pass_at=tuple((k, estimate([pass_at_k(num_samples, count, k) for count in passed])) for k in ks if played),
        failed=tuple(task_id for task_id, num_failed in zip(task_ids, failed, strict=True) if num_failed),
        items=items,
        item_rewards=means,
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
    listed, exponent = finite.scaled(items) if max(map(abs, items)) > 1.0 else (items, 0)
    mean = math.fsum(listed) / count
    error = math.sqrt(math.fsum((item - mean) ** 2 for item in listed) / (count - 1) / count) if count > 1 else 0.0
    if exponent or min(items) < 0.0 or max(items) > 1.0:
        return Estimate(*(finite.unscaled(v, exponent) for v in (mean, mean - _Z * error, mean + _Z * error)))
    variance = error**2  # 0 for an error that is too small for its square
    observations = max(float(count), mean * (1.0 - mean) / variance) if variance else float(count)
    spread = _Z**2 / observations
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(mean * (1.0 - mean) / observations + spread / (4 * observations)) / (1 + spread)
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def overall(scores: Sequence[DatasetScore]) -> float | None:
    """Mean reward over datasets, each with the same weight; None without one, and unless every dataset has a value."""
    return _overall([found.mean_reward for found in scores])


def overall_pass_at(scores: Sequence[DatasetScore], k: int) -> float | None:
    """pass@k over datasets, each counted once; None as in ``overall``, and where k is none of theirs."""
    return _overall([dict(found.pass_at).get(k) for found in scores])


def _overall(found: Sequence[Estimate | None]) -> float | None:
    values = [estimate.value for estimate in found if estimate is not None]
    return finite.mean(values) if found and len(values) == len(found) else None


def difference(base: DatasetScore, other: DatasetScore) -> Estimate | None:
    """Mean difference of the rewards of ``other`` and ``base``, item by item; None for different items, for a single item,
    and where every sample of one failed."""
    if not base.items or base.items != other.items or None in (base.mean_reward, other.mean_reward):
        return None
    return mean_difference([_differences(base, other)])


def _differences(base: DatasetScore, other: DatasetScore) -> list[float]:
    return [finite.finite(b - a) for a, b in zip(base.item_rewards, other.item_rewards, strict=True)]


def compared(base: Sequence[DatasetScore], scores: Sequence[DatasetScore]) -> tuple[DatasetScore, ...]:
    """``scores`` with their differences to the datasets of the same names in ``base``."""
    known = {found.name: found for found in base}
    return tuple(replace(s, difference=difference(known[s.name], s) if s.name in known else None) for s in scores)


def overall_difference(base: Sequence[DatasetScore], other: Sequence[DatasetScore]) -> Estimate | None:
    """The mean over datasets, each with the same weight; None unless every dataset has a value."""
    if len(base) != len(other) or any(difference(a, b) is None for a, b in zip(base, other, strict=True)):
        return None
    return mean_difference([_differences(a, b) for a, b in zip(base, other, strict=True)])


def mean_difference(datasets: Sequence[Sequence[float]]) -> Estimate | None:
    """Mean over datasets of the mean over their items, with its t interval (degrees of freedom after Welch and Satterthwaite);
    None without a dataset, and with one of fewer than two items.

    >>> mean_difference([[1.0, 0.0, 0.0, 1.0]])
    Estimate(value=0.5, low=-0.41869311315694757, high=1.4186931131569476)
    """
    if not datasets or any(len(items) < 2 for items in datasets):
        return None
    flat, exponent = finite.scaled([item for items in datasets for item in items])
    if exponent:
        rest = iter(flat)
        found = mean_difference([[next(rest) for _ in items] for items in datasets])
        assert found is not None
        return Estimate(*(finite.unscaled(value, exponent) for value in (found.value, found.low, found.high)))
    means = [math.fsum(items) / len(items) for items in datasets]
    variances = [  # of the means
        math.fsum((item - mean) ** 2 for item in items) / (len(items) - 1) / len(items)
        for items, mean in zip(datasets, means, strict=True)
    ]
    value, variance = math.fsum(means) / len(means), math.fsum(variances)
    if not variance:
        return Estimate(value, value, value)
    # Of shares where squares would be too large or too small for a float.
    unit = 1.0 if 1e-150 < variance < 1e150 else variance
    freedom = (variance / unit) ** 2 / math.fsum(
        (v / unit) ** 2 / (len(items) - 1) for v, items in zip(variances, datasets, strict=True)
    )
    half = t_quantile(freedom) * math.sqrt(variance) / len(means)
    return Estimate(value, value - half, value + half)


def t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t, for 1 degree of freedom or more, to within 0.2%: bisection on its distribution
    function, which Simpson's rule integrates over atan(t / sqrt(freedom)).

    >>> round(t_quantile(1), 2), round(t_quantile(9), 3)
    (12.71, 2.262)
    """
    if freedom > 1000:
        return _Z
    wanted = 0.475 * math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(40):
        angle = (low + high) / 2
        low, high = (angle, high) if _integral_of_cosine(angle, freedom - 1) < wanted else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _integral_of_cosine(angle: float, power: float, num_steps: int = 100) -> float:
    """Of cos(x) ** power, from 0 to ``angle``."""
    step = angle / num_steps
    inner = math.fsum((4 if i % 2 else 2) * math.pow(math.cos(i * step), power) for i in range(1, num_steps))
    return (1.0 + inner + math.pow(math.cos(angle), power)) * step / 3
