"""Settings of the ``algorithm`` section of a recipe: advantages, KL, entropy, aggregation and rewards, which all losses
share, and one class for each loss with the keys of that loss alone.

Plain pydantic, no torch and no tensors: a recipe is checked before heavy imports. ``services.trainer.losses`` computes them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from services.common.config.base import Section, refuse_unread

# --- Settings of credit assignment: discount, value head, teacher, normalisation of advantages.


AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce", "gae", "pass_at_k", "max_rl"]


class ValueHeadConfig(Section):
    """A linear map from the last hidden state to the expected return, trained beside the policy on the same trunk."""

    coefficient: float = Field(default=0.5, gt=0.0)
    """Weight of the value loss beside the policy loss."""
    clip: float | None = Field(default=0.2, gt=0.0)
    """The value loss is clipped where a value is further than this from the one at step start; null: no clip."""
    lr: float | None = Field(default=None, gt=0.0)
    """Peak learning rate of the head, on the schedule of `optimizer`; left out, that of the policy."""


class DistillationConfig(Section):
    """A teacher that rewards the student's own tokens by the teacher's probability of them. Its tokenizer is the
    policy's."""

    teacher: str | None = Field(default=None, min_length=1)
    """A policy of the recipe with `trained: false`. The replica that plays a rollout has the teacher's engine score it."""
    teacher_model: str | None = Field(default=None, min_length=1)
    """Instead of `teacher`, a model directory or hub name that the trainer itself holds beside the policy, frozen: for
    truncated sampling, and for engines that cannot score."""
    coefficient: float = Field(default=1.0, gt=0.0)
    """Weight of log p(teacher) - log p(student) in the advantage of each token."""
    task_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the task's own advantage in the sum; 0 distils and leaves rewards aside."""
    student: Literal["current", "behaviour"] = "current"
    """The log-probability that the teacher's is compared with: of the policy being trained, or of the one that sampled."""

    @model_validator(mode="after")
    def _one_teacher(self) -> DistillationConfig:
        if (self.teacher is None) == (self.teacher_model is None):
            raise ValueError(
                "distillation needs one teacher: write teacher, a policy of the recipe that is not trained, or teacher_model, "
                "a model that the trainer loads"
            )
        return self


