"""Losses, masks and weights written a second time, as loops in float64, with gradients by hand, for comparison with the
trainer's.

Shares no code with the trainer. Every function gives the loss and its gradient with respect to the
log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Result = tuple[float, Floats]
INF = math.inf


@dataclass(frozen=True)
class Batch:
    """Log-probabilities new, behaviour, proximal, and advantages of trained tokens; ``sequences`` holds their positions."""

    new: Floats
    behaviour: Floats
    proximal: Floats
    advantages: Floats
    sequences: Sequence[Sequence[int]]
    alive: Sequence[bool] = ()  # what rejection has left; all where it is empty
    denominator: int = 0

    def seen(self, t: int) -> bool:
        return not self.alive or self.alive[t]

    @property
    def count(self) -> int:
        return self.denominator or len(self.new)


def token_sum(batch: Batch, of: Callable[[int], tuple[float, float]]) -> Result:
    """Token mean of a loss with a gradient of its own token alone; ``of`` gives both for a token."""
    total, gradient = 0.0, np.zeros(len(batch.new))
    for t in range(len(batch.new)):
        if batch.seen(t):
            loss, slope = of(t)
            total += loss / batch.count
            gradient[t] = slope / batch.count
    return total, gradient


def surrogate(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """PPO's clip: the loss, and its slope in the log-probability."""
    bounded = min(max(ratio, low), high)
    if -bounded * advantage > -ratio * advantage:
        return -bounded * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def ppo(batch: Batch, old: Floats, low: float = 0.8, high: float = 1.2, weights: Floats | None = None) -> Result:
    def of(t: int) -> tuple[float, float]:
        w = 1.0 if weights is None else weights[t]
        loss, slope = surrogate(math.exp(batch.new[t] - old[t]), batch.advantages[t], low, high)
        return w * loss, w * slope

    return token_sum(batch, of)


def weights(batch: Batch, new: Floats, level: str) -> Floats:
    """new / behaviour of a token, or the product or geometric mean over its sequence."""
    found = np.ones(len(new))
    for sequence in batch.sequences:
        seen = [t for t in sequence if batch.seen(t)]
        gaps = [new[t] - batch.behaviour[t] for t in seen]
        for t, gap in zip(seen, gaps, strict=True):
            exponent = {"token": gap, "sequence": sum(gaps), "sequence_mean": sum(gaps) / len(gaps)}[level]
            found[t] = math.exp(exponent)
    return found


def tis(batch: Batch, level: str, floor: float, cap: float, normalize: bool = False) -> Result:
    found = np.clip(weights(batch, batch.proximal, level), floor, cap)
    if normalize:
        firsts = [s[0] for s in batch.sequences]
        found = found / (found.mean() if level == "token" else np.mean([found[t] for t in firsts]))
    return ppo(batch, batch.proximal, weights=found)


def masked_importance(batch: Batch, level: str, floor: float, cap: float) -> Result:
    """IcePop and MIS: a weight out of bounds is 0."""
    found = weights(batch, batch.proximal, level)
    return ppo(batch, batch.proximal, weights=np.where((found < floor) | (found > cap), 0.0, found))


def cispo(batch: Batch, level: str, floor: float, cap: float) -> Result:
    found = np.clip(weights(batch, batch.new, level), floor, cap)
    return token_sum(
        batch,
        lambda t: (-found[t] * batch.advantages[t] * batch.new[t], -found[t] * batch.advantages[t]),
    )


def sapo_of_sequences(batch: Batch, positive: float, negative: float) -> Result:
    total, gradient = 0.0, np.zeros(len(batch.new))
    for sequence in batch.sequences:
        n = len(sequence)
        ratio = math.exp(sum(batch.new[t] - batch.behaviour[t] for t in sequence) / n)
        advantage = sum(batch.advantages[t] for t in sequence) / n
        tau = positive if advantage > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        total += n * -4 / tau * gate * advantage / batch.count
        for t in sequence:  # n equal losses, each with 1/n of the mean's slope on every token
            gradient[t] = -4 * gate * (1 - gate) * ratio * advantage / batch.count
    return total, gradient


def probability_region(batch: Batch, ends: Callable[[float, float], bool], penalty: float) -> Result:
    """``ends`` of the change of probability and the advantage."""

    def of(t: int) -> tuple[float, float]:
        d, a = batch.new[t] - batch.behaviour[t], batch.advantages[t]
        r = 0.0 if ends(math.exp(batch.new[t]) - math.exp(batch.behaviour[t]), a) else math.exp(d)
        return penalty * d * d - r * a, 2 * penalty * d - r * a

    return token_sum(batch, of)


def m2po_by_authors(batch: Batch, budget: float, floor_low: float, floor_high: float) -> Result:
    binding = []
    for t in range(len(batch.new)):
        d = batch.new[t] - batch.behaviour[t]
        if batch.seen(t) and d * batch.advantages[t] > 0:
            binding.append(abs(d))
    low, high = 0.0, INF
    if sum(d * d for d in binding) > budget * len(binding):
        fitting = [c for c in binding if sum(min(d, c) ** 2 for d in binding) < budget * len(binding)]
        c = max(fitting, default=0.0)
        low = min(math.exp(-c), 1 - floor_low) * (1 - 1e-14)
        high = max(math.exp(c), 1 + floor_high) * (1 + 1e-14)  # the token that defines c is inside
    return ppo(batch, batch.behaviour, low, high)


def rejected(batch: Batch, criteria: Sequence[tuple[str, str, str, float, float]], denominator: str) -> Batch:
    """The batch after rejection; a criterion is (level, estimate, reduce, lower, upper), bounds of a ratio as a ratio."""
    alive = [True] * len(batch.new)
    for level, estimate, reduce, lower, upper in criteria:
        for sequence in batch.sequences:
            values = []
            for t in sequence:
                x = batch.proximal[t] - batch.behaviour[t]
                values.append(
                    {"ratio": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x, "k3_reverse": math.exp(-x) - 1 + x}[
                        estimate
                    ]
                )
            if level == "sequence":
                whole = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[reduce]
                values = [whole] * len(values)
            for t, value in zip(sequence, values, strict=True):
                value = math.exp(value) if estimate == "ratio" else value
                alive[t] = alive[t] and lower <= value <= upper
    return replace(batch, alive=alive, denominator=sum(alive) if denominator == "kept" else len(alive))
