"""One settings class per policy loss, and their union by ``name``: settings of other losses are refused.

Each class adds to ``AlgorithmConfig`` the keys of its loss alone. ``LossConfig`` is the type of
``policies.<name>.algorithm``. To add a loss: a class here, a line in ``LossConfig``, a file in
``services.trainer.algorithms`` and a line in its dict.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from services.common.config.training.algorithm import AlgorithmConfig

M2poScope = Literal["minibatch", "micro_batch"]
M2poRule = Literal["suffix", "authors"]
SapoLevel = Literal["token", "sequence"]
WeightLevel = Literal["token", "sequence", "sequence_mean"]
ImportanceLevel = Literal["token", "sequence", "sequence_mean", "none"]

DEFAULT_LOSS = "m2po"
DEFAULT_CAP = 5.0
IMPORT_PATH = "package.module:function"  # the tag of a loss that is named by import path


class ClipSettings(AlgorithmConfig):
    """PPO's clip of a token's ratio."""

    eps_clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """PPO clip: a ratio below 1 - eps_clip earns no further gradient (also the upper bound unless eps_clip_higher)."""

    eps_clip_higher: float | None = Field(default=None, gt=0.0)
    """Upper bound 1 + eps_clip_higher, if not eps_clip (DAPO: 0.28)."""

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

    m2po_scope: M2poScope = "minibatch"
    """Where M2PO takes its second moments: over the whole minibatch and all ranks, or over each micro-batch (free, but
    the gradient then depends on packing; for comparison only)."""


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


class Gspo(AlgorithmConfig):
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


class Dppo(AlgorithmConfig):
    name: Literal["dppo"] = "dppo"
    """A trust region in probability instead of in the ratio."""

    probability_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """A token with a negative advantage earns no further gradient once its probability has fallen by more than this."""

    probability_high: float = Field(default=0.2, gt=0.0, le=1.0)
    """A token with a positive advantage earns no further gradient once its probability has risen by more than this."""

    behaviour_penalty: float = Field(default=1e-3, ge=0.0)
    """Weight of the squared log ratio policy / behaviour, on every token."""


class Ipo(AlgorithmConfig):
    name: Literal["ipo"] = "ipo"
    """The same region on both sides, for either sign of the advantage."""

    probability_threshold: float = Field(default=0.3, gt=0.0, le=1.0)
    """A token gets no further gradient when its probability has moved by more than this."""

    behaviour_penalty: float = Field(default=1e-3, ge=0.0)
    """Weight of the squared log ratio policy / behaviour, on every token."""


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
