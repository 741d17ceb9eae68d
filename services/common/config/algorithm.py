"""The ``algorithm`` section of a recipe: which loss, which advantages, how per-token losses become one number.

Plain pydantic, no torch: a recipe is checked before anything heavy is imported. It knows nothing about tensors;
``services.trainer.algorithms`` has one short file per loss.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from services.common.config.credit import CreditConfig

LossName = Literal[
    "m2po", "m2po_mask", "ppo_clip", "grpo", "decoupled_ppo", "tis", "gspo", "sapo", "cispo", "reinforce"
]  # fmt: skip
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
M2poScope = Literal["minibatch", "micro_batch"]


class AlgorithmConfig(CreditConfig):
    """What a training step minimises.

    >>> AlgorithmConfig(name="ppo_clip", eps_clip_higher=0.28).upper_clip
    0.28
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: LossName = "m2po"
    """The policy loss; `grpo` is `ppo_clip` under the name people look for."""

    eps_clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """PPO clip: a ratio below 1 - eps_clip earns no further gradient (also the upper bound unless eps_clip_higher)."""

    eps_clip_higher: float | None = Field(default=None, gt=0.0)
    """Upper bound 1 + eps_clip_higher when it differs from eps_clip (DAPO: 0.28)."""

    c_clip: float | None = Field(default=None, gt=1.0)
    """Dual clip: tokens with a negative advantage cost at most c_clip * |advantage|. Off when null."""

    early_stop_ratio: float | None = Field(default=None, gt=1.0)
    """Leave out an optimizer update, and those that follow in its training step, when the mean ratio policy / behaviour over the
    minibatch's trained tokens is above this: then something is wrong with the data or the weights. Off when null."""

    m2po_threshold: float = Field(default=0.01, gt=0.0)
    """M2PO: largest allowed mean second moment of the log ratio over the tokens the trust region binds."""

    m2po_scope: M2poScope = "minibatch"
    """Where M2PO takes its second moments: over the whole minibatch and all ranks, or over each micro-batch (free, but
    the gradient then depends on packing; for comparison only)."""

    sapo_tau_positive: float = Field(default=1.0, gt=0.0)
    """SAPO: how fast the gate closes around ratio 1 where the advantage is positive."""

    sapo_tau_negative: float = Field(default=1.05, gt=0.0)
    """SAPO: the same for the other advantages; larger than for positive ones, as what they push up is less certain."""

    advantage_eps: float = Field(default=1e-5, ge=0.0)
    """Added to the group's standard deviation in `grpo`."""

    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model in the loss; above 0 the trainer loads a reference model."""

    kl_reward_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL (k1) to the reference model in the reward of every token, summed to the end of its sequence; above
    0 the trainer loads a reference model."""

    kl_estimator: KlEstimator = "k3"
    """In the loss: per-token estimator of KL(policy || reference). k1 is unbiased as a value, but its expected gradient is zero."""

    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""

    loss_aggregation: LossAggregation = "token_mean"
    """How per-token losses become one number: over all tokens, first within a sequence, or by a constant length."""

    constant_denominator: int | None = Field(default=None, gt=0)
    """`loss_aggregation: constant` divides by (sequences of the minibatch * this), e.g. the longest response."""

    reward_bias: float = 0.0
    """Rewards become clip((reward + reward_bias) * reward_scale, -reward_clip, +reward_clip)."""

    reward_scale: float = Field(default=1.0, gt=0.0)
    """See reward_bias."""

    reward_clip: float = Field(default=20.0, gt=0.0)
    """See reward_bias."""

    importance_cap: float = Field(default=5.0, gt=0.0)
    """Largest weight proximal / behaviour: `tis` truncates there, `decoupled_ppo` and `m2po_mask` drop such tokens;
    `cispo` truncates policy / behaviour there."""

    log_ratio_clamp: float = Field(default=20.0, gt=0.0)
    """Log ratios are clamped to this magnitude before exp, so no ratio overflows; beyond it no gradient flows."""

    @property
    def needs_reference(self) -> bool:
        """Whether the trainer holds a second model with the initial weights."""
        return self.kl_coefficient > 0.0 or self.kl_reward_coefficient > 0.0

    @property
    def upper_clip(self) -> float:
        """The eps of the upper bound 1 + eps."""
        return self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher

    @model_validator(mode="after")
    def _check_combination(self) -> AlgorithmConfig:
        if self.loss_aggregation == "constant" and self.constant_denominator is None:
            raise ValueError(
                "loss_aggregation: constant needs constant_denominator, e.g. the longest response in tokens"
            )
        if self.loss_aggregation != "constant" and self.constant_denominator is not None:
            raise ValueError("constant_denominator needs loss_aggregation: constant")
        return self
