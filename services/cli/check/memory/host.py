"""Estimates the memory of a host and of its /dev/shm that a recipe needs, and of GPUs with an embedded engine. Bytes.

Counted per node: models, moments and caches that are in host memory, and the files of weight versions. Not counted:
datasets, sandboxes, environments. The machine of node 0 is compared with its estimate; a file in /dev/shm counts as memory
as well.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.check.memory.estimate import (
    CONTEXT_BYTES,
    DTYPE_BYTES,
    GIB,
    GpuEstimate,
    ModelShape,
    published_parameters,
    trainer_rank_parts,
)
from services.cli.check.memory.gpus import changed_recipes, smaller_settings, with_trainer
from services.common.config.processes.kv_cache import cache_bytes, too_small
from services.common.config.processes.services import InferenceConfig
from services.common.config.recipe import Recipe
from services.common.config.training.policy import PolicyConfig

SHARED_MEMORY = Path("/dev/shm")
_RANK_BYTES = 2 * GIB  # an interpreter with torch and CUDA, in host memory
_UNKNOWN_GIB = 8  # for versions of policies whose size is not known before the run
_EMBEDDED = ("torch", "forced")
_SMALL = 1 * GIB  # files of that size may spill from /dev/shm to a disk unnoticed
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(slots=True)
class HostEstimate:
    """The needs of one node: name of a part -> bytes."""

    memory: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shared: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # files in /dev/shm

    @property
    def shared_bytes(self) -> float:
        return sum(self.shared.values())

    @property
    def parts(self) -> dict[str, float]:
        return {**self.memory, "files in /dev/shm": self.shared_bytes}

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())


def host_estimates(recipe: Recipe, *, has_gpus: bool) -> dict[int, HostEstimate]:
    """The estimate of each node; policies of unknown size are left out. ``has_gpus``: `auto` takes a GPU.

    With an adapter, N of mirror, snapshots and stage is the adapter's.

        offloaded moments      2 N m              with trainer.offload: optimizer, m bytes of the master type
        offloaded reference    N f                with a KL term and trainer.offload: reference, f bytes as it is kept
        processes              2 GiB per rank
        trainer, engine        all their parts, on a CPU
        mirror                 N p per service    p bytes of the published type; mapped from the snapshot where both are on
                                                  one host and the transfer is no delta
        snapshots (/dev/shm)   N p versions       keep_versions, one being written, one mapped by replicas, and with deltas
                                                  the base of the one in progress
        stage (/dev/shm)       N p per service    of SGLang and vLLM
    """  # fmt: skip
    found: dict[int, HostEstimate] = defaultdict(HostEstimate)
    for name, policy in recipe.policies.items():
        shape = ModelShape.of(policy.model.path)
        if shape is None:
            continue
        if policy.trained:
            _add_trainer(found, name, policy, shape, has_gpus=has_gpus)
        for service_name, service in recipe.inference.items():
            if name in (service.policies or list(recipe.policies)) and service.engine != "scripted":
                _add_engine(found[service.node], f"{service_name} {name}", service, policy, shape, has_gpus=has_gpus)
    return dict(found)


def shared_memory_gib(recipe: Recipe, node: int) -> int:
    """The size of /dev/shm that a node of the recipe needs, on a machine with GPUs, with a tenth to spare."""
    estimate = host_estimates(recipe, has_gpus=True).get(node, HostEstimate())
    unknown = any(ModelShape.of(policy.model.path) is None for policy in recipe.policies.values())
    needed = math.ceil(1.1 * estimate.shared_bytes / GIB)
    return max(1, needed + (_UNKNOWN_GIB if unknown else 0))


def loading_s(recipe: Recipe) -> float:
    """Seconds that servers may take longer to start because of the size of their models."""
    longest = 0.0
    for service in recipe.inference.values():
        for name in service.policies or list(recipe.policies):
            shape = ModelShape.of(recipe.policies[name].model.path)
            if service.servers is not None and shape is not None:
                size = shape.num_parameters * DTYPE_BYTES[recipe.policies[name].published_dtype]
                longest = max(longest, service.servers.loading_timeout_s(size) - service.servers.ready_timeout_s)
    return longest


def _add_trainer(
    found: dict[int, HostEstimate], name: str, policy: PolicyConfig, shape: ModelShape, *, has_gpus: bool
) -> None:
    trainer, weights = policy.trainer, policy.weights
    on_cpu = _is_on_cpu(trainer.device, bool(trainer.gpus), has_gpus=has_gpus)
    share = 1 / len(trainer.nodes)
    for node in trainer.nodes:
        memory = found[node].memory
        if on_cpu:
            parts = trainer_rank_parts(shape, with_trainer(policy, offload=[]))  # to the same memory
            states = sum(size for part, size in parts.items() if part != "allowance") * trainer.num_ranks
            memory[f"trainer {name}"] += states * share
            continue
        memory["processes"] += _RANK_BYTES * trainer.num_ranks * share
        if "optimizer" in trainer.offload:
            moments = 2 * shape.num_parameters * DTYPE_BYTES[trainer.master_dtype]
            memory[f"offloaded moments of {name}"] += moments * share
        if "reference" in trainer.offload and policy.algorithm.needs_reference:
            reference = shape.num_parameters * DTYPE_BYTES[trainer.frozen_dtype]
            memory[f"offloaded reference of {name}"] += reference * share
    version = published_parameters(shape, policy) * DTYPE_BYTES[policy.published_dtype]
    num_versions = weights.keep_versions + 2 + (weights.transfer != "full")
    found[trainer.nodes[0]].shared[f"{num_versions} versions of {name}"] += num_versions * version


def _add_engine(
    node: HostEstimate, name: str, service: InferenceConfig, policy: PolicyConfig, shape: ModelShape, *, has_gpus: bool
) -> None:
    version = published_parameters(shape, policy) * DTYPE_BYTES[policy.published_dtype]
    with_publisher = policy.trained and service.node == policy.trainer.nodes[0]
    if not (with_publisher and policy.weights.transfer != "delta" and "mapped" in policy.weights.transports):
        node.memory[f"mirror of {name}"] += version
    if service.servers is not None and service.servers.stage_directory is None:
        node.shared[f"stage of {name}"] += version
    if service.engine in _EMBEDDED and _is_on_cpu(service.device, bool(service.gpus), has_gpus=has_gpus):
        for part, size in embedded_engine_parts(shape, service, policy.model.context_length).items():
            if part != "allowance":
                node.memory[f"{part} of {name}"] += size


def _is_on_cpu(device: str, has_own_gpus: bool, *, has_gpus: bool) -> bool:
    return device == "cpu" or (device == "auto" and not has_own_gpus and not has_gpus)


def embedded_engine_parts(shape: ModelShape, service: InferenceConfig, context_length: int) -> dict[str, float]:
    """Bytes of one embedded engine (`torch`), on its device.

        weights    N d                                     d bytes of the engine's dtype
        KV cache   slots x context x 2 layers kv_width d   allocated when the engine starts; at most kv_cache_gib
        allowance  1.5 GiB, for CUDA
    """  # fmt: skip
    size = DTYPE_BYTES[service.dtype]
    slots = service.engine_slots or service.num_slots
    cache = cache_bytes(service.kv_cache_gib * GIB, slots, context_length, _token_bytes(shape, service))
    return {
        "weights": float(shape.num_parameters * size),
        "KV cache": float(cache),
        "allowance": float(CONTEXT_BYTES),
    }


def _token_bytes(shape: ModelShape, service: InferenceConfig) -> int:
    """Keys and values of one position."""
    return 2 * shape.num_layers * shape.kv_width * DTYPE_BYTES[service.dtype]


def small_caches(recipe: Recipe) -> list[str]:
    """One line for each embedded engine with a KV cache that holds no sequence of the whole context."""
    problems = []
    for name, service in recipe.inference.items():
        if service.engine not in _EMBEDDED:
            continue
        for policy in service.policies or list(recipe.policies):
            model = recipe.policies[policy].model
            if (shape := ModelShape.of(model.path)) is None:
                continue
            slots = service.engine_slots or service.num_slots
            token_bytes, limit = _token_bytes(shape, service), service.kv_cache_gib * GIB
            if slots * model.context_length * token_bytes <= limit:
                continue  # rows
            if problem := too_small(limit, model.context_length, token_bytes):
                problems.append(f"inference.{name}, policy {policy}: {problem}")
    return problems


def embedded_estimates(recipe: Recipe) -> Iterator[GpuEstimate]:
    """One estimate for each service with an embedded engine on GPUs: its policies share the first GPU."""
    memory = recipe.launch.gpu_memory_gib * GIB
    for name, service in recipe.inference.items():
        if service.engine not in _EMBEDDED or not (service.gpus or service.device == "cuda"):
            continue
        parts: dict[str, float] = defaultdict(float)
        for policy in service.policies or list(recipe.policies):
            model = recipe.policies[policy].model
            shape = ModelShape.of(model.path)
            if shape is not None:
                for part, size in embedded_engine_parts(shape, service, model.context_length).items():
                    parts[part] = size if part == "allowance" else parts[part] + size
        if parts:
            yield GpuEstimate(
                process=f"inference-{name}",
                node=service.node,
                gpus=tuple(service.gpus or (0,)),
                parts=dict(parts),
                limit=memory,
                remedy=f"a smaller inference.{name}.kv_cache_gib, a smaller policies.*.model.context_length, or "
                f"inference.{name}.dtype: bfloat16 (engine: sglang or vllm takes as many slots as fit)",
            )


def host_problems(recipe: Recipe, *, has_gpus: bool) -> list[str]:
    """One line for memory, and one for /dev/shm, that this machine has too little of for node 0."""
    estimate = host_estimates(recipe, has_gpus=has_gpus).get(0)
    if estimate is None:
        return []
    problems = []
    memory = host_memory_bytes()
    if estimate.total_bytes > memory:
        less = [(host_estimates(other, has_gpus=has_gpus)[0].total_bytes, key) for key, other in _levers(recipe)]
        no_gpu = "" if has_gpus else " and no NVIDIA GPU: run on one that has, try the recipe with --profile tiny, or"
        problems.append(
            f"node 0 needs about {estimate.total_bytes / GIB:.1f} GiB of memory ({_shown(estimate.parts)}), but this machine has "
            f"{memory / GIB:.1f}{no_gpu or ':'} write {smaller_settings(estimate.total_bytes, less)}use more nodes"
        )
    shared = shared_memory_here()
    spills = {name for name, policy in recipe.trained_policies.items() if policy.weights.spill_directory is not None}
    if estimate.shared_bytes > max(shared, _SMALL) and spills != set(recipe.trained_policies):
        size = -(-int(estimate.shared_bytes) // GIB)
        problems.append(
            f"/dev/shm of node 0 needs about {estimate.shared_bytes / GIB:.1f} GiB ({_shown(estimate.shared)}), but has "
            f"{shared / GIB:.1f}: enlarge it (`mount -o remount,size={size}G /dev/shm`; in a container --shm-size={size}g), "
            "or name a directory on a fast disk in policies.*.weights.spill_directory and in stage_directory of the engine (sglang, vllm)"
        )
    return problems


def host_lines(recipe: Recipe) -> list[str]:
    """The estimate of node 0 beside the memory of this machine, in one line; none where no policy has a known size."""
    return [
        f"memory of node 0, estimated: {found.total_bytes / GIB:.1f} of {host_memory_bytes() / GIB:.1f} GiB ({_shown(found.parts)})"
        for node, found in host_estimates(recipe, has_gpus=False).items()
        if node == 0
    ]


def _levers(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Settings that take less memory of a host, as they are written, and the recipe with each."""
    yield from changed_recipes(recipe)
    for name, service in recipe.inference.items():
        smaller = service.model_copy(update={"kv_cache_gib": service.kv_cache_gib / 4})
        with_less = recipe.model_copy(update={"inference": {**recipe.inference, name: smaller}})
        if service.engine in _EMBEDDED and not small_caches(with_less):
            yield f"inference.{name}.kv_cache_gib: {smaller.kv_cache_gib:g}", with_less


def host_memory_bytes() -> float:
    """The memory of this machine, or of the container if that is less."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # no container, or the older cgroups
        return total
    return min(total, float(limit)) if limit.isdecimal() else total


def shared_memory_here() -> float:
    """The size of /dev/shm of this machine; 0 without one."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0.0
    return float(found.f_blocks * found.f_frsize)


def _shown(parts: dict[str, float]) -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size >= GIB / 20)
