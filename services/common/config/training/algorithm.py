"""Settings that all losses share in the ``algorithm`` section of a recipe: advantages, KL, entropy, aggregation,
rewards.

``services.common.config.training.losses`` has one class for each loss, with the keys of that loss alone. Plain
pydantic, no torch and no tensors: a recipe is checked before heavy imports. ``services.trainer.algorithms`` has one
short file per loss.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.config.training.credit import CreditConfig

LossAggregation = Literal["token_mean", "sequence_mean", "constant", "sum"]
KlEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]
RejectionLevel = Literal["token", "sequence"]
RejectionCriterion = Literal["ratio", "k2", "k3", "k3_reverse"]
RejectionReduce = Literal["sum", "mean", "max"]
RejectionDenominator = Literal["all", "kept"]


class RejectionConfig(Section):
    """Bounds on the ratio of the proximal policy to the behaviour policy, outside of which tokens are not trained.

    >>> RejectionConfig(lower=0.5, upper=2.0).bounds[1] == math.log(2.0)
    True
    """

    level: RejectionLevel = "token"
    """Reject single tokens, or whole sequences."""

    criterion: RejectionCriterion = "ratio"
    """The bounded quantity, with x = proximal - behaviour: `ratio` exp(x), `k2` x^2 / 2, `k3` exp(x) - 1 - x,
    `k3_reverse` exp(-x) - 1 + x."""

    reduce: RejectionReduce = "mean"
    """With `level: sequence`: how the tokens of a sequence become one value; ratios in log space, so `sum` is their product
    and `mean` their geometric mean."""

    lower: float | None = Field(default=None, gt=0.0)
    """Smallest ratio that is kept; of `criterion: ratio` alone."""

    upper: float | None = Field(default=None, gt=0.0)
    """Largest value that is kept."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value that is kept; of a ratio its logarithm."""
        if self.criterion != "ratio":
            return -math.inf, math.inf if self.upper is None else self.upper
        low = -math.inf if self.lower is None else math.log(self.lower)
        return low, math.inf if self.upper is None else math.log(self.upper)

    @model_validator(mode="after")
    def _check_bounds(self) -> RejectionConfig:
        if self.criterion != "ratio" and self.lower is not None:
            raise ValueError(f"lower is of criterion: ratio; {self.criterion} is 0 where the policies agree")
        if self.level == "token" and self.reduce != "mean":
            raise ValueError(f"reduce: {self.reduce} is of level: sequence; a token has one value")
        if self.lower is None and self.upper is None:
            raise ValueError("write lower, upper or both: without a bound no token is rejected")
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower ({self.lower}) must be below upper ({self.upper})")
        return self


class AlgorithmConfig(CreditConfig):
    """The settings that do not depend on the loss.

    >>> AlgorithmConfig(kl_coefficient=0.001).needs_reference
    True
    """

    name: str = ""
    """The policy loss, or the import path `package.module:function` of one."""

    early_stop_ratio: float | None = Field(default=None, gt=1.0)
    """Leave out an optimizer update, and those that follow in its training step, when the mean ratio policy / behaviour
    over the minibatch's trained tokens is above this: a sign of wrong data or weights. Off when null."""

    advantage_eps: float = Field(default=1e-5, gt=0.0)
    """Added to the group's standard deviation in `grpo`. Above 0: a group of nearly equal rewards is not blown up."""

    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model in the loss; above 0 the trainer loads a reference model."""

    kl_reward_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL (k1) to the reference model in the reward of every token, summed to the end of its sequence; above
    0 the trainer loads a reference model."""

    kl_estimator: KlEstimator = "k3"
    """In the loss: per-token estimator of KL(policy || reference). k1 is unbiased as a value, but its expected gradient is zero."""

    kl_clamp: float | None = Field(default=None, gt=0.0)
    """Largest magnitude of the estimate of one token in the loss (verl and AReaL: 10); no gradient flows beyond. `k3`
    of one token that the policy left grows like exp, and can take a whole update. Off when null."""

    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""

    loss_aggregation: LossAggregation = "token_mean"
    """How per-token losses become one number: over all tokens, first within a sequence, by sequences times a constant, or by
    a constant alone."""

    constant_denominator: int | None = Field(default=None, gt=0)
    """`loss_aggregation: constant` divides by (sequences of the minibatch * this), e.g. the longest response; 1 gives each sequence
    the sum of its tokens. `sum` divides by this alone."""

    rejection: list[RejectionConfig] = []
    """Leave out tokens or sequences on which the proximal and the behaviour policy are too far apart; all of several criteria must
    hold. Composes with every loss; costs a forward pass where a step has several minibatches."""

    rejection_denominator: RejectionDenominator = "all"
    """Whether rejected tokens and sequences count in the denominators of the loss: `all` (AReaL) or only the `kept`
    ones (verl)."""

    reward_bias: float = Field(default=0.0, allow_inf_nan=False)
    """Rewards become clip((reward + reward_bias) * reward_scale, -reward_clip, +reward_clip), and a group's statistics are of
    what they become."""

    reward_scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """See reward_bias."""

    reward_clip: float | None = Field(default=None, gt=0.0)
    """See reward_bias; `rewards_clipped` counts the changed ones. Off when null: a clip that binds without being asked
    for makes the best of a group equal to the second best."""

    log_ratio_clamp: float = Field(default=20.0, gt=0.0)
    """Log ratios are clamped to this magnitude before exp, so no ratio overflows; no gradient flows beyond."""

    @property
    def needs_reference(self) -> bool:
        """Whether the trainer holds a second model with the initial weights."""
        return self.kl_coefficient > 0.0 or self.kl_reward_coefficient > 0.0

    @property
    def gives_token_credit(self) -> bool:
        """Whether tokens of one sequence may have different advantages."""
        by_return = self.advantage == "gae" or self.gamma != 1.0
        return by_return or self.kl_reward_coefficient > 0.0 or self.distillation is not None

    @model_validator(mode="after")
    def _check_combination(self) -> AlgorithmConfig:
        if self.rejection_denominator == "kept" and not self.rejection:
            raise ValueError(
                "rejection_denominator: kept counts the tokens that rejection keeps; write rejection, or leave this key out"
            )
        by_constant = self.loss_aggregation in ("constant", "sum")
        if by_constant and self.constant_denominator is None:
            raise ValueError(
                f"loss_aggregation: {self.loss_aggregation} needs constant_denominator, e.g. the longest response in tokens"
            )
        if not by_constant and self.constant_denominator is not None:
            raise ValueError("constant_denominator needs loss_aggregation: constant or sum")
        if self.reward_range is not None and (self.reward_bias, self.reward_scale) != (0.0, 1.0):
            raise ValueError(
                f"advantage: {self.advantage} needs rewards {self.reward_range}: leave reward_bias and reward_scale out"
            )
        if self.advantage == "pass_at_k" and self.reward_clip is not None and self.reward_clip < 1.0:
            raise ValueError(
                f"advantage: pass_at_k needs rewards {self.reward_range}, and reward_clip {self.reward_clip:g} makes others: "
                "leave it out"
            )
        return self