class CreditConfig(Section):
    """The settings that ``AlgorithmConfig`` inherits from here."""

    advantage: AdvantageName = "grpo"
    """`grpo` (R - mean)/(std + eps), `dr_grpo` R - mean, `rloo` R - mean of the others, `reinforce` R itself, `gae` by a value
    head, `pass_at_k` for the best of `pass_k` rollouts, `max_rl` (R - mean)/mean."""

    deviation: Literal["group", "batch"] = "group"
    """The divisor of `grpo`: the deviation of the group, or of all rewards of the global batch (arXiv 2508.08221)."""

    pass_k: int | None = Field(default=None, ge=1)
    """`advantage: pass_at_k`: how many rollouts are scored together by their best."""

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount per trained token, of the outcome's reward and of the KL in the reward: `advantage: gae` and `reinforce`."""

    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0)
    """`advantage: gae`: 1 is the whole return minus the value, 0 trusts the value of the next token."""

    value_head: ValueHeadConfig | None = None
    """The value head, for `advantage: gae` only."""

    distillation: DistillationConfig | None = None
    """On-policy distillation from a teacher; left out, there is none."""

    batch_normalize_advantages: bool = False
    """Normalise advantages to mean 0, std 1 over the trained tokens of the global batch (REINFORCE++)."""

    normalize_deviation: Literal["population", "sample"] = "population"
    """Which deviation `batch_normalize_advantages` divides by: over n tokens, or over n - 1."""

    @model_validator(mode="after")
    def _check_credit(self) -> CreditConfig:
        if self.advantage == "gae" and self.value_head is None:
            raise ValueError("advantage: gae needs a value head: write value_head: {} for its defaults")
        if self.advantage == "pass_at_k" and self.pass_k is None:
            raise ValueError("advantage: pass_at_k needs pass_k: write how many rollouts are scored together")
        refuse_unread(
            self,
            "advantage",
            {
                "value_head": ("gae",),
                "gae_lambda": ("gae",),
                "gamma": ("gae", "reinforce"),
                "pass_k": ("pass_at_k",),
                "deviation": ("grpo",),
            },
        )
        if self.normalize_deviation != "population" and not self.batch_normalize_advantages:
            raise ValueError("normalize_deviation needs batch_normalize_advantages: true: leave it out")
        return self

    @property
    def reward_range(self) -> str | None:
        """The rewards that the advantage can be made from, if not all."""
        return {"pass_at_k": "of 0 or 1", "max_rl": "from 0 to 1"}.get(self.advantage)

    def takes_reward(self, reward: float) -> bool:
        """Whether the advantage can be made from this reward."""
        if self.advantage == "pass_at_k":
            return reward in (0.0, 1.0)
        return self.advantage != "max_rl" or 0.0 <= reward <= 1.0


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
        refuse_unread(self, "criterion", {"lower": ("ratio",)})
        refuse_unread(self, "level", {"reduce": ("sequence",)})
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

    reward_bias: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Rewards become clip((reward + reward_bias) * reward_scale, -reward_clip, +reward_clip), and a group's statistics are of
    what they become."""

    reward_scale: float = Field(default=1.0, gt=0.0, le=1e6)
    """See reward_bias."""

    reward_clip: float | None = Field(default=None, gt=0.0)
    """See reward_bias; `rewards_clipped` counts the changed ones. Off when null: a clip that binds without being asked
    for makes the best of a group equal to the second best."""

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
        refuse_unread(self, "loss_aggregation", {"constant_denominator": ("constant", "sum")})
        if self.loss_aggregation in ("constant", "sum") and self.constant_denominator is None:
            raise ValueError(
                f"loss_aggregation: {self.loss_aggregation} needs constant_denominator, e.g. the longest response in tokens"
            )
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


# --- One settings class per policy loss, and their union by ``name``: settings of other losses are refused.


M2poRule = Literal["suffix", "authors"]
SapoLevel = Literal["token", "sequence"]
WeightLevel = Literal["token", "sequence", "sequence_mean"]
ImportanceLevel = Literal["token", "sequence", "sequence_mean", "none"]
DEFAULT_LOSS = "m2po"
DEFAULT_CAP = 5.0
IMPORT_PATH = "package.module:function"  # the tag of a loss that is named by import path


class RatioClip(AlgorithmConfig):
    """Bounds of a ratio."""

    eps_clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """PPO clip: a ratio below 1 - eps_clip earns no further gradient (also the upper bound unless eps_clip_higher)."""

    eps_clip_higher: float | None = Field(default=None, gt=0.0)
    """Upper bound 1 + eps_clip_higher, if not eps_clip (DAPO: 0.28)."""


class ClipSettings(RatioClip):
    """PPO's clip of a token's ratio."""

    c_clip: float | None = Field(default=None, gt=1.0)
    """Dual clip: tokens with a negative advantage cost at most c_clip * |advantage|. Off when null."""

    @property
    def upper_clip(self) -> float:
        """The eps of the upper bound 1 + eps."""
        return self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher


class ImportanceSettings(AlgorithmConfig):
    """Weights that correct for another policy than the one that is trained."""

    importance_level: ImportanceLevel = "token"
    """A weight for each `token`; or one for all tokens of a sequence: the product of their ratios (`sequence`), or its geometric
    mean (`sequence_mean`)."""

    importance_cap: float = Field(default=DEFAULT_CAP, gt=0.0)
    """Weights above this bound are truncated (`tis`, `cispo`), or their tokens dropped (`decoupled_ppo`, `m2po_mask`)."""

    importance_floor: float = Field(default=0.0, ge=0.0)
    """The same for weights below this; 0 is off."""

    @model_validator(mode="after")
    def _check_importance(self) -> ImportanceSettings:
        if self.importance_level == "none" and (self.importance_floor, self.importance_cap) != (0.0, DEFAULT_CAP):
            raise ValueError("importance_level: none has no weight that importance_cap or importance_floor could bound")
        if self.importance_floor >= self.importance_cap:
            raise ValueError(
                f"importance_floor ({self.importance_floor}) must be below importance_cap ({self.importance_cap})"
            )
        return self


class M2po(AlgorithmConfig):
    name: Literal["m2po"] = "m2po"
    """A trust region from the second moment of the log ratio."""

    m2po_rule: M2poRule = "suffix"
    """How the bound c on the log ratio follows from the threshold. `suffix`: the largest are dropped until the mean of the rest
    is below it. `authors`, as in the code of M2PO's authors: c is the largest log ratio for which the mean is below it
    when all beyond c count as c."""

    m2po_threshold: float | None = Field(default=None, gt=0.0)
    """M2PO: largest allowed mean second moment of the log ratio over the tokens the trust region binds. Null: 0.01 with
    `m2po_rule: suffix`, 0.04 with `authors`."""

    m2po_floor_low: float | None = Field(default=None, ge=0.0, lt=1.0)
    """The clip below is never narrower than 1 - this. Null: 0 with `m2po_rule: suffix`, 0.3 with `authors`."""

    m2po_floor_high: float | None = Field(default=None, ge=0.0)
    """The clip above is never narrower than 1 + this. Null: 0 with `m2po_rule: suffix`, 0.5 with `authors`."""


class PpoClip(ClipSettings):
    name: Literal["ppo_clip"] = "ppo_clip"
    """PPO's clipped surrogate against the behaviour policy."""


class Grpo(ClipSettings):
    name: Literal["grpo"] = "grpo"
    """`ppo_clip` under the name people look for."""


class DecoupledPpo(ClipSettings, ImportanceSettings):
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """PPO's clip against the proximal policy, weighted by proximal / behaviour; tokens with a weight out of bounds are
    dropped. `importance_level: none` leaves the weight out: PPO as verl and TRL have it by default."""


class M2poMask(ClipSettings, ImportanceSettings):
    name: Literal["m2po_mask"] = "m2po_mask"
    """`decoupled_ppo` without the tokens that are furthest from the behaviour policy."""

    m2po_threshold: float = Field(default=0.01, gt=0.0)
    """Largest allowed mean second moment of behaviour - proximal over the tokens that are kept."""


