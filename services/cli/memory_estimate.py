"""How much memory each GPU of a recipe needs: formulas, no torch, no GPU. In bytes unless a name says GiB.

An estimate is for choosing a layout before anything starts: it counts what must be there and what is largest, with an
allowance for the allocator. Knows nothing about processes or ports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.cli.plan import trainer_name
from services.common.config.placement import engine_numbers
from services.common.config.policy import OFFLOAD_BUCKET_BYTES, PolicyConfig
from services.common.config.recipe import Recipe
from services.common.config.services import InferenceConfig

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALLOWANCE = 1.05  # fragmentation and buffers of collectives
BUCKETS_IN_FLIGHT = 3  # one fetched, one updated, one on its way back
CONTEXT_BYTES = int(1.5 * GIB)  # CUDA context, NCCL, kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory depends on.

    >>> ModelShape.by_name("Qwen/Qwen3-8B").num_layers
    36
    """

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    kv_width: int  # KV heads * head dimension
    vocabulary: int
    tied: bool = False

    @classmethod
    def of(cls, path: str | None) -> ModelShape | None:
        """From ``config.json`` in a local directory, else from the name; None where neither says."""
        if path is None:
            return None
        config = Path(path).expanduser() / "config.json"
        if config.is_file():
            return cls.from_config(config)
        return cls.by_name(path)

    @classmethod
    def from_config(cls, file: Path) -> ModelShape | None:
        """Of a dense decoder with gated MLP, counted from its dimensions; None when they are not all there."""
        try:
            config = json.loads(file.read_text())
            hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            intermediate, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
            vocabulary = int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
        tied = bool(config.get("tie_word_embeddings", False))
        parameters = layers * (attention + 3 * hidden * intermediate) + vocabulary * hidden * (1 if tied else 2)
        return cls(
            num_parameters=parameters, num_layers=layers, hidden=hidden, intermediate=intermediate,
            kv_width=kv_width, vocabulary=vocabulary, tied=tied,
        )  # fmt: skip

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


