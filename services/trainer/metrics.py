"""Sums values over micro-batches and ranks, and computes the metrics of a training step from the sums.

Also counts trained tokens without a gradient by cause (``add_zero_gradients``), and computes the effective sample size of the
importance ratios.

The gradient is that of the policy loss with respect to each token's log-probability, as the backward pass computes it:
the loss gets a view of the log-probabilities, and autograd keeps the gradient of that view. So the audit covers every
loss, also one of a user, and needs no further pass. The KL and entropy terms are excluded.

A token without gradient has one cause, the first that holds:

    zero_advantage   its advantage is 0
    masked           the loss mask excludes the token (m2po_mask, rejection)
    dropped          the loss reports the token as left out (an importance cap, a probability mask)
    clamped          |log ratio| is beyond LOG_RATIO_CLAMP
    clipped          the rest: the loss is flat there

Effective sample size of a minibatch's n ratios w = policy / behaviour: (sum w)^2 / sum w^2, here as a share of n
(Kong, 1992): 1 when all weigh the same, 1 / n when one token has all the weight.

Also measures the use of the device by a training step (``Usage``): floating-point operations, their share of the peak,
memory.

Operations are those of one forward and one backward pass over the batch, counted as for "model FLOPs utilisation": 2 for
each weight of a matrix per token, the causal half of attention, twice as much backwards (as much for a frozen base, whose
weights have no gradient). Common beginnings of sequences are computed once and count once. Recomputation (gradient
checkpointing, the head's blocks) and further passes (proximal, trust region, reference) do not count, so they lower the
share.
"""

from __future__ import annotations

import resource
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from services.common.errors import ConfigError
from services.common.records import MinibatchTotals, RankBatch
from services.trainer.losses import KL_ESTIMATORS, LOG_RATIO_CLAMP, RESERVED_COUNTS, PolicyLoss, TokenBatch, clamped
from services.trainer.model.micro_batches import MicroBatch
from services.trainer.model.optimizer import Update
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks import Ranks

_GIB = 1 << 30
_FORWARD_AND_BACKWARD = 3
_OF_A_FROZEN_BASE = 2
_SUM = "forward_flops"

# Dense peaks from the data sheets in 10^12/s: prefix of the device's name, bfloat16, float32 (not TF32).
# The first matching prefix counts, so the longer names come first.
PEAK_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("NVIDIA H100 PCIe", 756.0, 51.0),
    ("NVIDIA H100 NVL", 835.0, 60.0),
    ("NVIDIA H100", 989.0, 67.0),
    ("NVIDIA H200", 989.0, 67.0),
    ("NVIDIA A100", 312.0, 19.5),
    ("NVIDIA L40S", 362.0, 91.6),
    ("NVIDIA L4", 121.0, 30.3),
)