class Tis(ClipSettings, ImportanceSettings):
    name: Literal["tis"] = "tis"
    """`decoupled_ppo` with truncated weights."""

    importance_level: WeightLevel = "token"
    """A weight for each `token`; or one for all tokens of a sequence: the product of their ratios (`sequence`), or its geometric
    mean (`sequence_mean`)."""

    importance_normalize: bool = False
    """Divide the truncated weights by their mean over the minibatch and all ranks."""


class Gspo(RatioClip):
    name: Literal["gspo"] = "gspo"
    """One clipped ratio per sequence."""

    eps_clip: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """A sequence's mean ratio below 1 - eps_clip earns no further gradient. The default is the paper's: a mean over a
    sequence moves far less than the ratio of one token."""

    eps_clip_higher: float = Field(default=4e-4, gt=0.0)
    """Upper bound 1 + eps_clip_higher; independent of eps_clip."""


class Sapo(AlgorithmConfig):
    name: Literal["sapo"] = "sapo"
    """A soft gate on the ratio instead of a clip."""

    sapo_level: SapoLevel = "token"
    """A ratio and a gate for each `token`, or one for all tokens of a `sequence`: of the geometric mean of their ratios, with the
    mean of their advantages."""

    sapo_tau_positive: float = Field(default=1.0, gt=0.0)
    """SAPO: how fast the gate closes around ratio 1 where the advantage is positive."""

    sapo_tau_negative: float = Field(default=1.05, gt=0.0)
    """SAPO: the same for the other advantages; larger than for positive ones, as the tokens that they push up are less
    certain."""


class Cispo(ImportanceSettings):
    name: Literal["cispo"] = "cispo"
    """The policy gradient, weighted by the truncated ratio policy / behaviour."""

    importance_level: WeightLevel = "token"
    """A weight for each `token`; or one for all tokens of a sequence: the product of their ratios (`sequence`), or its geometric
    mean (`sequence_mean`)."""


class DivergencePenalty(AlgorithmConfig):
    behaviour_penalty: float = Field(default=1e-3, ge=0.0)
    """Weight of the squared log ratio policy / behaviour, on every token."""


class Dppo(DivergencePenalty):
    name: Literal["dppo"] = "dppo"
    """A trust region in probability instead of in the ratio."""

    probability_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """A token with a negative advantage earns no further gradient once its probability has fallen by more than this."""

    probability_high: float = Field(default=0.2, gt=0.0, le=1.0)
    """A token with a positive advantage earns no further gradient once its probability has risen by more than this."""


class Ipo(DivergencePenalty):
    name: Literal["ipo"] = "ipo"
    """The same region on both sides, for either sign of the advantage."""

    probability_threshold: float = Field(default=0.3, gt=0.0, le=1.0)
    """A token gets no further gradient when its probability has moved by more than this."""


class Reinforce(AlgorithmConfig):
    name: Literal["reinforce"] = "reinforce"
    """The plain policy gradient."""


LOSS = "def loss(tokens, settings) -> PolicyLoss"  # what a function that is named by import path looks like


class LossByPath(AlgorithmConfig):
    """A function of the user's own; the trainer alone imports it."""

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """Import path of a function `(tokens, settings) -> PolicyLoss`, such as `my_losses:clipped`. The module lies in the directory from
    which the run is started, in the recipe's folder, in one of `modules`, or in an installed package."""

    settings: dict[str, Any] = {}
    """The second argument of the function."""

    proximal: bool = False
    """Whether the function reads `tokens.proximal`, log-probabilities under the weights at step start. Costs a forward pass
    where a step has several minibatches."""


def loss_tag(section: object) -> str:
    """Which member of ``LossConfig`` a section is of: its ``name``, m2po without one, one tag for every import path."""
    name = section.get("name", DEFAULT_LOSS) if isinstance(section, dict) else getattr(section, "name", DEFAULT_LOSS)
    return IMPORT_PATH if isinstance(name, str) and ":" in name else str(name)


LossConfig = Annotated[
    Annotated[M2po, Tag("m2po")]
    | Annotated[M2poMask, Tag("m2po_mask")]
    | Annotated[PpoClip, Tag("ppo_clip")]
    | Annotated[Grpo, Tag("grpo")]
    | Annotated[DecoupledPpo, Tag("decoupled_ppo")]
    | Annotated[Tis, Tag("tis")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Sapo, Tag("sapo")]
    | Annotated[Cispo, Tag("cispo")]
    | Annotated[Reinforce, Tag("reinforce")]
    | Annotated[Dppo, Tag("dppo")]
    | Annotated[Ipo, Tag("ipo")]
    | Annotated[LossByPath, Tag(IMPORT_PATH)],
    Discriminator(loss_tag),
]
LOSS_CLASSES: dict[str, type[AlgorithmConfig]] = {
    tag.tag: section for section, tag in map(get_args, get_args(get_args(LossConfig)[0]))
}
"""Tag -> settings class, of every loss and of those that are named by import path."""