KNOWN_SHAPES = {
    "Qwen3-8B": ModelShape(
        num_parameters=8_190_735_360, num_layers=36, hidden=4096, intermediate=12288, kv_width=1024, vocabulary=151_936
    ),
    "Qwen2.5-7B": ModelShape(
        num_parameters=7_615_616_512, num_layers=28, hidden=3584, intermediate=18944, kv_width=512, vocabulary=152_064
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEstimate:
    """What one process puts on each of its GPUs."""

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
    """Bytes on the GPU of each of R ranks, for N parameters of m bytes (master) computed in c bytes, T tokens at once.

        weights      N m / R            FSDP shards the master weights
        gradients    N m / R            reduced into the master's type
        Adam         2 N m / R          two moments in the master's type; with the optimizer offloaded three buckets of them
        reference    N m / R            only with a KL term; nothing when it is offloaded
        teacher      N' m / R           only with a teacher_model, of its own size where that is known; likewise
        gathered     (2 layers + embedding and head) c
        activations  T (layers * hidden * c + one layer's work) with gradient checkpointing, else all layers' work;
                     the work of a layer: (8 hidden + 4 intermediate) c per token
        logits       4 * chunk * vocabulary * 4
        allowance    5% of all that, and 1.5 GiB for CUDA and NCCL

    T is the token budget, or the context length if that is more: one sequence is never cut. What is offloaded lies in the
    memory of the host, where it is not counted.
    """
    trainer, ranks = policy.trainer, policy.trainer.num_ranks
    master, compute = DTYPE_BYTES[trainer.master_dtype], DTYPE_BYTES[trainer.compute_dtype]
    shard = shape.num_parameters * master / ranks
    ends = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = (shape.num_parameters - ends) / shape.num_layers
    tokens = max(trainer.token_budget, policy.model.context_length)
    work = (8 * shape.hidden + 4 * shape.intermediate) * compute
    kept = (
        shape.num_layers * shape.hidden * compute + work if trainer.gradient_checkpointing else shape.num_layers * work
    )
    moments = 2 * shard
    if "optimizer" in trainer.offload:
        moments = min(moments, BUCKETS_IN_FLIGHT * 2.0 * OFFLOAD_BUCKET_BYTES)
    frozen_here = "reference" not in trainer.offload
    has_reference = policy.algorithm.needs_reference and frozen_here
    distillation = policy.algorithm.distillation
    teacher = None
    if distillation is not None and distillation.teacher_model is not None and frozen_here:
        teacher = ModelShape.of(distillation.teacher_model) or shape
    parts = {
        "weights": shard,
        "gradients": shard,
        "Adam": moments,
        "reference": shard if has_reference else 0.0,
        **({} if teacher is None else {"teacher": teacher.num_parameters * master / ranks}),
        "gathered": (2 * layer + ends) * compute
        if ranks > 1 or master != compute or "reference" in trainer.offload
        else 0.0,
        "activations": float(tokens * kept),
        "logits": 4.0 * trainer.logprob_chunk_tokens * shape.vocabulary * 4,
    }
    parts["allowance"] = sum(parts.values()) * (ALLOWANCE - 1) + CONTEXT_BYTES
    return parts


def engine_parts(
    shape: ModelShape, service: InferenceConfig, gpu_memory: float, context_length: int
) -> dict[str, float]:
    """Bytes on each GPU of one SGLang engine of t GPUs: everything fits into ``memory_share`` of the GPU, or it cannot run.

        weights   N * 2 / t
        KV cache  what is left of the share; a token takes 2 * layers * kv_width * 2 / t bytes, and at least one
                  sequence of full context must fit
        allowance 1.5 GiB outside the share, for CUDA and graphs
    """  # fmt: skip
    parallel = service.sglang.tensor_parallel
    weights = shape.num_parameters * 2 / parallel
    needed = kv_bytes_per_token(shape, parallel) * context_length
    left = service.sglang.memory_share * gpu_memory - weights
    return {"weights": weights, "KV cache": max(left, needed), "allowance": float(CONTEXT_BYTES)}


def kv_bytes_per_token(shape: ModelShape, tensor_parallel: int) -> float:
    """Keys and values of one token in all layers, on one GPU of an engine."""
    return 2 * shape.num_layers * shape.kv_width * 2 / tensor_parallel


def estimates(recipe: Recipe) -> Iterator[GpuEstimate]:
    """One for each process that has GPUs of its own; a policy whose size nobody knows is left out."""
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
                remedy=f"more GPUs in policies.{name}.trainer.gpus, trainer.offload: [optimizer, reference], "
                "trainer.master_dtype: bfloat16, gradient_checkpointing: true or a smaller token_budget",
            )
    for name, service in recipe.inference.items():
        if service.engine == "sglang" and service.gpus:
            yield from _engines(recipe, name, shapes, memory)


def _engines(recipe: Recipe, name: str, shapes: dict[str, ModelShape | None], memory: float) -> Iterator[GpuEstimate]:
    """The engines of a service take its GPUs in the order of its policies."""
    service = recipe.inference[name]
    gpus = list(service.gpus)
    for policy, number in engine_numbers(service, service.policies or list(recipe.policies)).items():
        own = [gpus.pop(0) for _ in range(number * service.sglang.tensor_parallel)]
        shape = shapes[policy]
        if shape is not None:
            context = recipe.policies[policy].model.context_length
            yield GpuEstimate(
                process=f"inference-{name}: {number} × {policy}",
                node=service.node,
                gpus=tuple(own),
                parts=engine_parts(shape, service, memory, context),
                limit=min(memory, service.sglang.memory_share * memory + CONTEXT_BYTES),
                remedy=f"a larger inference.{name}.sglang.tensor_parallel or memory_share, or a smaller "
                f"policies.{policy}.model.context_length",
            )


def misfits(recipe: Recipe) -> list[str]:
    """One line for each process that cannot fit, with its parts and what would help."""
    lines = []
    for found in estimates(recipe):
        if not found.fits:
            parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in found.parts.items() if size >= GIB / 20)
            lines.append(
                f"{found.process} needs {found.total / GIB:.1f} GiB on each GPU of node {found.node} ({parts}), "
                f"but has {found.limit / GIB:.1f} (launch.gpu_memory_gib: {recipe.launch.gpu_memory_gib:g}): "
                f"write {found.remedy}"
            )
    return lines