class Sums:
    """Named float64 sums, [] each: ``values`` are those of this rank so far. They stay on the device until ``reduce``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.values: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        term = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
        self.values[name] = self.values[name] + term if name in self.values else term

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """Sums over all ranks.

        Raises:
            ConfigError: on every rank, when one did not add the same names as the others (zeros count).
        """
        names = sorted(self.values)
        mark = zlib.crc32("\n".join(names).encode())
        largest, smallest = ranks.max(mark, -mark)
        if largest != -smallest:
            counts = ", ".join(name for name in names if name.endswith("_tokens"))
            raise ConfigError(
                f"the ranks of a training step have different counts, this one {counts}: a policy loss must return the same "
                "counts for every micro-batch, zeros for one without tokens"
            )
        if not names:
            return {}
        total = ranks.sum(torch.stack([self.values[n] for n in names]))
        return dict(zip(names, total.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one training step over all ranks, the same on each. Means are over trained tokens if not stated."""

    training_step: int
    loss: float  # mean over the minibatches whose gradient was computed
    grad_norm: float  # mean over updates, before clipping
    grad_norm_max: float
    learning_rate: float  # of the last update
    updates_applied: int
    updates_skipped: int  # gradient not finite, nothing to train, or stopped early
    entropy: float  # of the distribution that the token was drawn from, in nats
    kl_reference: float  # by kl_estimator, by k1 when it is in the reward; 0 without a reference model
    mismatch_abs: float  # mean |l - b| in the first minibatch, before any update
    mismatch_kl: float  # KL(behaviour || trainer) there, by k3
    mismatch_fresh_abs: float  # the same over fresh tokens only: engine against trainer, no staleness, no kept cache
    mismatch_fresh_kl: float
    fresh_share: (
        float  # of the first minibatch's trained tokens, those that the newest version alone computed (not mixed_cache)
    )
    batch_reward_mean: float  # over the sequences of the batch, as they are trained on: shaped, replayed ones included
    advantage_abs_mean: float
    staleness_mean: float  # over sequences
    num_sequences: int
    num_tokens: int  # of the sequences whose gradient was computed, prompts included
    num_computed_tokens: int  # of these, tokens in the forward pass: common beginnings count once
    num_trained_tokens: int
    num_micro_batches: int  # on this rank, dummies included
    seconds: float
    tokens_per_second: float
    tflops: float | None = None  # 10^12 operations per second and rank, of a forward and a backward pass
    mfu: float | None = None  # tflops as a share of the device's peak; None for an unknown device
    memory_peak_gib: float = 0.0  # of the rank that took most: tensors on a GPU, else the process
    algorithm: Mapping[str, float] = field(default_factory=dict)  # e.g. clipped_share, m2po_eps_low

    def as_dict(self) -> dict[str, float]:
        """Flat, for metrics files: ``algorithm`` entries keep their own names, unknown values are absent."""
        values = {k: v for k, v in asdict(self).items() if k != "algorithm" and v is not None}
        return {**values, **self.algorithm}


def step_metrics(
    batch: RankBatch,
    total: Mapping[str, float],
    updates: Sequence[Update],
    *,
    num_computed: int,
    num_micro_batches: int,
    seconds: float,
    usage: Mapping[str, float | None],
) -> StepMetrics:
    """The metrics of one training step.

    ``total`` has the sums over all ranks. ``usage`` comes from ``Usage.metrics``. ``num_computed`` counts the minibatches whose gradient was computed, with or without an update.
    """
    applied = [u for u in updates if u.applied]
    algorithm = {
        name.removesuffix("_tokens") + "_share": _mean_of(total, name, "trained_tokens")
        for name in total
        if name.endswith("_tokens") and name not in RESERVED_COUNTS
    } | {name: total[name] / max(num_computed, 1) for name in total if name.startswith("m2po_")}
    algorithm |= _credit_metrics(total, num_computed)
    return StepMetrics(
        training_step=batch.training_step,
        loss=total.get("loss", 0.0) / max(num_computed, 1),
        grad_norm=sum(u.grad_norm for u in updates) / max(len(updates), 1),
        grad_norm_max=max((u.grad_norm for u in updates), default=0.0),
        learning_rate=updates[-1].learning_rate if updates else 0.0,
        updates_applied=len(applied),
        updates_skipped=len(batch.minibatches) - len(applied),
        entropy=_mean_of(total, "entropy", "trained_tokens"),
        kl_reference=_mean_of(total, "kl_reference", "trained_tokens"),
        mismatch_abs=_mean_of(total, "first_abs", "first_tokens"),
        mismatch_kl=_mean_of(total, "first_kl", "first_tokens"),
        mismatch_fresh_abs=_mean_of(total, "fresh_abs", "fresh_tokens"),
        mismatch_fresh_kl=_mean_of(total, "fresh_kl", "fresh_tokens"),
        fresh_share=_mean_of(total, "fresh_tokens", "first_tokens"),
        batch_reward_mean=_mean_of(total, "reward", "sequences"),
        advantage_abs_mean=_mean_of(total, "advantage_abs", "trained_tokens"),
        staleness_mean=_mean_of(total, "staleness", "sequences"),
        num_sequences=int(total["sequences"]),
        num_tokens=int(total.get("tokens", 0)),
        num_computed_tokens=int(total.get("computed", 0)),
        num_trained_tokens=int(total.get("trained_tokens", 0)),
        num_micro_batches=num_micro_batches,
        seconds=seconds,
        tokens_per_second=total.get("tokens", 0.0) / max(seconds, 1e-9),
        **usage,  # type: ignore[arg-type]
        algorithm={**algorithm, **shares(total, batch.minibatches)},
    )


