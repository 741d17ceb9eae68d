"""One estimate for each process of a recipe that has GPUs, and one line for each that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.cli.check.memory.estimate import (
    CONTEXT_BYTES,
    GIB,
    GpuEstimate,
    ModelShape,
    engine_parts,
    trainer_rank_parts,
)
from services.cli.check.memory.shared_device import with_others
from services.cli.check.memory.smaller import smaller_settings
from services.cli.plan.specs import trainer_name
from services.common.config.processes.placement import engine_numbers
from services.common.config.recipe import Recipe


def estimates(recipe: Recipe) -> Iterator[GpuEstimate]:
    """One estimate for each process that has GPUs of its own, except for policies of unknown size."""
    memory = recipe.launch.gpu_memory_gib * GIB
    shapes = {name: ModelShape.of(policy.model.path) for name, policy in recipe.policies.items()}
    for name, policy in recipe.trained_policies.items():
        shape = shapes[name]
        if shape is None or not policy.trainer.gpus:
            continue
        for node in policy.trainer.nodes:
            yield GpuEstimate(
                process=trainer_name(name, node),
                node=node,
                gpus=tuple(policy.trainer.gpus),
                parts=trainer_rank_parts(shape, policy),
                limit=memory,
                remedy=f"more GPUs in policies.{name}.trainer.gpus, or {smaller_settings(f'policies.{name}', shape, policy)}",
            )
    for name, service in recipe.inference.items():
        if service.servers is not None and service.gpus:
            yield from _engines(recipe, name, shapes, memory)


def _engines(recipe: Recipe, name: str, shapes: dict[str, ModelShape | None], memory: float) -> Iterator[GpuEstimate]:
    """The engines of a service take its GPUs in the order of its policies."""
    service = recipe.inference[name]
    settings = service.servers
    assert settings is not None
    gpus = list(service.gpus)
    for policy, number in engine_numbers(service, service.policies or list(recipe.policies)).items():
        own = [gpus.pop(0) for _ in range(number * settings.tensor_parallel)]
        shape = shapes[policy]
        if shape is not None:
            context = recipe.policies[policy].model.context_length
            yield GpuEstimate(
                process=f"inference-{name}: {number} × {policy}",
                node=service.node,
                gpus=tuple(own),
                parts=engine_parts(shape, service, memory, context),
                limit=min(memory, settings.memory_share * memory + CONTEXT_BYTES),
                remedy=f"a larger inference.{name}.{service.engine}.tensor_parallel or memory_share, or a smaller "
                f"policies.{policy}.model.context_length",
            )


def misfits(recipe: Recipe, more: Iterable[GpuEstimate] = ()) -> list[str]:
    """One line for each process, ``more`` included, that does not fit, with its parts and the keys to change."""
    lines = []
    for found in with_others(recipe, (*estimates(recipe), *more)):
        if not found.fits:
            parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in found.parts.items() if size >= GIB / 20)
            lines.append(
                f"{found.process} needs {found.total / GIB:.1f} GiB on each GPU of node {found.node} ({parts}), "
                f"but has {found.limit / GIB:.1f} (launch.gpu_memory_gib: {recipe.launch.gpu_memory_gib:g}): "
                f"write {found.remedy}"
            )
    return lines
