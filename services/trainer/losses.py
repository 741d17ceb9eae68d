"""Input and result of policy losses: flat tensors over tokens, one entry per token. Checks the results and adds them up.

A loss is a pure function ``(TokenBatch, settings) -> PolicyLoss``, independent of models, packing, ranks and
denominators: the loss returns one number per token. A wrong result ends the run before the optimizer's step.
``aggregate`` reduces the numbers of all tokens to one, with the minibatch's *global* denominators:

    token_mean     sum over tokens / trained tokens of the minibatch
    sequence_mean  sum over sequences of their mean / sequences of the minibatch
    constant       sum over tokens / (sequences of the minibatch * constant_denominator)    (Dr. GRPO)
    sum            sum over tokens / constant_denominator

The result is this micro-batch's share: shares add up over micro-batches and ranks to the minibatch's loss. So the
gradient does not depend on packing or on ranks, and a rank without tokens contributes an exact zero.

Also per-token estimators of KL(policy || reference) from tokens sampled by the policy (Schulman, 2020).

With x = l - ref:   k1 = x,   k2 = x^2 / 2,   k3 = exp(-x) - 1 + x,   k3_straight_through = k3 with the gradient of k2

Traps: k1 is unbiased as a value, but in a loss its expected gradient is zero; k2's gradient is the right one on
policy; k3 is unbiased, never negative, and grows like exp when the policy leaves a token the reference likes: one token at
x = -20 takes the whole update, unless the estimate is clamped. The gradient of k3 is not that of the KL (arXiv 2510.01555); the
straight-through form reports k3 and follows k2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from services.common.config.algorithm import (
    LOSS,
    AlgorithmConfig,
    Cispo,
    ClipSettings,
    DecoupledPpo,
    Dppo,
    Gspo,
    ImportanceLevel,
    ImportanceSettings,
    Ipo,
    LossByPath,
    M2po,
    M2poMask,
    Reinforce,
    RejectionConfig,
    Sapo,
    Tis,
)
from services.common.errors import ConfigError
from services.common.importing import check_call, load_object
from services.common.records import MinibatchTotals

RESERVED_COUNTS = {"trained_tokens", "fresh_tokens", "first_tokens"}  # of the step: denominators of shares
# Prefixes of the counts of the audit and the step.
RESERVED_PREFIXES = ("zero_gradient", "advantage_", "sole_choice", "left_out", "value_clipped")
KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(-x) + x,
    "k3_straight_through": lambda x: 0.5 * x.square() + (torch.expm1(-x) + x - 0.5 * x.square()).detach(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegion:
    """M2PO's bounds on the log ratio. The clip's epsilons follow: 1 - exp(log_low) and exp(log_high) - 1."""

    log_low: torch.Tensor  # [] <= 0
    log_high: torch.Tensor  # [] >= 0
    mean_second_moment: torch.Tensor  # [] over the tokens the region may bind, before any is dropped

    @property
    def eps_low(self) -> torch.Tensor:
        return -torch.expm1(self.log_low)

    @property
    def eps_high(self) -> torch.Tensor:
        return torch.expm1(self.log_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The tokens of one micro-batch, flat. Masked-out entries may hold any finite number."""

    logprobs: torch.Tensor  # [num_tokens] of the policy being trained; carries the gradient
    behaviour: torch.Tensor  # [num_tokens] from the engine that sampled the token
    advantages: torch.Tensor  # [num_tokens]
    mask: torch.Tensor  # [num_tokens] bool, true on trained tokens
    sequence_index: torch.Tensor  # [num_tokens] int64 in [0, num_sequences)
    num_sequences: int
    proximal: torch.Tensor | None = None  # [num_tokens] recomputed at step start, where the loss needs it
    trust_region: TrustRegion | None = None  # of the whole minibatch, where the loss needs it
    mean_weight: torch.Tensor | None = None  # [] of the whole minibatch's truncated weights, where the loss needs it

    def require_proximal(self) -> torch.Tensor:
        assert self.proximal is not None, "this loss needs proximal log-probabilities"
        return self.proximal


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """One loss per token. ``counts`` are sums over the masked tokens, so that they add up over micro-batches."""

    per_token: torch.Tensor  # [num_tokens], zero where masked out
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: torch.Tensor | None = None  # [num_tokens] bool, tokens that a cap or rejection removes from the loss


LossFunction = Callable[[TokenBatch, Any], PolicyLoss]  # the second is the loss's own settings class


