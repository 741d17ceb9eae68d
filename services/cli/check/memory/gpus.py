"""One estimate for each process of a recipe that has GPUs, and one line for each that does not fit.

A process on CUDA that names no GPU takes the first one. Where a trainer does not fit, the settings that make it fit are
estimated one by one, and the best three are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from services.cli.check.memory.estimate import (
    CONTEXT_BYTES,
    GIB,
    GpuEstimate,
    ModelShape,
    engine_parts,
    minibatch_tokens,
    trainer_rank_parts,
)
from services.cli.plan.specs import trainer_name
from services.common.config.processes.placement import Placement, engine_numbers
from services.common.config.recipe import Recipe
from services.common.config.training.adapter import AdapterConfig
from services.common.config.training.policy import PolicyConfig

KEPT_BY_OTHERS, OTHERS = "kept by others", "other processes"
_TURNS = "placement: shared, so that they take turns (engine: torch; sglang and vllm free no memory between turns)"


def with_others(recipe: Recipe, estimates: Iterable[GpuEstimate]) -> list[GpuEstimate]:
    """The estimates of all processes of a recipe, each with the part of the others on its GPUs.

    With `placement: shared` that is what the others keep there during its turn: the context of CUDA, which lives as long
    as the process, and the base of engines with an adapter. The rest is in host memory, or gone. Otherwise it is all that
    the others take."""
    found = list(estimates)
    return [_beside(recipe, own, [other for other in found if other is not own and _meet(own, other)]) for own in found]


def _beside(recipe: Recipe, own: GpuEstimate, others: Sequence[GpuEstimate]) -> GpuEstimate:
    shared = recipe.placement is Placement.SHARED
    if not others or not (shared or own.fits):
        return own
    if shared:
        return replace(own, parts={**own.parts, KEPT_BY_OTHERS: sum(_kept(recipe, other) for other in others)})
    own_gpus = "GPUs of its own, as policies.*.trainer.gpus: [0] and inference.*.gpus: [1]"
    remedy = f"{own_gpus} ({own.total / GIB:.1f} GiB), or {_TURNS}"
    limit = recipe.launch.gpu_memory_gib * GIB
    return replace(own, parts={**own.parts, OTHERS: sum(other.total for other in others)}, limit=limit, remedy=remedy)


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
    for name, policy in recipe.trained_policies.items() if recipe.run.steps else ():
        shape, trainer = shapes[name], policy.trainer
        gpus = trainer.gpus or range(trainer.num_ranks // len(trainer.nodes) if trainer.device == "cuda" else 0)
        if shape is None or not gpus:
            continue
        for node in policy.trainer.nodes:
            yield GpuEstimate(
                process=trainer_name(name, node),
                node=node,
                gpus=tuple(gpus),
                parts=trainer_rank_parts(shape, policy),
                limit=memory,
                remedy=f"more or larger GPUs in policies.{name}.trainer.gpus",
            )
    for name, service in recipe.inference.items():
        if service.servers is not None and (service.gpus or service.device == "cuda"):
            yield from _engines(recipe, name, shapes, memory)


def _engines(recipe: Recipe, name: str, shapes: dict[str, ModelShape | None], memory: float) -> Iterator[GpuEstimate]:
    """The engines of a service take its GPUs in the order of its policies."""
    service = recipe.inference[name]
    settings = service.servers
    assert settings is not None
    numbers = engine_numbers(service, service.policies or list(recipe.policies))
    gpus = list(service.gpus or range(sum(numbers.values()) * settings.tensor_parallel))
    for policy, number in numbers.items():
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


def misfits(recipe: Recipe, more: Callable[[Recipe], Iterable[GpuEstimate]] = lambda recipe: ()) -> list[str]:
    """One line for each process, those of ``more`` included, that does not fit, with its parts and the keys to change."""

    def all_of(recipe: Recipe) -> list[GpuEstimate]:
        return with_others(recipe, (*estimates(recipe), *more(recipe)))

    lines = []
    for found in all_of(recipe):
        if not found.fits:
            less = [
                (other.total, key)
                for key, changed in changed_recipes(recipe)
                for other in all_of(changed)
                if other.process == found.process and found.process.startswith("trainer-") and OTHERS not in found.parts
            ]
            parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in found.parts.items() if size >= GIB / 20)
            lines.append(
                f"{found.process} needs {found.total / GIB:.1f} GiB on each GPU of node {found.node} ({parts}), "
                f"but has {found.limit / GIB:.1f} (launch.gpu_memory_gib: {recipe.launch.gpu_memory_gib:g}): "
                f"write {smaller_settings(found.total, less)}{found.remedy}"
            )
    return lines


def smaller_settings(now: float, found: Iterable[tuple[float, str]]) -> str:
    """The three changes of one setting each that save most, with the GiB that are then needed; empty without any.
    ``found``: the bytes that are needed with each, and how it is written."""
    named = [f"{key} ({total / GIB:.1f} GiB)" for total, key in sorted(found) if total < now]
    return f"{', '.join(named[:MOST_NAMED])}, or " if named else ""


def changed_recipes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Settings that take less memory, as they are written, and the recipe with each."""
    for name, policy in recipe.trained_policies.items():
        for key, changed in changes(policy):
            yield f"policies.{name}.{key}", recipe.model_copy(update={"policies": {**recipe.policies, name: changed}})


def changes(policy: PolicyConfig) -> Iterator[tuple[str, PolicyConfig]]:
    """Settings of a policy that take less memory of a GPU or a host: key and value as they are written, and the policy."""
    trainer = policy.trainer
    for offload in (["optimizer"], ["optimizer", "reference"], ["reference"]):
        allowed = policy.adapter is None and set(offload) > set(trainer.offload)
        if allowed and ("reference" not in offload or policy.algorithm.needs_reference):
            yield f"trainer.offload: [{', '.join(offload)}]", with_trainer(policy, offload=offload)
    if trainer.gradient_checkpointing is not True:
        yield "trainer.gradient_checkpointing: true", with_trainer(policy, gradient_checkpointing=True)
    if trainer.compute_dtype != "bfloat16" and trainer.device != "cpu":  # a CPU computes it slowly
        yield "trainer.compute_dtype: bfloat16", with_trainer(policy, compute_dtype="bfloat16")
    yield "trainer.offload: []", with_trainer(policy, offload=[])  # of the host's memory, as is the next
    weights = policy.weights.model_copy(update={"keep_versions": 1})
    yield "weights.keep_versions: 1", policy.model_copy(update={"weights": weights})
    context = policy.model.context_length
    if min(trainer.token_budget, minibatch_tokens(policy)) > context:
        yield f"trainer.token_budget: {context}", with_trainer(policy, token_budget=context)
    elif context > 1024:
        model = policy.model.model_copy(update={"context_length": context // 2})
        yield (
            f"model.context_length: {context // 2}",
            with_trainer(policy, token_budget=context // 2).model_copy(update={"model": model}),
        )
    if policy.adapter is None:
        adapter = AdapterConfig(rank=_RANK, alpha=2 * _RANK)
        plain = with_trainer(policy, offload=[name for name in trainer.offload if name != "optimizer"])
        yield f"adapter: {{rank: {_RANK}, alpha: {2 * _RANK}}}", plain.model_copy(update={"adapter": adapter})


def with_trainer(policy: PolicyConfig, **changes: object) -> PolicyConfig:
    return policy.model_copy(update={"trainer": policy.trainer.model_copy(update=changes)})