def _credit_metrics(total: Mapping[str, float], num_computed: int) -> dict[str, float]:
    """Metrics of the value head and the teacher, if present, with values and returns at the start of the step."""
    found: dict[str, float] = {}
    count = total.get("credited", 0.0)  # tokens of the whole batch, those of minibatches that were left out too
    if "distillation_kl" in total:
        found["distillation_kl"] = _mean_of(total, "distillation_kl", "credited")
    if "value_error_squared" in total and count:
        found["value_mean"], found["return_mean"] = total["value"] / count, total["return"] / count
        unexplained = total["value_error_squared"] / count - (total["value_error"] / count) ** 2
        variance = total["return_squared"] / count - found["return_mean"] ** 2
        # Equal returns have no variance to explain.
        found["explained_variance"] = 1.0 - unexplained / variance if variance > 1e-12 else 0.0
        found["value_loss"] = total.get("value_loss", 0.0) / max(num_computed, 1)
    return found


def _mean_of(total: Mapping[str, float], name: str, count: str) -> float:
    """total[name] / total[count]; 0 when the count is 0."""
    number = total.get(count, 0.0)
    return total.get(name, 0.0) / number if number else 0.0


SIGNS = ("positive", "negative")  # of a token's advantage
_CAUSES = ("masked", "dropped", "clamped", "clipped")  # why a token with an advantage has no gradient
_RATIOS, _SQUARES = "ratios/", "squared_ratios/"  # names of sums, before the minibatch


@torch.no_grad()
def add_zero_gradients(sums: Sums, tokens: TokenBatch, loss: PolicyLoss) -> None:
    """Count the tokens without gradient by cause, after their backward pass. Their log-probabilities are a view that keeps its gradient.

    Names in ``_tokens`` become shares of trained tokens.
    """
    seen, advantages = tokens.logprobs, tokens.advantages
    without = torch.ones_like(tokens.mask) if seen.grad is None else seen.grad == 0  # None: the loss does not use them
    dropped = torch.zeros_like(tokens.mask) if loss.left_out is None else loss.left_out
    clamp = (seen.detach() - tokens.behaviour).abs() > LOG_RATIO_CLAMP
    holds = dict(zip(_CAUSES, (~tokens.mask, dropped, clamp, torch.ones_like(clamp)), strict=True))
    for sign, of_sign in zip(SIGNS, (advantages > 0, advantages < 0), strict=True):
        left = without & of_sign
        sums.add(f"advantage_{sign}_tokens", of_sign.sum())
        for cause, own in holds.items():  # the first that holds counts
            sums.add(f"zero_gradient/{sign}/{cause}_tokens", (left & own).sum())
            left = left & ~own
    sums.add("zero_gradient/zero_advantage_tokens", (without & (advantages == 0)).sum())
    sums.add("zero_gradient_tokens", without.sum())


