"""Adds to the estimate of each process on a shared device what the others keep there during its turn.

    context of CUDA of each other process, which lives as long as the process
    the base of engines with an adapter, which several policies may compute on

The rest is in host memory, or gone, in the turn of another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.cli.check.memory.estimate import CONTEXT_BYTES, GpuEstimate
from services.common.config.processes.placement import Placement
from services.common.config.recipe import Recipe

KEPT_BY_OTHERS = "kept by others"


def with_others(recipe: Recipe, estimates: Iterable[GpuEstimate]) -> list[GpuEstimate]:
    """The estimates of all processes of a recipe, each with the part of the others on its GPUs."""
    found = list(estimates)
    if recipe.placement is not Placement.SHARED:
        return found
    return [
        replace(own, parts={**own.parts, KEPT_BY_OTHERS: kept})
        if (kept := sum(_kept(recipe, other) for other in found if other is not own and _meet(own, other)))
        else own
        for own in found
    ]


def _meet(one: GpuEstimate, other: GpuEstimate) -> bool:
    return one.node == other.node and bool(set(one.gpus) & set(other.gpus))


def _kept(recipe: Recipe, estimate: GpuEstimate) -> float:
    """What a process keeps on its GPUs in the turn of another."""
    service = recipe.inference.get(estimate.process.removeprefix("inference-"))
    if service is None:
        return float(CONTEXT_BYTES)
    served = service.policies or list(recipe.policies)
    has_base = any(recipe.policies[policy].adapter is not None for policy in served)
    return CONTEXT_BYTES + (estimate.parts["weights"] if has_base else 0.0)
