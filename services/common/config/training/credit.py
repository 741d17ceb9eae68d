"""Settings of credit assignment: discount, value head, teacher, normalisation of advantages.

No policy loss reads this part of ``algorithm``. Plain pydantic, no torch; ``services.trainer.step.credit`` implements it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section

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
        if self.advantage != "gae" and self.value_head is not None:
            raise ValueError(
                f"value_head is set, but advantage: {self.advantage} uses no values: write advantage: gae, or leave "
                "value_head out"
            )
        if self.advantage != "gae" and self.gae_lambda != 1.0:
            raise ValueError(
                f"gae_lambda {self.gae_lambda:g} is for advantage: gae, not {self.advantage}: leave it out"
            )
        if self.advantage not in ("gae", "reinforce") and self.gamma != 1.0:
            raise ValueError(
                f"gamma {self.gamma:g} needs advantage: gae or reinforce: {self.advantage} compares whole rollouts"
            )
        if (self.advantage == "pass_at_k") != (self.pass_k is not None):
            raise ValueError("advantage: pass_at_k and pass_k belong together: write both, or neither")
        if self.advantage != "grpo" and self.deviation != "group":
            raise ValueError(
                f"deviation: batch is for advantage: grpo; {self.advantage} divides by no deviation of rewards"
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
