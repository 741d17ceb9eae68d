"""Counts trained tokens without a gradient by cause, and the effective sample size of the importance ratios.

The gradient is that of the policy loss with respect to each token's log-probability, as the backward pass computes it:
the loss gets a view of the log-probabilities, and autograd keeps the gradient of that view. So the audit covers every
loss, also one of a user, and needs no further pass. The KL and entropy terms are excluded.

A token without gradient has one cause, the first that holds:

    zero_advantage   its advantage is 0
    masked           the loss mask excludes the token (m2po_mask, rejection)
    dropped          the loss reports the token as left out (an importance cap, a probability mask)
    clamped          |log ratio| is beyond log_ratio_clamp
    clipped          the rest: the loss is flat there

Effective sample size of a minibatch's n ratios w = policy / behaviour: (sum w)^2 / sum w^2, here as a share of n
(Kong, 1992): 1 when all weigh the same, 1 / n when one token has all the weight.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch

from services.common.records.types import MinibatchTotals
from services.trainer.algorithms.base import KL_ESTIMATORS, PolicyLoss, TokenBatch, log_ratio
from services.trainer.step.metrics import Sums
from services.trainer.step.micro_batches import MicroTensors


class Cause(enum.StrEnum):
    """Why a token with an advantage has no gradient."""

    MASKED = "masked"
    DROPPED = "dropped"
    CLAMPED = "clamped"
    CLIPPED = "clipped"


class Sign(enum.StrEnum):
    """Sign of a token's advantage."""

    POSITIVE = "positive"
    NEGATIVE = "negative"


_CELLS = [(sign, cause) for sign in Sign for cause in Cause]
_RATIOS, _SQUARES = "ratios/", "squared_ratios/"  # names of sums, before the minibatch
_ZERO_ADVANTAGE = len(_CELLS)  # and behind it the tokens of each sign, then those with a gradient


class GradientAudit:
    """Counts over the micro-batches of one training step. The counts stay on the device."""

    def __init__(self, clamp: float, device: torch.device) -> None:
        self._clamp = clamp
        self._counts = torch.zeros(_ZERO_ADVANTAGE + 2, dtype=torch.float64, device=device)
        self._of_sign = torch.zeros(len(Sign), dtype=torch.float64, device=device)

    @staticmethod
    def view(logprobs: torch.Tensor) -> torch.Tensor:
        """A view of the log-probabilities, to be given to the policy loss. [num_targets]"""
        seen = logprobs.view_as(logprobs)
        seen.retain_grad()
        return seen

    @torch.no_grad()
    def count(self, tokens: TokenBatch, loss: PolicyLoss) -> None:
        """Count these tokens after their backward pass. Their log-probabilities must come from ``view``."""
        seen, advantages = tokens.logprobs, tokens.advantages
        gradient = torch.zeros_like(seen) if seen.grad is None else seen.grad  # None: the loss does not use them
        gap = (seen.detach() - tokens.behaviour).abs()
        # From the last cause to the first, so that the first one that holds remains.
        cell = torch.where(gap > self._clamp, 2, 3)
        if loss.left_out is not None:
            cell = cell.masked_fill(loss.left_out, 1)
        cell = cell.masked_fill(~tokens.mask, 0)
        negative = advantages < 0
        cell = cell + len(Cause) * negative
        cell = cell.masked_fill(advantages == 0, _ZERO_ADVANTAGE)
        cell = cell.masked_fill(gradient != 0, _ZERO_ADVANTAGE + 1)
        self._counts.index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
        self._of_sign += torch.stack([(advantages > 0).sum(), negative.sum()])

    def add_to(self, sums: Sums) -> None:
        """Add the counts to ``sums``, once at the end of the step. Names in ``_tokens`` become shares of trained tokens."""
        for (sign, cause), count in zip(_CELLS, self._counts, strict=False):
            sums.add(f"zero_gradient/{sign}/{cause}_tokens", count)
        sums.add("zero_gradient/zero_advantage_tokens", self._counts[_ZERO_ADVANTAGE])
        sums.add("zero_gradient_tokens", self._counts[: _ZERO_ADVANTAGE + 1].sum())
        for sign, count in zip(Sign, self._of_sign, strict=True):
            sums.add(f"advantage_{sign}_tokens", count)


@torch.no_grad()
def add_ratios(sums: Sums, minibatch: int, batch: MicroTensors, logprobs: torch.Tensor, clamp: float) -> torch.Tensor:
    """Add the ratios policy / behaviour of a micro-batch to its minibatch; returns their sum. []"""
    ratios = log_ratio(logprobs.detach(), batch.behaviour, clamp).double().exp()
    total = ratios.sum()
    sums.add(f"{_RATIOS}{minibatch}", total)
    sums.add(f"{_SQUARES}{minibatch}", ratios.square().sum())
    return total


def add_mismatch(sums: Sums, batch: MicroTensors, logprobs: torch.Tensor, fresh_version: int) -> None:
    """Add the difference between the trainer's and the engines' log-probabilities; KL(behaviour || trainer) by k3."""
    gap = batch.behaviour - logprobs
    kl = KL_ESTIMATORS["k3"](gap.clamp(-20.0, 20.0))
    # Tokens sampled on a cache that older weights computed in part are never fresh, also with the newest version.
    fresh = ((batch.weight_versions == fresh_version) & ~batch.mixed_cache).to(gap.dtype)
    for name, weight in (("first", torch.ones_like(gap)), ("fresh", fresh)):
        sums.add(f"{name}_abs", (gap.abs() * weight).sum())
        sums.add(f"{name}_kl", (kl * weight).sum())
        sums.add(f"{name}_tokens", weight.sum())


def shares(total: Mapping[str, float], minibatches: tuple[MinibatchTotals, ...]) -> dict[str, float]:
    """Metrics of a step with other denominators than all trained tokens. ``total`` are its sums over all ranks."""
    return {**_of_each_sign(total), **_effective_samples(total, minibatches)}


def _effective_samples(total: Mapping[str, float], minibatches: tuple[MinibatchTotals, ...]) -> dict[str, float]:
    """Effective sample size of the ratios as a share of the trained tokens: mean and minimum over the minibatches."""
    found = [
        total[f"{_RATIOS}{index}"] ** 2 / (totals.num_trained_tokens * total[f"{_SQUARES}{index}"])
        for index, totals in enumerate(minibatches)
        if total.get(f"{_SQUARES}{index}")
    ]
    return (
        {"effective_sample_share": sum(found) / len(found), "effective_sample_share_min": min(found)} if found else {}
    )


def _of_each_sign(total: Mapping[str, float]) -> dict[str, float]:
    """Share without gradient of the tokens with a positive (a negative) advantage; absent without such tokens."""
    found: dict[str, float] = {}
    for sign in Sign:
        if count := total.get(f"advantage_{sign}_tokens", 0.0):
            without = sum(total[f"zero_gradient/{sign}/{cause}_tokens"] for cause in Cause)
            found[f"zero_gradient_of_{sign}_share"] = without / count
    return found
