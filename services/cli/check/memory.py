"""Estimates the memory that a recipe needs, on each GPU and on each host, and names the processes that do not fit.

From formulas, without torch, before any process starts: for choosing a layout. Bytes, unless a name says GiB. Of a host the
models, moments and caches in its memory are counted, and the files of weight versions in /dev/shm, which count as memory as
well; not datasets, sandboxes and environments. Only the machine of node 0 is compared with its estimate.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.cli.plan import trainer_name
from services.common.config.loading import apply_override
from services.common.config.processes import (
    LOADED_BYTES_PER_S,
    InferenceConfig,
    Placement,
    cache_bytes,
    engine_numbers,
    too_small,
)
from services.common.config.recipe import Recipe
from services.common.config.training import ALL_LINEAR, OFFLOAD_BUCKET_BYTES, AdapterConfig, PolicyConfig
from services.common.errors import ConfigError
from services.common.safetensors_files import file_of, read_object

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 4}  # auto: of a device that is not known yet
ALLOWANCE = 1.05  # fragmentation and buffers of collectives
_HEAD_BLOCK, _HEAD_TOKENS = 8192, 1024  # CHUNK_VOCAB and CHUNK_TOKENS of the trainer
CONTEXT_BYTES = int(1.5 * GIB)  # CUDA context, NCCL, kernels
KEPT_BY_OTHERS, OTHERS = "kept by others", "other processes"
_MOST_NAMED = 3  # settings that take less memory
_RANK = 16  # of the adapter that is proposed
_RANK_BYTES = 2 * GIB  # an interpreter with torch and CUDA, in host memory
_UNKNOWN_GIB = 8  # for versions of policies whose size is not known before the run
_EMBEDDED = ("torch", "forced")
_OFFLOADED = {"optimizer": "Adam", "reference": "reference"}  # what is offloaded -> its part
_SMALL = 1 * GIB  # files of that size may spill from /dev/shm to a disk unnoticed


# --- models


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that memory depends on.

    >>> ModelShape.by_name("Qwen/Qwen3-8B").num_layers
    36
    """

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    kv_width: int  # KV heads * head dimension
    vocabulary: int
    query_width: int = 0  # heads * head dimension; 0: as the hidden state
    tied: bool = False
    head_norms: bool = True  # norms over each head's queries and keys

    @property
    def queries(self) -> int:
        """The width of all heads' queries."""
        return self.query_width or self.hidden

    @classmethod
    def of(cls, path: str | None) -> ModelShape | None:
        """From ``config.json`` in a directory or in the hub's cache, else from the name; None where neither says."""
        if path is None:
            return None
        config = file_of(path, "config.json")
        return cls.by_name(path) if config is None else cls.from_config(config)

    @classmethod
    def from_config(cls, file: Path) -> ModelShape | None:
        """Of a decoder with gated MLPs, dense or with experts, counted from its dimensions; None when they are not all there.
        ``intermediate`` is then the width that a token passes through. Experts have the names of Qwen, Mixtral, DeepSeek and
        GPT-OSS."""
        try:
            config = read_object(file)
            hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            intermediate, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
            vocabulary = int(config["vocab_size"])
            if min(hidden, layers, intermediate, heads, vocabulary) < 1:
                return None
            head_dim = int(config.get("head_dim") or hidden // heads)
            kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
            attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
            tied = bool(config.get("tie_word_embeddings", False))
            experts = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
            # Layers with experts, their parameters, the width of a token.
            sparse, per_layer, active = 0, 0, intermediate
            if experts:
                one = int(config.get("moe_intermediate_size") or intermediate)
                shared = one * int(config.get("n_shared_experts") or 0)
                shared = int(config.get("shared_expert_intermediate_size") or shared)
                every, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
                dense |= set(range(int(config.get("first_k_dense_replace") or 0)))
                sparse = sum((layer + 1) % every == 0 and layer not in dense for layer in range(layers))
                per_layer = hidden * (3 * (experts * one + shared) + experts)
                active = int(config.get("num_experts_per_tok") or 1) * one + shared if sparse else intermediate
            mlps = (layers - sparse) * 3 * hidden * intermediate + sparse * per_layer
            return cls(
                num_parameters=layers * attention + mlps + vocabulary * hidden * (1 if tied else 2), num_layers=layers,
                hidden=hidden, intermediate=active, kv_width=kv_width, vocabulary=vocabulary, query_width=heads * head_dim,
                tied=tied, head_norms=config.get("model_type") not in ("qwen2", "llama", "mistral"),
            )  # fmt: skip
        except (ConfigError, ValueError, KeyError, TypeError, ArithmeticError):
            return None

    @classmethod
    def by_name(cls, name: str) -> ModelShape | None:
        """A model that we know, else the usual shape for the "8B" in the name; None when the name has no size."""
        short = name.rstrip("/").rpartition("/")[2]
        for known, shape in KNOWN_SHAPES.items():
            if short.startswith(known):
                return shape
        size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)B(?![A-Za-z])", short, re.IGNORECASE)
        if size is None:
            return None
        billions = float(size.group(1))
        # Width grows with the cube root of the size (1B: 2048, 8B: 4096, 70B: about 8400), depth fills up the rest.
        hidden = max(128, round(2048 * billions ** (1 / 3) / 128) * 128)
        return cls(
            num_parameters=int(billions * 1e9), num_layers=max(1, round(billions * 1e9 / (12 * hidden * hidden))),
            hidden=hidden, intermediate=3 * hidden, kv_width=1024, vocabulary=152_000,
        )  # fmt: skip


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
KNOWN_SHAPES = {
    "Qwen3-0.6B": ModelShape(596_049_920, 28, 1024, 3072, 1024, 151_936, query_width=2048, tied=True),
    "Qwen3-1.7B": ModelShape(1_720_574_976, 28, 2048, 6144, 1024, 151_936, tied=True),
    "Qwen3-8B": ModelShape(8_190_735_360, 36, 4096, 12288, 1024, 151_936),
    "Qwen2.5-1.5B": ModelShape(1_543_714_304, 28, 1536, 8960, 256, 151_936, tied=True, head_norms=False),
    "Qwen2.5-7B": ModelShape(7_615_616_512, 28, 3584, 18944, 512, 152_064, head_norms=False),
}


