"""One settings class per policy loss, and their union by ``name``: what a loss does not read cannot be written.

Each class adds to ``AlgorithmConfig`` what its loss alone reads. ``LossConfig`` is the type of ``policies.<name>.algorithm``.
To add a loss: a class here, a line in ``LossConfig``, a file in ``services.trainer.algorithms`` and a line in its dict.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from services.common.config.algorithm import AlgorithmConfig

M2poScope = Literal["minibatch", "micro_batch"]

DEFAULT_LOSS = "m2po"
IMPORT_PATH = "package.module:function"  # the tag of a loss that is named by import path


class ClipSettings(AlgorithmConfig):
    """PPO's clip of a token's ratio."""

    eps_clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """PPO clip: a ratio below 1 - eps_clip earns no further gradient (also the upper bound unless eps_clip_higher)."""

    eps_clip_higher: float | None = Field(default=None, gt=0.0)
    """Upper bound 1 + eps_clip_higher when it differs from eps_clip (DAPO: 0.28)."""

    c_clip: float | None = Field(default=None, gt=1.0)
    """Dual clip: tokens with a negative advantage cost at most c_clip * |advantage|. Off when null."""

    @property
    def upper_clip(self) -> float:
        """The eps of the upper bound 1 + eps."""
        return self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher


class M2po(AlgorithmConfig):
    name: Literal["m2po"] = "m2po"
    """A trust region from the second moment of the log ratio."""

    m2po_threshold: float = Field(default=0.01, gt=0.0)
    """M2PO: largest allowed mean second moment of the log ratio over the tokens the trust region binds."""

    m2po_scope: M2poScope = "minibatch"
    """Where M2PO takes its second moments: over the whole minibatch and all ranks, or over each micro-batch (free, but
    the gradient then depends on packing; for comparison only)."""


class PpoClip(ClipSettings):
    name: Literal["ppo_clip"] = "ppo_clip"
    """PPO's clipped surrogate against the behaviour policy."""


class Grpo(ClipSettings):
    name: Literal["grpo"] = "grpo"
    """`ppo_clip` under the name people look for."""


class DecoupledPpo(ClipSettings):
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """PPO's clip against the proximal policy, weighted by proximal / behaviour."""

    importance_cap: float = Field(default=5.0, gt=0.0)
    """Tokens whose weight proximal / behaviour is above this are dropped."""


class M2poMask(ClipSettings):
    name: Literal["m2po_mask"] = "m2po_mask"
    """`decoupled_ppo` without the tokens that are furthest from the behaviour policy."""

    m2po_threshold: float = Field(default=0.01, gt=0.0)
    """Largest allowed mean second moment of behaviour - proximal over the tokens that are kept."""

    importance_cap: float = Field(default=5.0, gt=0.0)
    """Tokens whose weight proximal / behaviour is above this are dropped."""


class Tis(ClipSettings):
    name: Literal["tis"] = "tis"
    """`decoupled_ppo` with truncated weights."""

    importance_cap: float = Field(default=5.0, gt=0.0)
    """The weight proximal / behaviour is truncated here."""


class Gspo(AlgorithmConfig):
    name: Literal["gspo"] = "gspo"
    """One clipped ratio per sequence."""

    eps_clip: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """A sequence's mean ratio below 1 - eps_clip earns no further gradient. The default is the paper's: a mean over a
    sequence moves far less than the ratio of one token."""

    eps_clip_higher: float = Field(default=4e-4, gt=0.0)
    """Upper bound 1 + eps_clip_higher; it does not follow eps_clip."""


class Sapo(AlgorithmConfig):
    name: Literal["sapo"] = "sapo"
    """A soft gate on the ratio instead of a clip."""

    sapo_tau_positive: float = Field(default=1.0, gt=0.0)
    """SAPO: how fast the gate closes around ratio 1 where the advantage is positive."""

    sapo_tau_negative: float = Field(default=1.05, gt=0.0)
    """SAPO: the same for the other advantages; larger than for positive ones, as what they push up is less certain."""


class Cispo(AlgorithmConfig):
    name: Literal["cispo"] = "cispo"
    """The policy gradient, weighted by the truncated ratio."""

    importance_cap: float = Field(default=5.0, gt=0.0)
    """The weight policy / behaviour is truncated here."""


class Reinforce(AlgorithmConfig):
    name: Literal["reinforce"] = "reinforce"
    """The policy gradient as it is."""


class LossByPath(AlgorithmConfig):
    """A function of the user's own; the trainer alone imports it."""

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """Import path of a function `(tokens, settings) -> PolicyLoss`, such as `my_losses:clipped`. The module lies in the directory from
    which the run is started, or in an installed package."""

    settings: dict[str, Any] = {}
    """What the function gets as its second argument."""

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
    | Annotated[LossByPath, Tag(IMPORT_PATH)],
    Discriminator(loss_tag),
]

LOSS_CLASSES: dict[str, type[AlgorithmConfig]] = {
    tag.tag: section for section, tag in map(get_args, get_args(get_args(LossConfig)[0]))
}
"""Tag -> settings class, of every loss and of those that are named by import path."""