@torch.no_grad()
def add_ratios(sums: Sums, minibatch: int, batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Add the ratios policy / behaviour of a micro-batch to its minibatch; returns their sum. []"""
    ratios = clamped(logprobs.detach() - batch.behaviour).double().exp()
    total = ratios.sum()
    sums.add(f"{_RATIOS}{minibatch}", total)
    sums.add(f"{_SQUARES}{minibatch}", ratios.square().sum())
    return total


def add_mismatch(sums: Sums, batch: MicroBatch, logprobs: torch.Tensor, fresh_version: int) -> None:
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
    """Metrics of a step with other denominators than all trained tokens. ``total`` are its sums over all ranks.

    ``zero_gradient_of_SIGN_share``: share without gradient of the tokens whose advantage has that sign.
    ``effective_sample_share``: effective sample size of the ratios as a share of the trained tokens, mean and minimum
    over the minibatches. Each is absent without such tokens.
    """
    found: dict[str, float] = {}
    for sign in SIGNS:
        if count := total.get(f"advantage_{sign}_tokens", 0.0):
            without = sum(total[f"zero_gradient/{sign}/{cause}_tokens"] for cause in _CAUSES)
            found[f"zero_gradient_of_{sign}_share"] = without / count
    effective = [
        total[f"{_RATIOS}{index}"] ** 2 / (totals.num_trained_tokens * total[f"{_SQUARES}{index}"])
        for index, totals in enumerate(minibatches)
        if total.get(f"{_SQUARES}{index}")
    ]
    if effective:
        found["effective_sample_share"] = sum(effective) / len(effective)
        found["effective_sample_share_min"] = min(effective)
    return found


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak in operations per second by its name; None for an unknown device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(
        (
            (half if dtype != torch.float32 else full) * 1e12
            for start, half, full in PEAK_TFLOPS
            if name.startswith(start)
        ),
        None,
    )


class Usage:
    """Measures the use of the device in each training step, and counts operations of a dense decoder's forward pass.

    ``per_token`` is that of the layers' matrices, ``per_target`` of the head, which only trained tokens pass, ``per_pair`` of
    attention, for each token and each that it sees, itself included.
    """

    def __init__(self, model: PolicyModel, ranks: Ranks, peak: float | None) -> None:
        self._passes = _FORWARD_AND_BACKWARD if model.adapter is None else _OF_A_FROZEN_BASE
        self._ranks = ranks
        self._peak = peak
        weights = [parameter for layer in model.layers for parameter in layer.parameters()]
        # A token uses only some of a mixture's experts, which are one tensor of three dimensions.
        self.is_dense = bool(weights) and all(weight.ndim <= 2 for weight in weights)
        if self.is_dense:
            config = model.causal_lm.config
            heads = int(config.num_attention_heads)
            head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
            self.per_token = 2.0 * sum(weight.numel() for weight in weights if weight.ndim == 2)
            self.per_target = 2.0 * model.causal_lm.get_output_embeddings().weight.numel()
            self.per_pair = 4.0 * heads * head_dim * len(model.layers)

    def add(self, batch: MicroBatch, sums: Sums) -> None:
        """Count one trained micro-batch; dummies do not count."""
        if self.is_dense:
            flops = (
                self.per_token * len(batch.token_ids)
                + self.per_target * len(batch.targets.predecessors)
                + self.per_pair * batch.documents.num_pairs
            )
            sums.add(_SUM, 0.0 if batch.is_dummy else flops)

    def metrics(self, total: Mapping[str, float], seconds: float) -> dict[str, float | None]:
        """``tflops`` and ``mfu`` of one rank, and the largest ``memory_peak_gib`` of all ranks. A collective."""
        # On a CPU, the peak of resident memory since the process start, which Linux counts in KiB.
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._ranks.device.type == "cuda":  # of tensors, during the step
            peak_bytes = torch.cuda.max_memory_allocated(self._ranks.device)
        per_second = None
        if self.is_dense:
            flops = self._passes * total.get(_SUM, 0.0)
            per_second = flops / self._ranks.world_size / max(seconds, 1e-9)
        return {
            "tflops": None if per_second is None else per_second / 1e12,
            "mfu": None if per_second is None or self._peak is None else per_second / self._peak,
            "memory_peak_gib": self._ranks.max(peak_bytes)[0] / _GIB,
        }