# --- one GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEstimate:
    """The memory that one process needs on each of its GPUs."""

    process: str
    node: int
    gpus: tuple[int, ...]
    parts: dict[str, float]  # name -> bytes
    limit: float  # bytes that it may use
    remedy: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def trainer_rank_parts(shape: ModelShape, policy: PolicyConfig) -> dict[str, float]:
    """Bytes on the GPU of each of R ranks, for N parameters of m bytes (master) computed in c bytes.

        weights      N m / R            FSDP shards the master weights
        gradients    N m / R            reduced into the master's type
        Adam         2 N m / R          two moments in the master's type; 0 with the optimizer offloaded
        reference    N f / R            only with a KL term, in f bytes, the fewer of m and c; 0 when offloaded
        teacher      N' f / R           only with a teacher_model, of its own size where that is known; likewise
        gathered, activations, backward, update     of the largest of the moments of ``_moments``
        allowance    5% of all that, and 1.5 GiB for CUDA and NCCL

    With an adapter of P parameters: weights (N c + P m) / R, gradients P m / R, Adam 2 P m / R, no reference, which is the
    model without its adapter, and no gradients of the base.

    Offloaded parts are in the memory of the host and not counted. ``benchmarks/rehearsal_8b.py`` compares all but the
    allowance with the storages of a training step at full size.
    """
    trainer, ranks = policy.trainer, policy.trainer.num_ranks
    frozen = DTYPE_BYTES[trainer.frozen_dtype]
    master, compute = DTYPE_BYTES[trainer.master_dtype], DTYPE_BYTES[trainer.compute_dtype]
    shard = published_parameters(shape, policy) * master / ranks
    base = 0.0 if policy.adapter is None else shape.num_parameters * compute / ranks
    frozen_here = "reference" not in trainer.offload
    has_reference = policy.algorithm.needs_reference and frozen_here and policy.adapter is None
    distillation = policy.algorithm.distillation
    teacher = None
    if distillation is not None and distillation.teacher_model is not None and frozen_here:
        teacher = ModelShape.of(distillation.teacher_model) or shape
    parts = {
        "weights": base + shard,
        "gradients": shard,
        "Adam": 0.0 if "optimizer" in trainer.offload else 2 * shard,
        "reference": shape.num_parameters * frozen / ranks if has_reference else 0.0,
        **({} if teacher is None else {"teacher": teacher.num_parameters * frozen / ranks}),
        **max(_moments(shape, policy), key=lambda parts: sum(parts.values())),
    }
    parts["allowance"] = sum(parts.values()) * (ALLOWANCE - 1) + CONTEXT_BYTES
    return parts


