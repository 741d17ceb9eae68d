"""What every loss has in common in the ``algorithm`` section of a recipe: advantages, KL, entropy, aggregation, rewards.

``services.common.config.losses`` has one class for each loss, with what that loss alone reads. Plain pydantic, no torch: a recipe is
checked before anything heavy is imported. It knows nothing about tensors; ``services.trainer.algorithms`` has one short
file per loss.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce"]
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


class AlgorithmConfig(Section):
    """The settings that do not depend on the loss.

    >>> AlgorithmConfig(kl_coefficient=0.001).needs_reference
    True
    """

    name: str = ""
    """The policy loss, or the import path `package.module:function` of one."""

    early_stop_ratio: float | None = Field(default=None, gt=1.0)
    """Leave out an optimizer update, and those that follow in its training step, when the mean ratio policy / behaviour over the
    minibatch's trained tokens is above this: then something is wrong with the data or the weights. Off when null."""

    advantage: AdvantageName = "grpo"
    """`grpo` (R - mean)/(std + eps), `dr_grpo` R - mean, `rloo` R - mean of the others, `reinforce` R itself."""

    advantage_eps: float = Field(default=1e-5, gt=0.0)
    """Added to the group's standard deviation in `grpo`. Above 0: a group of nearly equal rewards is not blown up."""

    batch_normalize_advantages: bool = False
    """Normalise advantages to mean 0, std 1 over the trained tokens of the global batch (REINFORCE++)."""

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

    log_ratio_clamp: float = Field(default=20.0, gt=0.0)
    """Log ratios are clamped to this magnitude before exp, so no ratio overflows; beyond it no gradient flows."""

    @property
    def needs_reference(self) -> bool:
        """Whether the trainer holds a second model with the initial weights."""
        return self.kl_coefficient > 0.0 or self.kl_reward_coefficient > 0.0

    @model_validator(mode="after")
    def _check_combination(self) -> AlgorithmConfig:
        if self.loss_aggregation == "constant" and self.constant_denominator is None:
            raise ValueError(
                "loss_aggregation: constant needs constant_denominator, e.g. the longest response in tokens"
            )
        if self.loss_aggregation != "constant" and self.constant_denominator is not None:
            raise ValueError("constant_denominator needs loss_aggregation: constant")
        return self
