"""M2PO: a trust region whose width follows from the second moment of the log ratio (arXiv 2510.01161).

Over the masked tokens of one optimizer minibatch, with d = l - b and r = exp(d):

1. S = tokens whose update would leave the region: (A > 0 and d > 0) or (A < 0 and d < 0).
2. m = d^2 on S. If S is empty or mean(m) <= threshold, only the caps bind: 1 - 0.95 and 1 + 20.
3. Otherwise drop the largest m until the mean of the rest is < threshold (at least one stays); c = sqrt(largest m
   left). The clip is symmetric in log space: eps_low = min(1 - e^-c, 0.95), eps_high = min(e^c - 1, 20).
4. It replaces PPO's clip. A dropped token has no gradient and stays in the denominator.

Traps. S is taken over the minibatch, all micro-batches and ranks (``m2po_scope: minibatch``): taken per micro-batch
the gradient depends on packing. The bounds are kept in log space and widened by a millionth, so that the token that
defines c is never clipped by a rounding of exp.
"""

from __future__ import annotations

import math

import torch

from services.common.config.losses import M2po
from services.trainer.algorithms.base import PolicyLoss, TokenBatch, TrustRegion, log_ratio, masked

EPS_LOW_CAP = 0.95
EPS_HIGH_CAP = 20.0
_ROUNDING_MARGIN = 1e-6


def m2po(tokens: TokenBatch, config: M2po) -> PolicyLoss:
    """-min(r A, clip(r) A) within ``tokens.trust_region``, or the micro-batch's own. All shapes [num_tokens]."""
    d = log_ratio(tokens.logprobs, tokens.behaviour, config.log_ratio_clamp)
    region = tokens.trust_region
    if region is None:
        region = trust_region(binding_second_moments(d.detach(), tokens.advantages, tokens.mask), config.m2po_threshold)
    plain = -d.exp() * tokens.advantages
    inside = torch.minimum(
        torch.maximum(d, region.log_low * (1 + _ROUNDING_MARGIN)), region.log_high * (1 + _ROUNDING_MARGIN)
    )
    clipped = -inside.exp() * tokens.advantages
    return PolicyLoss(
        per_token=masked(torch.maximum(plain, clipped), tokens.mask),
        counts={"clipped_tokens": (tokens.mask & (clipped > plain)).sum()},
    )


def binding_second_moments(d: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """m = d^2 over S, the masked tokens whose update would leave the region. [num_tokens] each -> [|S|]"""
    binds = ((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0))
    return d[mask & binds].square()


def trust_region(second_moments: torch.Tensor, threshold: float) -> TrustRegion:
    """The region for the second moments of a whole minibatch, in any order. [|S|] -> three scalars"""
    limit = largest_kept(second_moments, threshold)
    dtype, device = second_moments.dtype, second_moments.device
    log_low = torch.tensor(math.log1p(-EPS_LOW_CAP), dtype=dtype, device=device)
    log_high = torch.tensor(math.log1p(EPS_HIGH_CAP), dtype=dtype, device=device)
    mean = second_moments.mean() if second_moments.numel() else torch.zeros((), dtype=dtype, device=device)
    if limit is not None:
        c = limit.sqrt()
        log_low, log_high = torch.maximum(-c, log_low), torch.minimum(c, log_high)
    return TrustRegion(log_low=log_low, log_high=log_high, mean_second_moment=mean)


def largest_kept(second_moments: torch.Tensor, threshold: float) -> torch.Tensor | None:
    """Largest value left after the suffix rule of step 3; None when nothing has to be dropped. [n] -> []"""
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
