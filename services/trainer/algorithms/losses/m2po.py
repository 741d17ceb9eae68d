"""M2PO: a trust region whose width follows from the second moment of the log ratio (arXiv 2510.01161).

Over the masked tokens of one optimizer minibatch, with d = l - b and r = exp(d):

1. S = tokens whose update would leave the region: (A > 0 and d > 0) or (A < 0 and d < 0).
2. m = d^2 on S. If S is empty or mean(m) <= threshold, only the caps bind: 1 - 0.95 and 1 + 20.
3. Otherwise c follows from the threshold, and the clip is symmetric in log space: eps_low = 1 - e^-c, eps_high = e^c - 1.
   ``m2po_rule: suffix``: drop the largest m until the mean of the rest is < threshold (at least one stays); c = sqrt(largest
   m left).
   ``m2po_rule: authors``: c^2 is the largest m for which the sum of min(m, c^2) over S is < threshold * |S|, 0 if there is
   none. Larger m count as c^2, so that c is smaller than with ``suffix`` at the same threshold.
4. Floors widen the clip: the authors' code has .3 and .5 with a threshold of .04, which gives the wider clip of the two rules.
   Only ``suffix`` has caps, .95 and 20.
5. This clip replaces PPO's. A dropped token has no gradient and stays in the denominator.

The paper states the constraint; ``authors`` is the rule of its published code (Infini-AI-Lab/M2PO), ``suffix`` that of
AstraFlow, this project's reference.

Traps. S covers the minibatch, all micro-batches and ranks (``m2po_scope: minibatch``): with S per micro-batch the gradient
depends on packing. The bounds are kept in log space and widened by a few roundings, so that a rounding of exp never clips
the token that defines c.

``m2po_mask`` is AReaL's variant of M2PO: drop the tokens that are furthest from the behaviour policy, then decoupled PPO.

    m = (b - p)^2 over all masked tokens, no sign test; drop the largest until the mean of the rest is < threshold.

The dropped tokens leave the loss mask *and* the denominator of a token mean (in ``m2po`` they stay in the denominator).
Computed over the minibatch, all micro-batches and ranks. Source: AReaL (public repository), after arXiv 2510.01161.
"""

from __future__ import annotations

import math

import torch

from services.common.config.training.losses import M2po
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, TrustRegion, log_ratio, masked

CAP_LOW, CAP_HIGH = math.log1p(-0.95), math.log1p(20.0)
NO_CLIP = math.log1p(99_999.0)  # finite, because metrics report this value
_ROUNDINGS = 8  # the bounds are widened by so many roundings of the log ratios' type


def m2po(tokens: TokenBatch, config: M2po) -> PolicyLoss:
    """-min(r A, clip(r) A) within ``tokens.trust_region``, or the micro-batch's own. All shapes [num_tokens]."""
    d = log_ratio(tokens.logprobs, tokens.behaviour, config.log_ratio_clamp)
    region = tokens.trust_region
    if region is None:
        region = trust_region(binding_second_moments(d.detach(), tokens.advantages, tokens.mask), config)
    plain = -d.exp() * tokens.advantages
    widening = 1.0 + _ROUNDINGS * torch.finfo(d.dtype).eps
    inside = torch.minimum(torch.maximum(d, region.log_low * widening), region.log_high * widening)
    clipped = -inside.exp() * tokens.advantages
    return PolicyLoss(
        per_token=masked(torch.maximum(plain, clipped), tokens.mask),
        counts={"clipped_tokens": (tokens.mask & (clipped > plain)).sum()},
    )


def binding_second_moments(d: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """m = d^2 over S, the masked tokens whose update would leave the region. [num_tokens] each -> [|S|]"""
    binds = ((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0))
    return d[mask & binds].square()


def trust_region(second_moments: torch.Tensor, config: M2po) -> TrustRegion:
    """The region for the second moments of a whole minibatch, in any order. [|S|] -> three scalars"""
    by_authors = config.m2po_rule == "authors"
    threshold, floor_low, floor_high = in_force(config)
    limit = (largest_capped if by_authors else largest_kept)(second_moments, threshold)
    new = second_moments.new_tensor
    cap_low, cap_high = (-math.inf, NO_CLIP) if by_authors else (CAP_LOW, CAP_HIGH)
    log_low, log_high = new(cap_low), new(cap_high)
    if limit is not None:
        c = limit.sqrt()
        log_low = torch.maximum(torch.minimum(-c, new(math.log1p(-floor_low))), log_low)
        log_high = torch.minimum(torch.maximum(c, new(math.log1p(floor_high))), log_high)
    mean = second_moments.mean() if second_moments.numel() else new(0.0)
    return TrustRegion(log_low=log_low, log_high=log_high, mean_second_moment=mean)


def in_force(config: M2po) -> tuple[float, float, float]:
    """Threshold, floor below and floor above: those of the rule where the settings have none."""
    own = (config.m2po_threshold, config.m2po_floor_low, config.m2po_floor_high)
    of_rule = (0.04, 0.3, 0.5) if config.m2po_rule == "authors" else (0.01, 0.0, 0.0)
    threshold, low, high = (rule if number is None else number for number, rule in zip(own, of_rule, strict=True))
    return threshold, low, high


def largest_capped(second_moments: torch.Tensor, threshold: float) -> torch.Tensor | None:
    """c^2 of ``m2po_rule: authors``; None when all are within the threshold. [n] -> []"""
    if second_moments.numel() == 0 or second_moments.double().mean() <= threshold:
        return None
    # Ascending, the sum with everything beyond the k-th counted as the k-th never falls with k.
    ascending = second_moments.double().sort().values
    beyond = torch.arange(ascending.numel() - 1, -1, -1, dtype=torch.float64, device=ascending.device)
    sums = ascending.cumsum(0) + beyond * ascending
    num_within = int((sums < threshold * ascending.numel()).sum())
    found = ascending[num_within - 1] if num_within else ascending.new_zeros(())
    return found.to(second_moments.dtype)


def largest_kept(second_moments: torch.Tensor, threshold: float) -> torch.Tensor | None:
    """Largest value left after the suffix rule; None when nothing has to be dropped. [n] -> []"""
    if second_moments.numel() == 0:
        return None
    # Ascending, the mean of the k smallest never falls with k: the rule is one search over the running means.
    ascending = second_moments.double().sort().values
    count = torch.arange(1, ascending.numel() + 1, dtype=torch.float64, device=ascending.device)
    running_means = ascending.cumsum(0) / count
    if running_means[-1] <= threshold:
        return None
    num_kept = int((running_means < threshold).sum().clamp(min=1))
    return ascending[num_kept - 1].to(second_moments.dtype)


def gap_second_moments(behaviour: torch.Tensor, proximal: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """m over the masked tokens. [num_tokens] each -> [mask.sum()]"""
    return (behaviour - proximal)[mask].square()


def keep_limit(second_moments: torch.Tensor, threshold: float) -> torch.Tensor:
    """The largest m that stays in a whole minibatch; infinity when all stay. [n] -> []"""
    limit = largest_kept(second_moments, threshold)
    return second_moments.new_full((), float("inf")) if limit is None else limit


def kept_tokens(
    behaviour: torch.Tensor, proximal: torch.Tensor, mask: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """The loss mask without the dropped tokens. [num_tokens] each -> [num_tokens] bool"""
    return mask & ((behaviour - proximal).square() <= limit)
