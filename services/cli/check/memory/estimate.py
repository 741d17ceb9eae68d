"""Estimates the memory that a recipe needs on each GPU, from formulas, without torch. Bytes, unless a name says GiB.

An estimate is for choosing a layout before a start: the sum of the required and largest parts, with an allowance for
the allocator. Independent of processes and ports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.check.model_files import file_of
from services.common.config.processes.services import InferenceConfig
from services.common.config.training.adapter import ALL_LINEAR, AdapterConfig
from services.common.config.training.policy import OFFLOAD_BUCKET_BYTES, PolicyConfig
from services.common.errors import ConfigError
from services.common.safetensors_files import read_object

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 4}  # auto: of a device that is not known yet
ALLOWANCE = 1.05  # fragmentation and buffers of collectives
_HEAD_BLOCK = 8192  # CHUNK_VOCAB of the trainer
BUCKETS_IN_FLIGHT = 3  # one fetched, one updated, one on its way back
CONTEXT_BYTES = int(1.5 * GIB)  # CUDA context, NCCL, kernels


@dataclass(frozen=True, slots=True, kw_only=True)
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
        ``intermediate`` is then the width that a token passes through."""
        try:
            return cls._counted(read_object(file))
        except (ConfigError, ValueError, KeyError, TypeError, ArithmeticError):
            return None

    @classmethod
    def _counted(cls, config: dict[str, Any]) -> ModelShape | None:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        intermediate, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
        vocabulary = int(config["vocab_size"])
        if min(hidden, layers, intermediate, heads, vocabulary) < 1:
            return None
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
        tied = bool(config.get("tie_word_embeddings", False))
        sparse, experts, width, active = _experts(config, layers, intermediate)
        mlps = (layers - sparse) * 3 * hidden * intermediate + sparse * hidden * (3 * width + experts)
        parameters = layers * attention + mlps + vocabulary * hidden * (1 if tied else 2)
        return cls(
            num_parameters=parameters, num_layers=layers, hidden=hidden, intermediate=active if sparse else intermediate,
            kv_width=kv_width, vocabulary=vocabulary, query_width=heads * head_dim, tied=tied,
            head_norms=config.get("model_type") not in _WITHOUT_HEAD_NORMS,
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


def _experts(config: dict[str, Any], layers: int, intermediate: int) -> tuple[int, int, int, int]:
    """(layers with experts, experts of one, the width of all its MLPs, that of those a token passes through), by the names
    that Qwen, Mixtral, DeepSeek and GPT-OSS give them."""
    experts = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
    if not experts:
        return 0, 0, 0, 0
    one = int(config.get("moe_intermediate_size") or intermediate)
    common = int(config.get("shared_expert_intermediate_size") or one * int(config.get("n_shared_experts") or 0))
    every, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    dense |= set(range(int(config.get("first_k_dense_replace") or 0)))
    sparse = sum((layer + 1) % every == 0 and layer not in dense for layer in range(layers))
    return sparse, experts, experts * one + common, int(config.get("num_experts_per_tok") or 1) * one + common


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITHOUT_HEAD_NORMS = ("qwen2", "llama", "mistral")
KNOWN_SHAPES = {
    "Qwen3-0.6B": ModelShape(
        num_parameters=596_049_920, num_layers=28, hidden=1024, intermediate=3072, kv_width=1024, vocabulary=151_936,
        query_width=2048, tied=True,
    ),
    "Qwen3-1.7B": ModelShape(
        num_parameters=1_720_574_976, num_layers=28, hidden=2048, intermediate=6144, kv_width=1024, vocabulary=151_936,
        tied=True,
    ),
    "Qwen3-8B": ModelShape(
        num_parameters=8_190_735_360, num_layers=36, hidden=4096, intermediate=12288, kv_width=1024, vocabulary=151_936
    ),
    "Qwen2.5-1.5B": ModelShape(
        num_parameters=1_543_714_304, num_layers=28, hidden=1536, intermediate=8960, kv_width=256, vocabulary=151_936,
        tied=True, head_norms=False,
    ),
    "Qwen2.5-7B": ModelShape(
        num_parameters=7_615_616_512, num_layers=28, hidden=3584, intermediate=18944, kv_width=512, vocabulary=152_064,
        head_norms=False,
    ),
}  # fmt: skip


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

    and in the update, with the optimizer offloaded, three buckets of moments.
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
    blocks = 4.0 * min(trainer.logprob_chunk_tokens, tokens) * min(_HEAD_BLOCK, shape.vocabulary) * 4
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
    buckets = 2.0 * min(BUCKETS_IN_FLIGHT * OFFLOAD_BUCKET_BYTES, shape.num_parameters * master / trainer.num_ranks)
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
    needed = kv_bytes_per_token(shape, parallel) * context_length
    left = service.servers.memory_share * gpu_memory - weights
    return {"weights": weights, "KV cache": max(left, needed), "allowance": float(CONTEXT_BYTES)}


def kv_bytes_per_token(shape: ModelShape, tensor_parallel: int) -> float:
    """Keys and values of one token in all layers, on one GPU of an engine."""
    return 2 * shape.num_layers * shape.kv_width * 2 / tensor_parallel
