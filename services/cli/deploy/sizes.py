"""The GPUs, CPUs and host memory that each process of a recipe asks a scheduler for.

Memory is that of ``services.cli.check.memory.host`` with a fifth to spare, and None where the size of a model is not
known before the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.cli.check.memory.estimate import GIB, ModelShape
from services.cli.check.memory.host import host_estimates
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

_PROCESS_GIB = 2  # an interpreter with its libraries
_SPARE = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one process, or one node, needs."""

    gpus: int = 0
    cpus: int = 1
    memory_gib: int | None = _PROCESS_GIB


def size_of(recipe: Recipe, process: str, node: int) -> Size:
    """The size of a process of the plan on its node. A container has its own GPUs alone, numbered from 0."""
    kind, _, name = process.partition("-")
    if kind == "inference":
        service = recipe.inference[name]
        computes = service.device != "cpu" and service.engine not in ("scripted", "forced")
        parallel = service.servers.tensor_parallel if service.servers is not None else 1
        gpus = len(service.gpus) or (parallel if computes else 0)
        memory = _memory_gib(recipe, service.policies or list(recipe.policies), name, node)
        return Size(gpus=gpus, cpus=1 + service.threads, memory_gib=memory)
    if kind == "trainer":
        policy = _policy_of(recipe, name)
        trainer = recipe.policies[policy].trainer
        ranks = trainer.num_ranks // len(trainer.nodes)
        gpus = len(trainer.gpus) or (ranks if trainer.device != "cpu" else 0)
        memory = _memory_gib(recipe, [policy], None, node)
        return Size(gpus=gpus, cpus=1 + ranks * trainer.threads, memory_gib=memory)
    if kind == "envgateway" and recipe.envgateway is not None:
        sandbox = recipe.envgateway.sandbox
        programs = math.ceil(sandbox.num_slots * sandbox.memory_bytes / GIB)
        return Size(cpus=1 + sandbox.num_slots, memory_gib=_PROCESS_GIB + programs)
    return Size()


def size_of_node(recipe: Recipe, node: int, processes: Iterable[str]) -> Size:
    """The size of a whole node, on which processes take GPUs by their numbers."""
    sizes = {name: size_of(recipe, name, node) for name in processes}
    known = [size.memory_gib for size in sizes.values() if size.memory_gib is not None]
    numbers = [size.gpus for size in sizes.values()]
    for name in sizes:
        kind, _, what = name.partition("-")
        if kind == "inference":
            numbers += [gpu + 1 for gpu in recipe.inference[what].gpus]
        elif kind == "trainer":
            numbers += [gpu + 1 for gpu in recipe.policies[_policy_of(recipe, what)].trainer.gpus]
    return Size(
        gpus=max(numbers, default=0),
        cpus=sum(size.cpus for size in sizes.values()),
        memory_gib=sum(known) if len(known) == len(sizes) else None,
    )


def largest(recipe: Recipe, processes: Mapping[int, Iterable[str]]) -> Size:
    """The size that every node of a job has when the scheduler gives all of them the same. ``processes``: by node."""
    found = [size_of_node(recipe, node, names) for node, names in processes.items()]
    memory = [size.memory_gib for size in found]
    return Size(
        gpus=max(size.gpus for size in found),
        cpus=max(size.cpus for size in found),
        memory_gib=None if None in memory else max(size for size in memory if size is not None),
    )


def check_gpu(gpu: str | None) -> None:
    """Raises ``ConfigError`` for a name that no scheduler takes as a kind of GPU, such as ``H100:8``."""
    if gpu is not None and not gpu.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(
            f"--gpu {gpu!r} is no kind of GPU: write its name alone, such as H100; the recipe has the number"
        )


def _policy_of(recipe: Recipe, name: str) -> str:
    """The policy in ``POLICY`` or ``POLICY-nodeN``."""
    return name if name in recipe.policies else name.rpartition("-node")[0]


def _memory_gib(recipe: Recipe, policies: list[str], service: str | None, node: int) -> int | None:
    """The memory of a service or, for None, of the trainers of ``policies`` on a node."""
    if any(ModelShape.of(recipe.policies[name].model.path) is None for name in policies):
        return None
    trainers = recipe.model_copy(
        update={"inference": {}, "policies": {name: recipe.policies[name] for name in policies}}
    )
    size = _bytes(trainers, node)
    if service is not None:
        size = _bytes(trainers.model_copy(update={"inference": {service: recipe.inference[service]}}), node) - size
    return _PROCESS_GIB + math.ceil(_SPARE * size / GIB)


def _bytes(recipe: Recipe, node: int) -> float:
    estimate = host_estimates(recipe, has_gpus=True).get(node)
    return 0.0 if estimate is None else estimate.total_bytes
