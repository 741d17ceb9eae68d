"""Losses, advantages and a mask, and the dict that names the losses.

To add a loss to Rollmill, write a pure function ``(TokenBatch, settings) -> PolicyLoss`` in a file of ``losses``, its settings
class in ``services.common.config.training.losses``, and a line here. A user's own loss needs none of this: ``by_path``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.config.training.algorithm import AlgorithmConfig
from services.common.config.training.losses import LossByPath, M2po, Tis
from services.common.errors import ConfigError
from services.trainer.algorithms.base import LossFunction
from services.trainer.algorithms.by_path import loss_by_path
from services.trainer.algorithms.losses.cispo import cispo
from services.trainer.algorithms.losses.decoupled_ppo import decoupled_ppo
from services.trainer.algorithms.losses.gspo import gspo
from services.trainer.algorithms.losses.m2po import m2po
from services.trainer.algorithms.losses.ppo_clip import ppo_clip
from services.trainer.algorithms.losses.probability_mask import dppo, ipo
from services.trainer.algorithms.losses.reinforce import reinforce
from services.trainer.algorithms.losses.sapo import sapo
from services.trainer.algorithms.losses.tis import tis


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
    if isinstance(config, M2po):
        found = replace(found, needs_trust_region=config.m2po_scope == "minibatch")
    if config.rejection or (isinstance(config, Tis) and config.importance_normalize):
        found = replace(found, needs_whole_proximal=True)
    return found