def published_parameters(shape: ModelShape, policy: PolicyConfig) -> int:
    """Parameters of a version, which are those that are trained: the adapter's if there is one, else all."""
    return shape.num_parameters if policy.adapter is None else adapter_parameters(shape, policy.adapter)


def adapter_parameters(shape: ModelShape, adapter: AdapterConfig) -> int:
    """Parameters of an adapter: rank * (inputs + outputs) of each target. Targets outside attention and MLP count 0."""
    hidden, inner = shape.hidden, shape.intermediate
    widths = {
        "q_proj": hidden + shape.queries,
        "k_proj": hidden + shape.kv_width,
        "v_proj": hidden + shape.kv_width,
        "o_proj": hidden + shape.queries,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": hidden + inner,
    }
    targets = widths if adapter.targets == ALL_LINEAR else adapter.targets
    return shape.num_layers * adapter.rank * sum(widths.get(target, 0) for target in targets)


def _moments(shape: ModelShape, policy: PolicyConfig) -> list[dict[str, float]]:
    """What a minibatch takes beside the states, at moments of which one is its peak.

    With E the parameters of embedding and head, V x H those of the head, B those of a layer, and a layer's saved tensors
    S = (7 hidden + queries + 4 intermediate + n (queries + keys)) c per token, n = 5 with norms of heads, else 2:

                            gathered      activations                            backward
        in the head         (B + E) c     T saved + T H (4 + c)                  V H (4 + c), and four blocks of logits
        in the last layer   (2 B + E) c   T saved + T (S + 2 intermediate c)     V H c + 4 B + hidden x intermediate c
        in the embedding    0             0                                      E (4 + c)

    and in the update, with the optimizer offloaded, a bucket of moments.
    saved is layers x hidden x c per token with gradient checkpointing, else layers x S. 4 is the type in which gradients
    are reduced over ranks. T is the token budget, or the context length if that is more, for one sequence is never cut, and
    at most what the sequences of a minibatch can hold. A single rank in its own precision gathers and reduces nothing. Below
    an adapter no weight has a gradient, and the peak is where the last layer is computed again, before the weights of the
    layer below are gathered: (B + E) c.
    """  # fmt: skip
    trainer, hidden, wide = policy.trainer, shape.hidden, shape.intermediate
    master, compute = DTYPE_BYTES[trainer.master_dtype], DTYPE_BYTES[trainer.compute_dtype]
    sharded = trainer.num_ranks > 1 or trainer.master_dtype != trainer.compute_dtype or "reference" in trainer.offload
    head = shape.vocabulary * hidden
    ends = head * (1 if shape.tied else 2)
    layer = (shape.num_parameters - ends) / shape.num_layers
    tokens = min(max(trainer.token_budget, policy.model.context_length), minibatch_tokens(policy))
    copies = 5 if shape.head_norms else 2
    saved = (7 * hidden + shape.queries + 4 * wide + copies * (shape.queries + shape.kv_width)) * compute
    recomputed = trainer.gradient_checkpointing is True
    kept = shape.num_layers * (hidden * compute if recomputed else saved)
    again = 2 * wide * compute + (saved if recomputed else 0)
    blocks = 4.0 * min(_HEAD_TOKENS, tokens) * min(_HEAD_BLOCK, shape.vocabulary) * 4
    gradients = policy.adapter is None  # of the model's own weights
    in_head = {
        "gathered": float((layer + ends) * compute * sharded),
        "activations": float(tokens * (kept + hidden * (4 + compute))),
        "backward": head * (4 + compute) * gradients + blocks,
    }
    in_layer = {
        "gathered": float(((1 + gradients) * layer + ends) * compute * sharded),
        "activations": float(tokens * (kept + again)),
        "backward": ((head * compute + 4 * layer) * sharded + hidden * wide * compute) * gradients,
    }
    in_embedding = {
        "gathered": 0.0,
        "activations": 0.0,
        "backward": (ends * (4 + compute) * sharded + head * compute) * gradients,
    }
    buckets = 2.0 * min(OFFLOAD_BUCKET_BYTES, shape.num_parameters * master / trainer.num_ranks)
    in_update = {"update": buckets if "optimizer" in trainer.offload else 0.0}
    return [in_head, in_layer, in_embedding, in_update]