class LossError(ConfigError):
    """A policy loss returned an unusable result; the message names the loss, the step and the expected result."""


def _told(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {list(value.shape)} and {value.dtype}"
    return f"of type {type(value).__name__}"


def check_shape(result: object, tokens: TokenBatch, where: str) -> None:
    """Check type, shape and names of a loss's result. ``where`` names loss and step.

    Raises:
        LossError: the result is no ``PolicyLoss`` of one floating-point number per token that depends on the policy, or has
            a count with a reserved name.
    """
    shape = list(tokens.logprobs.shape)
    expected = f"a PolicyLoss whose per_token is a floating-point tensor of shape {shape}"
    if not isinstance(result, PolicyLoss):
        raise LossError(f"{where} returned a {type(result).__name__}; expected {expected}")
    per_token, left_out = result.per_token, result.left_out
    is_numbers = isinstance(per_token, torch.Tensor) and per_token.is_floating_point()
    if not is_numbers or list(per_token.shape) != shape:
        raise LossError(f"{where} returned a per_token {_told(per_token)}; expected {expected}")
    if tokens.logprobs.requires_grad and not per_token.requires_grad:
        raise LossError(f"{where} returned a per_token that does not depend on tokens.logprobs; expected {expected}")
    is_mask = isinstance(left_out, torch.Tensor) and left_out.dtype == torch.bool and list(left_out.shape) == shape
    if left_out is not None and not is_mask:
        raise LossError(
            f"{where} returned a left_out {_told(left_out)}; expected a bool tensor of shape {shape}, or none"
        )
    for name in result.counts:
        if not name.endswith("_tokens") or name in RESERVED_COUNTS or name.startswith(RESERVED_PREFIXES):
            raise LossError(
                f"{where} returned a count named {name!r}; expected names that end in _tokens, and none of "
                f"{', '.join(sorted(RESERVED_COUNTS))}, and no beginning {' or '.join(RESERVED_PREFIXES)}"
            )


LOG_RATIO_CLAMP = 20.0  # of log ratios before exp, so that no ratio overflows; no gradient flows beyond


def clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def log_ratio(new: torch.Tensor, old: torch.Tensor, clamp: float = LOG_RATIO_CLAMP) -> torch.Tensor:
    """new - old, clamped so that exp never overflows. For a user's own loss. [num_tokens]"""
    return (new - old).clamp(-clamp, clamp)


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` where ``mask``, exact zeros elsewhere (a product would let an infinity through as NaN)."""
    return torch.where(mask, values, torch.zeros_like(values))


def sequence_means(
    values: torch.Tensor, mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Mean of the masked values of each sequence, 0 for a sequence without any. [num_sequences]"""
    sums = values.new_zeros(num_sequences).index_add(0, sequence_index, masked(values, mask))
    return sums / sequence_lengths(mask, sequence_index, num_sequences).clamp(min=1).to(values.dtype)


def sequence_lengths(mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Number of masked tokens of each sequence. [num_sequences] int64"""
    return torch.zeros(num_sequences, dtype=torch.int64, device=mask.device).index_add(0, sequence_index, mask.long())


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    sequence_index: torch.Tensor,
    num_sequences: int,
    totals: MinibatchTotals,
    config: AlgorithmConfig,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce losses of tokens. [num_tokens] -> []

    Sums are over ``mask``, lengths of sequences over ``counted`` (default: the mask); ``totals`` are those of the whole
    minibatch, over all ranks.
    """
    values = masked(per_token, mask)
    if config.loss_aggregation == "token_mean":
        return values.sum() / max(totals.num_trained_tokens, 1)
    if config.loss_aggregation == "sequence_mean":
        lengths = (
            sequence_lengths(mask if counted is None else counted, sequence_index, num_sequences)
            .clamp(min=1)
            .to(values.dtype)
        )
        return (values / lengths[sequence_index]).sum() / max(totals.num_sequences, 1)
    assert config.constant_denominator is not None
    per = max(totals.num_sequences, 1) if config.loss_aggregation == "constant" else 1
    return values.sum() / (per * config.constant_denominator)


def kl_per_token(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    estimator: str,
    clamp_estimate: float | None = None,
) -> torch.Tensor:
    """The estimate per token, at most ``clamp_estimate`` in magnitude. [num_tokens] each -> [num_tokens]"""
    estimate = KL_ESTIMATORS[estimator](clamped(logprobs - reference))
    return estimate if clamp_estimate is None else estimate.clamp(-clamp_estimate, clamp_estimate)


# --- Loads a user's own loss by import path: ``name: my_losses:clipped``.


def loss_by_path(path: str) -> LossFunction:
    """The function at ``path``, with the signature of Rollmill's own losses.

    Raises:
        ConfigError: the module or the name cannot be found, or the object is not callable.
    """
    function = load_object(path)
    check_call(function, f"algorithm.name: {path}", LOSS, "tokens", "settings")

    def loss(tokens: TokenBatch, config: LossByPath) -> PolicyLoss:
        try:
            result: PolicyLoss = function(tokens, config.settings)
        except SystemExit as error:  # the rank would leave as at the end of a run
            raise RuntimeError(f"algorithm.name: {path} raised SystemExit: {error}") from error
        return result

    return loss


# --- Importance weights between two policies: per token, or one for all tokens of a sequence.


def importance_weights(
    new: torch.Tensor, old: torch.Tensor, tokens: TokenBatch, level: ImportanceLevel
) -> torch.Tensor:
    """new / old, not truncated; ones with ``level: none``. [num_tokens] each -> [num_tokens]"""
    if level == "none":
        return torch.ones_like(new)
    d = new - old
    if level != "token":
        axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        means = sequence_means(d, *axes)
        per_sequence = means if level == "sequence_mean" else means * sequence_lengths(*axes)
        d = per_sequence[tokens.sequence_index]
    return clamped(d).exp()


def truncated(weights: torch.Tensor, settings: ImportanceSettings) -> torch.Tensor:
    """The weights within [importance_floor, importance_cap]. [num_tokens]"""
    return weights.clamp(settings.importance_floor, settings.importance_cap)


def outside(weights: torch.Tensor, settings: ImportanceSettings) -> torch.Tensor:
    """Mask of the weights below the floor or above the cap. [num_tokens] bool"""
    return (weights < settings.importance_floor) | (weights > settings.importance_cap)


def weight_sum(weights: torch.Tensor, tokens: TokenBatch, level: ImportanceLevel) -> torch.Tensor:
    """(sum, number) of the weights of tokens, or of sequences for ``level`` sequence. [2] float64

    These add up over micro-batches and ranks, to the mean that ``importance_normalize`` divides by.
    """
    if level == "token":
        values, count = masked(weights, tokens.mask), tokens.mask.sum()
    else:
        axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        values, count = sequence_means(weights, *axes), (sequence_lengths(*axes) > 0).sum()
    return torch.stack([values.sum(dtype=torch.float64), count.double()])


def cispo(tokens: TokenBatch, config: Cispo) -> PolicyLoss:
    """The CISPO loss. All shapes [num_tokens]."""
    weights = importance_weights(tokens.logprobs.detach(), tokens.behaviour, tokens, config.importance_level)
    loss = -truncated(weights, config) * tokens.advantages * tokens.logprobs
    count = (tokens.mask & outside(weights, config)).sum()
    return PolicyLoss(per_token=masked(loss, tokens.mask), counts={"truncated_tokens": count})


# --- PPO's clipped surrogate, with clip-higher and dual clip. ``grpo`` is this loss over group advantages.


def ppo_clip(tokens: TokenBatch, config: ClipSettings) -> PolicyLoss:
    """Clip against the behaviour policy. All shapes [num_tokens]."""
    return clipped_surrogate(tokens, tokens.behaviour, config)


def clipped_surrogate(tokens: TokenBatch, old: torch.Tensor, config: ClipSettings) -> PolicyLoss:
    """The surrogate against any ``old`` log-probabilities (behaviour or proximal). All shapes [num_tokens]."""
    ratio = clamped(tokens.logprobs - old).exp()
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1.0 - config.eps_clip, 1.0 + config.upper_clip) * tokens.advantages
    loss = torch.maximum(plain, clipped)
    counts = {"clipped_tokens": (tokens.mask & (clipped > plain)).sum()}
    if config.c_clip is not None:
        ceiling = -config.c_clip * tokens.advantages
        over = (tokens.advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        counts["dual_clipped_tokens"] = (tokens.mask & over).sum()
    return PolicyLoss(per_token=masked(loss, tokens.mask), counts=counts)


def decoupled_ppo(tokens: TokenBatch, config: DecoupledPpo | M2poMask) -> PolicyLoss:
    """The decoupled PPO loss. All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    weights = importance_weights(proximal, tokens.behaviour, tokens, config.importance_level)
    dropped = outside(weights, config)
    return PolicyLoss(
        per_token=masked(weights * surrogate.per_token, tokens.mask & ~dropped),
        counts=surrogate.counts | {"dropped_tokens": (tokens.mask & dropped).sum()},
        left_out=dropped,
    )


# --- GSPO: one ratio per sequence (arXiv 2507.18071).


def gspo(tokens: TokenBatch, config: Gspo) -> PolicyLoss:
    """The GSPO loss. [num_tokens] -> [num_tokens]; in between [num_sequences]."""
    axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
    mean_log_ratio = sequence_means(tokens.logprobs - tokens.behaviour, *axes)
    ratio = clamped(mean_log_ratio).exp()  # [num_sequences]
    advantages = sequence_means(tokens.advantages, *axes)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.eps_clip, 1.0 + config.eps_clip_higher) * advantages
    is_clipped = (clipped > plain)[tokens.sequence_index]
    return PolicyLoss(
        per_token=masked(torch.maximum(plain, clipped)[tokens.sequence_index], tokens.mask),
        counts={"clipped_tokens": (tokens.mask & is_clipped).sum()},
    )


# --- M2PO: a trust region whose width follows from the second moment of the log ratio (arXiv 2510.01161).


CAP_LOW, CAP_HIGH = math.log1p(-0.95), math.log1p(20.0)
NO_CLIP = math.log1p(99_999.0)  # finite, because metrics report this value
_ROUNDINGS = 8  # the bounds are widened by so many roundings of the log ratios' type


def m2po(tokens: TokenBatch, config: M2po) -> PolicyLoss:
    """-min(r A, clip(r) A) within ``tokens.trust_region``, or the micro-batch's own. All shapes [num_tokens]."""
    d = clamped(tokens.logprobs - tokens.behaviour)
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
    own = (config.m2po_threshold, config.m2po_floor_low, config.m2po_floor_high)
    of_rule = (0.04, 0.3, 0.5) if by_authors else (0.01, 0.0, 0.0)
    threshold, floor_low, floor_high = (
        rule if number is None else number for number, rule in zip(own, of_rule, strict=True)
    )
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


# --- DPPO and IPO: a trust region in probability instead of in the ratio (arXiv 2602.04879; prime-rl's default loss).


def dppo(tokens: TokenBatch, config: Dppo) -> PolicyLoss:
    """All shapes [num_tokens]."""
    change = _change(tokens)
    ended = torch.where(tokens.advantages > 0, change > config.probability_high, change < -config.probability_low)
    return _loss(tokens, ended, config)


def ipo(tokens: TokenBatch, config: Ipo) -> PolicyLoss:
    """All shapes [num_tokens]."""
    return _loss(tokens, _change(tokens).abs() > config.probability_threshold, config)


def _change(tokens: TokenBatch) -> torch.Tensor:
    return tokens.logprobs.detach().exp() - tokens.behaviour.exp()


def _loss(tokens: TokenBatch, ended: torch.Tensor, config: Dppo | Ipo) -> PolicyLoss:
    d = clamped(tokens.logprobs - tokens.behaviour)
    loss = config.behaviour_penalty * d.square() - masked(d.exp() * tokens.advantages, ~ended)
    return PolicyLoss(
        per_token=masked(loss, tokens.mask), counts={"ended_tokens": (tokens.mask & ended).sum()}, left_out=ended
    )


def reinforce(tokens: TokenBatch, config: Reinforce) -> PolicyLoss:
    """The REINFORCE loss. All shapes [num_tokens]."""
    return PolicyLoss(per_token=masked(-tokens.advantages * tokens.logprobs, tokens.mask))


# --- SAPO: a soft gate on the ratio instead of a clip (arXiv 2511.20347).


FADED_BELOW = 0.5  # share of the gradient at r = 1 below which a token counts as clipped


def sapo(tokens: TokenBatch, config: Sapo) -> PolicyLoss:
    """The SAPO loss. All shapes [num_tokens]."""
    d, advantages = tokens.logprobs - tokens.behaviour, tokens.advantages
    if config.sapo_level == "sequence":
        axes = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        d = sequence_means(d, *axes)[tokens.sequence_index]
        advantages = sequence_means(advantages, *axes)[tokens.sequence_index]
    ratio = clamped(d).exp()
    positive = advantages > 0
    # Not torch.where of two numbers: its result is float32 before any conversion.
    tau = torch.full_like(ratio, config.sapo_tau_negative).masked_fill(positive, config.sapo_tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    faded = 4.0 * gate.detach() * (1.0 - gate.detach()) < FADED_BELOW
    return PolicyLoss(
        per_token=masked(-(4.0 / tau) * gate * advantages, tokens.mask),
        counts={"faded_tokens": (tokens.mask & faded).sum()},
    )


def tis(tokens: TokenBatch, config: Tis) -> PolicyLoss:
    """The TIS loss. All shapes [num_tokens]."""
    proximal = tokens.require_proximal()
    surrogate = clipped_surrogate(tokens, proximal, config)
    raw = importance_weights(proximal, tokens.behaviour, tokens, config.importance_level)
    weights = truncated(raw, config)
    if tokens.mean_weight is not None:
        weights = weights / tokens.mean_weight
    return PolicyLoss(
        per_token=masked(weights * surrogate.per_token, tokens.mask),
        counts=surrogate.counts | {"truncated_tokens": (tokens.mask & outside(raw, config)).sum()},
    )


# --- The losses, and the dict that names them.


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A loss and the inputs that the training step must prepare."""

    loss: LossFunction
    needs_proximal: bool = False  # the loss reads log-probabilities recomputed at step start
    needs_whole_proximal: bool = False  # statistics over the whole minibatch read them too
    needs_trust_region: bool = False  # M2PO: second moments of the current policy over the whole minibatch


ALGORITHMS: dict[str, Algorithm] = {
    "m2po": Algorithm(m2po, needs_trust_region=True),
    "m2po_mask": Algorithm(decoupled_ppo, needs_proximal=True, needs_whole_proximal=True),
    "ppo_clip": Algorithm(ppo_clip),
    "grpo": Algorithm(ppo_clip),
    "decoupled_ppo": Algorithm(decoupled_ppo, needs_proximal=True),
    "tis": Algorithm(tis, needs_proximal=True),
    "gspo": Algorithm(gspo),
    "sapo": Algorithm(sapo),
    "cispo": Algorithm(cispo),
    "reinforce": Algorithm(reinforce),
    "dppo": Algorithm(dppo),
    "ipo": Algorithm(ipo),
}


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    """The loss that a section names, with the inputs that these settings require.

    Raises:
        ConfigError: the section names no loss, or an import path leads to no function.
    """
    if isinstance(config, LossByPath):
        found = Algorithm(loss_by_path(config.name), needs_proximal=config.proximal)
    elif config.name in ALGORITHMS:
        found = ALGORITHMS[config.name]
    else:
        raise ConfigError(f"algorithm.name is {config.name!r}: write one of {', '.join(ALGORITHMS)}, or an import path")
    if config.rejection or (isinstance(config, Tis) and config.importance_normalize):
        found = replace(found, needs_whole_proximal=True)
    return found


# --- Rejection masks: remove tokens or sequences on which the trainer's policy and the engine's differ too much.


_CRITERIA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ratio": KL_ESTIMATORS["k1"],  # compared in log space
    "k2": KL_ESTIMATORS["k2"],
    "k3": lambda x: KL_ESTIMATORS["k3"](-x),
    "k3_reverse": KL_ESTIMATORS["k3"],
}


def kept_by(
    criteria: Seq[RejectionConfig],
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    mask: torch.Tensor,
    sequence_index: torch.Tensor,
    num_sequences: int,
) -> torch.Tensor:
    """The loss mask without the rejected tokens. [num_tokens] each -> [num_tokens] bool"""
    x = clamped(proximal - behaviour)
    kept = mask
    for config in criteria:
        value = _CRITERIA[config.criterion](x)
        if config.level == "sequence":
            value = _reduced(value, mask, sequence_index, num_sequences, config.reduce)[sequence_index]
        lower, upper = config.bounds
        kept = kept & (value >= lower) & (value <= upper)
    return kept


def _reduced(
    values: torch.Tensor, mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int, how: str
) -> torch.Tensor:
    """Reduce values over the masked tokens of each sequence. [num_tokens] -> [num_sequences]"""
    if how == "max":
        lowest = torch.where(mask, values, values.new_full((), -torch.inf))
        start = values.new_full((num_sequences,), -torch.inf)
        return start.scatter_reduce(0, sequence_index, lowest, "amax")
    sums = values.new_zeros(num_sequences).index_add(0, sequence_index, masked(values, mask))
    return sums if how == "sum" else sums / sequence_lengths(mask, sequence_index, num_sequences).clamp(min=1)


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
