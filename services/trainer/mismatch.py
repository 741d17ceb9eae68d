"""How far the trainer's log-probabilities are from the engines', before any update of a step."""

from __future__ import annotations

import torch

from services.trainer.algorithms.kl import KL_ESTIMATORS
from services.trainer.metrics import Sums
from services.trainer.micro_batches import MicroTensors


def add_mismatch(sums: Sums, batch: MicroTensors, logprobs: torch.Tensor, fresh_version: int) -> None:
    """How far the trainer's log-probabilities are from the engines'. KL(behaviour || trainer) by k3: x = b - l."""
    gap = batch.behaviour - logprobs
    kl = KL_ESTIMATORS["k3"](gap.clamp(-20.0, 20.0))
    # A cache that older weights had computed in part is no fresh sampling, whatever version the tokens have.
    fresh = ((batch.weight_versions == fresh_version) & ~batch.mixed_cache).to(gap.dtype)
    for name, weight in (("first", torch.ones_like(gap)), ("fresh", fresh)):
        sums.add(f"{name}_abs", (gap.abs() * weight).sum())
        sums.add(f"{name}_kl", (kl * weight).sum())
        sums.add(f"{name}_tokens", weight.sum())
