"""One estimate for each process of a recipe that has GPUs, and one line for each that does not fit.

Where a trainer does not fit, the settings that make it fit are estimated one by one, and the best three are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from services.cli.check.memory.estimate import (
    CONTEXT_BYTES,
    GIB,
    GpuEstimate,
    ModelShape,
    engine_parts,
    trainer_rank_parts,
)
from services.cli.plan.specs import trainer_name
from services.common.config.processes.placement import Placement, engine_numbers
from services.common.config.recipe import Recipe
from services.common.config.training.adapter import AdapterConfig
from services.common.config.training.policy import PolicyConfig

KEPT_BY_OTHERS = "kept by others"


def with_others(recipe: Recipe, estimates: Iterable[GpuEstimate]) -> list[GpuEstimate]:
    """On a shared device each process also has what the others keep there during its turn: the context of CUDA, which
    lives as long as the process, and the base of engines with an adapter. The rest is in host memory, or gone.

    The estimates of all processes of a recipe, each with the part of the others on its GPUs."""
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


MOST_NAMED = 3
_RANK = 16  # of the adapter that is proposed


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


def smaller_settings(where: str, shape: ModelShape, policy: PolicyConfig) -> str:
    """The three changes of one setting each that save most, with the GiB that are then needed; empty without any."""
    now = _total(shape, policy)
    found = sorted((_total(shape, changed), key) for key, changed in _changes(policy))
    named = [f"{where}.{key} ({total / GIB:.1f} GiB)" for total, key in found if total < now]
    return ", ".join(named[:MOST_NAMED])


def _total(shape: ModelShape, policy: PolicyConfig) -> float:
    return sum(trainer_rank_parts(shape, policy).values())


def _changes(policy: PolicyConfig) -> Iterator[tuple[str, PolicyConfig]]:
    """Key and value as they are written, and the policy with it."""
    trainer = policy.trainer
    for offload in (["optimizer"], ["optimizer", "reference"], ["reference"]):
        allowed = policy.adapter is None and set(offload) > set(trainer.offload)
        if allowed and ("reference" not in offload or policy.algorithm.needs_reference):
            yield f"trainer.offload: [{', '.join(offload)}]", _with(policy, offload=offload)
    if not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing: true", _with(policy, gradient_checkpointing=True)
    if trainer.compute_dtype == "float32":
        yield "trainer.compute_dtype: bfloat16", _with(policy, compute_dtype="bfloat16")
    budget, context = max(trainer.token_budget, policy.model.context_length), policy.model.context_length
    if budget > context:
        yield f"trainer.token_budget: {context}", _with(policy, token_budget=context)
    elif context > 1024:
        model = policy.model.model_copy(update={"context_length": context // 2})
        yield (
            f"model.context_length: {context // 2}",
            _with(policy, token_budget=context // 2).model_copy(update={"model": model}),
        )
    if policy.adapter is None:
        adapter = AdapterConfig(rank=_RANK, alpha=2 * _RANK)
        plain = _with(policy, offload=[name for name in trainer.offload if name != "optimizer"])
        yield f"adapter: {{rank: {_RANK}, alpha: {2 * _RANK}}}", plain.model_copy(update={"adapter": adapter})


def _with(policy: PolicyConfig, **changes: object) -> PolicyConfig:
    return policy.model_copy(update={"trainer": policy.trainer.model_copy(update=changes)})