def minibatch_tokens(policy: PolicyConfig) -> int:
    """The most tokens of a minibatch, each of whose sequences fills the context."""
    return -(-policy.batch.size // policy.batch.minibatches) * policy.model.context_length


def engine_parts(
    shape: ModelShape, service: InferenceConfig, gpu_memory: float, context_length: int
) -> dict[str, float]:
    """Bytes on each GPU of one SGLang or vLLM engine of t GPUs: all parts fit into ``memory_share`` of the GPU, or the engine
    cannot run.

        weights   N * 2 / t
        KV cache  the rest of the share; a token takes 2 * layers * kv_width * 2 / t bytes, and at least one
                  sequence of full context must fit
        allowance 1.5 GiB outside the share, for CUDA and graphs
    """  # fmt: skip
    assert service.servers is not None
    parallel = service.servers.tensor_parallel
    weights = shape.num_parameters * 2 / parallel
    needed = _token_bytes(shape, 2) / parallel * context_length
    left = service.servers.memory_share * gpu_memory - weights
    return {"weights": weights, "KV cache": max(left, needed), "allowance": float(CONTEXT_BYTES)}


def embedded_engine_parts(shape: ModelShape, service: InferenceConfig, context_length: int) -> dict[str, float]:
    """Bytes of one embedded engine (`torch`), on its device.

        weights    N d                                     d bytes of the engine's dtype
        KV cache   slots x context x 2 layers kv_width d   allocated when the engine starts; at most kv_cache_gib
        allowance  1.5 GiB, for CUDA
    """  # fmt: skip
    size = DTYPE_BYTES[service.dtype]
    slots = service.num_slots
    cache = cache_bytes(service.kv_cache_gib * GIB, slots, context_length, _token_bytes(shape, size))
    return {
        "weights": float(shape.num_parameters * size),
        "KV cache": float(cache),
        "allowance": float(CONTEXT_BYTES),
    }


def _token_bytes(shape: ModelShape, size: int) -> int:
    """Keys and values of one position in all layers, of elements of so many bytes."""
    return 2 * shape.num_layers * shape.kv_width * size


def alone(recipe: Recipe) -> Iterator[GpuEstimate]:
    """One estimate for each process on GPUs, as if it had them alone, except for policies of unknown size. A process on CUDA
    that names no GPU takes the first one; engines of a service take its GPUs in the order of its policies."""
    memory = recipe.launch.gpu_memory_gib * GIB
    shapes = {name: ModelShape.of(policy.model.path) for name, policy in recipe.policies.items()}
    for name, policy in recipe.trained_policies.items() if recipe.run.steps else ():
        shape, trainer = shapes[name], policy.trainer
        gpus = trainer.gpus or range(trainer.num_ranks // len(trainer.nodes) if trainer.device == "cuda" else 0)
        if shape is None or not gpus:
            continue
        for node in trainer.nodes:
            yield GpuEstimate(
                process=trainer_name(name, node),
                node=node,
                gpus=tuple(gpus),
                parts=trainer_rank_parts(shape, policy),
                limit=memory,
                remedy=f"more or larger GPUs in policies.{name}.trainer.gpus",
            )
    for name, service in recipe.inference.items():
        served = service.policies or list(recipe.policies)
        if not (service.gpus or service.device == "cuda"):
            continue
        if service.engine in _EMBEDDED:  # its policies share the first GPU
            parts: dict[str, float] = defaultdict(float)
            for policy_name in served:
                if (shape := shapes[policy_name]) is not None:
                    context = recipe.policies[policy_name].model.context_length
                    for part, size in embedded_engine_parts(shape, service, context).items():
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
        elif (settings := service.servers) is not None:
            numbers = engine_numbers(service, served)
            own = list(service.gpus or range(sum(numbers.values()) * settings.tensor_parallel))
            for policy_name, number in numbers.items():
                taken = [own.pop(0) for _ in range(number * settings.tensor_parallel)]
                if (shape := shapes[policy_name]) is not None:
                    context = recipe.policies[policy_name].model.context_length
                    yield GpuEstimate(
                        process=f"inference-{name}: {number} × {policy_name}",
                        node=service.node,
                        gpus=tuple(taken),
                        parts=engine_parts(shape, service, memory, context),
                        limit=min(memory, settings.memory_share * memory + CONTEXT_BYTES),
                        remedy=f"a larger inference.{name}.{service.engine}.tensor_parallel or memory_share, or a smaller "
                        f"policies.{policy_name}.model.context_length",
                    )


def estimates(recipe: Recipe) -> list[GpuEstimate]:
    """The estimates of all processes on GPUs, each with the part of the others on its GPUs.

    With `placement: shared` that is what the others keep there during its turn: the context of CUDA, which lives as long
    as the process, and the base of engines with an adapter. The rest is in host memory, or gone. Otherwise it is all that
    the others take."""
    shared = recipe.placement is Placement.SHARED
    lone = list(alone(recipe))
    found = []
    for own in lone:
        others = [each for each in lone if each is not own and each.node == own.node and {*each.gpus} & {*own.gpus}]
        if others and shared:
            own = replace(own, parts={**own.parts, KEPT_BY_OTHERS: sum(_kept(recipe, other) for other in others)})
        elif others and own.fits:
            own = replace(
                own,
                parts={**own.parts, OTHERS: sum(other.total for other in others)},
                limit=recipe.launch.gpu_memory_gib * GIB,
                remedy=f"GPUs of its own, as policies.*.trainer.gpus: [0] and inference.*.gpus: [1] ({own.total / GIB:.1f} GiB), "
                "or placement: shared, so that they take turns (engine: torch; sglang and vllm free no memory between turns)",
            )
        found.append(own)
    return found


def _kept(recipe: Recipe, estimate: GpuEstimate) -> float:
    """What a process keeps on its GPUs in the turn of another."""
    service = recipe.inference.get(estimate.process.removeprefix("inference-"))
    served = () if service is None else service.policies or list(recipe.policies)
    has_base = any(recipe.policies[policy].adapter is not None for policy in served)
    return CONTEXT_BYTES + (estimate.parts["weights"] if has_base else 0.0)


def misfits(recipe: Recipe) -> list[str]:
    """One line for each process that does not fit on its GPUs, with its parts and the keys to change."""
    lines = []
    for found in estimates(recipe):
        if found.fits:
            continue
        less: dict[float, str] = {}
        if found.process.startswith("trainer-") and OTHERS not in found.parts:
            less = {
                other.total: key
                for key, changed in _smaller(recipe)
                for other in estimates(changed)
                if other.process == found.process
            }
        lines.append(
            f"{found.process} needs {found.total / GIB:.1f} GiB on each GPU of node {found.node} ({_shown(found.parts)}), "
            f"but has {found.limit / GIB:.1f} (launch.gpu_memory_gib: {recipe.launch.gpu_memory_gib:g}): "
            f"write {_settings(found.total, less)}{found.remedy}"
        )
    return lines


def _settings(now: float, found: Mapping[float, str]) -> str:
    """The changes of one setting each that save most, with the GiB that are then needed; empty without any."""
    named = [f"{key} ({total / GIB:.1f} GiB)" for total, key in sorted(found.items()) if total < now]
    return f"{', '.join(named[:_MOST_NAMED])}, or " if named else ""


_LESS = (  # the plainer of two with the same effect comes later
    "trainer.offload: [optimizer, reference]",
    "trainer.offload: [optimizer]",
    "trainer.offload: [reference]",
    "trainer.offload: []",  # of the host's memory, as is the next
    "weights.keep_versions: 1",
    "trainer.gradient_checkpointing: true",
    f"adapter: {{rank: {_RANK}, alpha: {2 * _RANK}}}",
)


def _smaller(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Settings that may take less memory of a GPU or a host, as they are written, and the recipe with each."""
    for name, policy in recipe.trained_policies.items():
        context, settings = policy.model.context_length, list(_LESS)
        if policy.trainer.device != "cpu":  # which computes it slowly
            settings.append("trainer.compute_dtype: bfloat16")
        if min(policy.trainer.token_budget, minibatch_tokens(policy)) > context:
            settings.append(f"trainer.token_budget: {context}")
        elif context > 1024:
            settings.append(f"model.context_length: {context // 2}")
        yield from _changed(recipe, f"policies.{name}", settings)
    for name, service in recipe.inference.items():
        if service.engine in _EMBEDDED:
            smaller = _changed(recipe, f"inference.{name}", [f"kv_cache_gib: {service.kv_cache_gib / 4:g}"])
            yield from ((key, changed) for key, changed in smaller if not small_caches(changed))


def _changed(recipe: Recipe, section: str, settings: Iterable[str]) -> Iterator[tuple[str, Recipe]]:
    """The recipe with each setting of a section that it can have."""
    for setting in settings:
        tree = recipe.model_dump(mode="json")
        key, _, value = setting.partition(": ")
        apply_override(tree, f"{section}.{key}={value}")
        with suppress(ValueError, ConfigError):
            yield f"{section}.{setting}", Recipe.model_validate(tree)


# --- one host


@dataclass(slots=True)
class HostEstimate:
    """The needs of one node: name of a part -> bytes."""

    memory: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shared: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # files in /dev/shm
    of_process: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of both, by process

    def add(self, process: str, part: str, size: float, *, shared: bool = False) -> None:
        (self.shared if shared else self.memory)[part] += size
        self.of_process[process] += size

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

    A trainer or an engine on a CPU takes what it takes on a GPU; a trainer on GPUs what it offloads, and 2 GiB per rank. Each
    service has a mirror of a version, which is mapped from the snapshot where both are on one host and the transfer is no
    delta. In /dev/shm lie the snapshots (keep_versions, one being written, one mapped by replicas, and with deltas the base
    of the one in progress) and the stages of SGLang and vLLM.
    """
    found: dict[int, HostEstimate] = defaultdict(HostEstimate)
    for name, policy in recipe.policies.items():
        shape = ModelShape.of(policy.model.path)
        if shape is None:
            continue
        trainer, weights = policy.trainer, policy.weights
        version = published_parameters(shape, policy) * DTYPE_BYTES[policy.published_dtype]
        for node in trainer.nodes if policy.trained else ():
            process, share = trainer_name(name, node), 1 / len(trainer.nodes)
            all_here = policy.model_copy(update={"trainer": trainer.model_copy(update={"offload": []})})
            whole = {part: size * trainer.num_ranks for part, size in trainer_rank_parts(shape, all_here).items()}
            if _is_on_cpu(trainer.device, bool(trainer.gpus), has_gpus=has_gpus):
                found[node].add(process, f"trainer {name}", (sum(whole.values()) - whole["allowance"]) * share)
                continue
            found[node].add(process, "processes", _RANK_BYTES * trainer.num_ranks * share)
            for offloaded, part in _OFFLOADED.items():
                if offloaded in trainer.offload:
                    found[node].add(process, f"offloaded {part} of {name}", whole[part] * share)
        if policy.trained:
            number = weights.keep_versions + 2 + (weights.transfer != "full")
            first = trainer.nodes[0]
            found[first].add(trainer_name(name, first), f"{number} versions of {name}", number * version, shared=True)
        for service_name, service in recipe.inference.items():
            if name not in (service.policies or list(recipe.policies)) or service.engine == "scripted":
                continue
            on_node, process, of = found[service.node], f"inference-{service_name}", f"of {service_name} {name}"
            with_publisher = policy.trained and service.node == trainer.nodes[0]
            if not (with_publisher and weights.transfer != "delta" and "mapped" in weights.transports):
                on_node.add(process, f"mirror {of}", version)
            if service.servers is not None:
                on_node.add(process, f"stage {of}", version, shared=True)
            if service.engine in _EMBEDDED and _is_on_cpu(service.device, bool(service.gpus), has_gpus=has_gpus):
                for part, size in embedded_engine_parts(shape, service, policy.model.context_length).items():
                    if part != "allowance":
                        on_node.add(process, f"{part} {of}", size)
    return dict(found)


def _is_on_cpu(device: str, has_own_gpus: bool, *, has_gpus: bool) -> bool:
    return device == "cpu" or (device == "auto" and not has_own_gpus and not has_gpus)


def shared_memory_gib(recipe: Recipe, node: int) -> int:
    """The size of /dev/shm that a node of the recipe needs, on a machine with GPUs, with a tenth to spare."""
    estimate = host_estimates(recipe, has_gpus=True).get(node, HostEstimate())
    unknown = any(ModelShape.of(policy.model.path) is None for policy in recipe.policies.values())
    needed = math.ceil(1.1 * estimate.shared_bytes / GIB)
    return max(1, needed + (_UNKNOWN_GIB if unknown else 0))


def loading_s(recipe: Recipe) -> float:
    """Seconds that servers may take longer to start because of the size of their models."""
    served = ((policy, shape) for name, policy, shape in _served(recipe) if recipe.inference[name].servers is not None)
    sizes = (shape.num_parameters * DTYPE_BYTES[recipe.policies[policy].published_dtype] for policy, shape in served)
    return max(sizes, default=0) / LOADED_BYTES_PER_S


def small_caches(recipe: Recipe) -> list[str]:
    """One line for each embedded engine with a KV cache that holds no sequence of the whole context."""
    problems = []
    for name, policy, shape in _served(recipe):
        service, context = recipe.inference[name], recipe.policies[policy].model.context_length
        token_bytes, limit = _token_bytes(shape, DTYPE_BYTES[service.dtype]), service.kv_cache_gib * GIB
        fits = service.engine not in _EMBEDDED or service.num_slots * context * token_bytes <= limit
        if not fits and (problem := too_small(limit, context, token_bytes)):
            problems.append(f"inference.{name}, policy {policy}: {problem}")
    return problems


def _served(recipe: Recipe) -> Iterator[tuple[str, str, ModelShape]]:
    """Services with each of their policies of known size."""
    for name, service in recipe.inference.items():
        for policy in service.policies or list(recipe.policies):
            if (shape := ModelShape.of(recipe.policies[policy].model.path)) is not None:
                yield name, policy, shape


def host_problems(recipe: Recipe, *, has_gpus: bool) -> list[str]:
    """One line for memory, and one for /dev/shm, that this machine has too little of for node 0."""
    estimate = host_estimates(recipe, has_gpus=has_gpus).get(0)
    if estimate is None:
        return []
    problems = []
    memory = host_memory_bytes()
    if estimate.total_bytes > memory:
        less = {host_estimates(other, has_gpus=has_gpus)[0].total_bytes: key for key, other in _smaller(recipe)}
        no_gpu = "" if has_gpus else " and no NVIDIA GPU: run on one that has, try the recipe with --profile tiny, or"
        problems.append(
            f"node 0 needs about {estimate.total_bytes / GIB:.1f} GiB of memory ({_shown(estimate.parts)}), but this machine has "
            f"{memory / GIB:.1f}{no_gpu or ':'} write {_settings(estimate.total_bytes, less)}use more nodes"
        )
    shared = shared_memory_here()
    spills = {name for name, policy in recipe.trained_policies.items() if policy.weights.spill_directory is not None}
    if estimate.shared_bytes > max(shared, _SMALL) and spills != set(recipe.trained_policies):
        size = -(-int(estimate.shared_bytes) // GIB)
        problems.append(
            f"/dev/shm of node 0 needs about {estimate.shared_bytes / GIB:.1f} GiB ({_shown(estimate.shared)}), but has "
            f"{shared / GIB:.1f}: enlarge it (`mount -o remount,size={size}G /dev/shm`; in a container --shm-size={size}g), "
            "or name a directory on a fast disk in policies.*.weights.spill_directory"
        )
    return problems


def host_lines(recipe: Recipe) -> list[str]:
    """The estimate of node 0 beside the memory of this machine, in one line; none where no policy has a known size."""
    return [
        f"memory of node 0, estimated: {found.total_bytes / GIB:.1f} of {host_memory_bytes() / GIB:.1f} GiB ({_shown(found.parts)})"
        for node, found in host_estimates(recipe, has_gpus=False).items()
        if node == 0
    ]


def host_memory_bytes() -> float:
    """The memory of this machine, or of the container if that is less."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # no container, or the older cgroups
        return total
    return min(total, float(limit)) if limit.isdecimal() else total


def shared_memory_here() -> float:
    """The size of /dev/shm of this machine; 0 without one."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0.0
    return float(found.f_blocks * found.f_frsize)


def _shown(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= GIB / 20)
