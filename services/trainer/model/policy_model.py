"""The model being trained: a Hugging Face causal LM that returns log-probabilities of chosen tokens instead of logits.

Independent of losses, optimizers and batches. Attention runs over packed documents (``attention``), the head in blocks
(``logprobs``). The model is always in evaluation mode, so that dropout, jitter and all other noise are off: the ratio of the
policy to itself must be 1. ``self_test`` compares each model with its own forward pass at load.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Self

import structlog
import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from services.common.config.algorithm import ValueHeadConfig
from services.common.config.training import AdapterConfig
from services.common.errors import ConfigError, ModelMismatchError
from services.common.lora import adapter_off, adapter_weights, attach, base_weights, initial_tensor, tensor_entry
from services.common.safetensors_files import INDEX, SINGLE, model_directory, places, weight_files
from services.common.system.machine import available_bytes
from services.common.text.chat import load_model
from services.common.weights.snapshot import (
    AdapterIdentity,
    DigestAlgorithm,
    TensorEntry,
    named_weights,
    version_digest,
)
from services.trainer.model.attention import Documents, Kernel, register_attention
from services.trainer.model.logprobs import Drawn, Targets, token_logprobs
from services.trainer.model.self_test import Limit, NoTinyCopyError, check_architecture, check_loaded
from services.trainer.ranks import HostGroup, Ranks, full, local_rows, shard

# --- The adapter of the model being trained: initial values, digest of the base, and the base as a model of its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup:
    """The adapter that a model gets when it is loaded."""

    config: AdapterConfig
    dtype: torch.dtype  # of the adapter; the base has its own
    seed: int  # of the initial values


@torch.no_grad()
def reset_adapter(causal_lm: Any, setup: AdapterSetup) -> None:
    """Set this rank's rows of the adapter to their initial values."""
    for name, weight in adapter_weights(causal_lm).items():
        rows, first = local_rows(weight)
        if len(rows):
            rows.copy_(initial_tensor(name, tuple(weight.shape), setup.seed)[first : first + len(rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The weights below an adapter: where they were read, and their digests."""

    path: str  # directory or hub name
    digest: str  # as of a version
    dtype: str
    tensors: dict[str, str]  # name -> digest


def digest_base(causal_lm: Any, ranks: Ranks, algorithm: DigestAlgorithm, path: str) -> Base:
    """Digest the base, which was read from ``path``, on the first rank, for all. A collective; the peak of extra memory is one tensor."""
    entries: list[TensorEntry] = []
    dtype = ""
    for name, weight in base_weights(causal_lm).items():
        dtype = str(weight.dtype).removeprefix("torch.")
        whole = full(weight)  # a collective
        if ranks.is_first:
            entries.append(tensor_entry(name, whole, algorithm))
    own = version_digest(entries) if ranks.is_first else ""
    digest = HostGroup(ranks).gather(own, "learning the digest of the adapter's base")[0]
    return Base(path=path, digest=digest, dtype=dtype, tensors={entry.name: entry.digest for entry in entries})


class WithoutAdapter:
    """A model as its base: the reference of a KL term, without weights of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        with adapter_off(self._model):
            scores: tuple[torch.Tensor, ...] = self._model(*arguments)
        return scores


# --- The value head: a linear map from the last hidden state to the expected return, initially 0.


NAME = "value_head."  # prefix of the names of its parameters


class ValueHead(torch.nn.Module):
    """V = hidden . weight + bias, in its own precision."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        # Vectors, so that shards of all ranks are alike in size and weight decay leaves them alone.
        self.weight = torch.nn.Parameter(torch.zeros(width, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens]"""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias


def value_head_for(causal_lm: torch.nn.Module) -> ValueHead:
    """A head for the model, on the device of the model's weights (which may be the meta device)."""
    embeddings = causal_lm.get_input_embeddings().weight  # type: ignore[operator]
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    return ValueHead(int(causal_lm.config.hidden_size), dtype, embeddings.device)  # type: ignore[union-attr, arg-type]


def own_rates(config: ValueHeadConfig | None) -> dict[str, float]:
    """The head's own peak learning rate for the optimizer, if the settings have one."""
    return {} if config is None or config.lr is None else {NAME: config.lr}


# --- Loads a model by shards: every rank reads only its own rows from the checkpoint's files.


log = structlog.get_logger()
_GIB = 1 << 30
_PATTERNS = ["*.safetensors", INDEX, "config.json", "generation_config.json"]


Sources = tuple[str, ...]  # stored matrices of one expert, in the order of their rows

# By name, in order: stack the experts; stack them, then put matrices below each other within each expert.
_SUPPORTED: tuple[tuple[tuple[str, int], ...], ...] = (
    (("MergeModulelist", 0),),
    (("MergeModulelist", 0), ("Concatenate", 1)),
)


def merged_experts(
    model_type: str, shapes: Mapping[str, Sequence[int]], stored: Collection[str]
) -> dict[str, list[Sources]]:
    """The stored matrices of every expert, by the weight that merges them; weights that are stored as they are left out.

    ``shapes`` are those of the model's weights by name, ``stored`` the names in the checkpoint.
    """
    found: dict[str, list[Sources]] = {}
    for patterns, target in _mergers(model_type):
        for name in shapes:
            if name in stored or not name.endswith(target):
                continue
            prefix = name.removesuffix(target)
            experts = [
                tuple(prefix + pattern.replace("*", str(expert)) for pattern in patterns)
                for expert in range(shapes[name][0])
            ]
            if all(source in stored for sources in experts for source in sources):
                found[name] = experts
    return found


def _mergers(model_type: str) -> list[tuple[list[str], str]]:
    """(patterns of stored names, ending of the merged name) of the supported conversions of a kind of model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = []
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        operations: Any = getattr(conversion, "operations", None) or ()
        kinds = tuple(
            (type(operation).__name__, operation.dim) for operation in operations if hasattr(operation, "dim")
        )
        patterns, targets = conversion.source_patterns, conversion.target_patterns
        plain = all(pattern.count("*") == 1 for pattern in patterns) and len(targets) == 1
        if plain and len(kinds) == len(operations) and kinds in _SUPPORTED:
            found.append((list(patterns), str(targets[0])))
    return found


class _NotByShardsError(Exception):
    """A checkpoint cannot be read by shards. Internal to this module."""

    def __init__(self, reason: str, num_parameters: int = 0) -> None:
        super().__init__(reason)
        self.num_parameters = num_parameters  # 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A model on the meta device, and the files of its weights."""

    causal_lm: Any
    files: Mapping[str, Path]  # by name of the stored tensor
    experts: Mapping[str, list[Sources]]  # by name of a merged weight: the stored matrices of each expert
    buffers: Mapping[str, torch.Tensor]  # computed, not stored: rotary frequencies

    def materialize(self, root: torch.nn.Module, device: torch.device, offload: bool = False) -> int:
        """Allocate and fill ``root``, which holds ``causal_lm`` and may be sharded.

        ``offload`` leaves parameters on the host; buffers always go to ``device``. Returns the bytes read.
        """
        root.to_empty(device="cpu" if offload else device)
        self.causal_lm.tie_weights()  # the line above separated tied weights
        for name, value in self.buffers.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self.causal_lm.get_submodule(owner), own_name, value.to(device))
        return _read_rows(self.causal_lm, self.files, self.experts)


def open_by_shards(path: str | Path, dtype: torch.dtype) -> MetaModel | None:
    """Open the model at a directory or hub name with weights in ``dtype``; None when the model must be loaded whole.

    Reads the config and the names in the files, no weights.

    Raises ``ConfigError`` when it must be loaded whole, and the host lacks the memory for the copies of its ranks.
    """
    try:
        return _open(path, dtype)
    except _NotByShardsError as reason:
        _require_memory(path, reason, dtype)
        log.info("model.loaded_whole", path=str(path), reason=str(reason))
        return None


def _require_memory(path: str | Path, reason: _NotByShardsError, dtype: torch.dtype) -> None:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, available = reason.num_parameters * dtype.itemsize * ranks_here, available_bytes()
    if needed > available:
        raise ConfigError(
            f"{path} must be loaded whole by each rank, because {reason}: {ranks_here} ranks on this host need "
            f"{needed / _GIB:.1f} GiB of its memory, and {available / _GIB:.1f} are free. Use fewer ranks on each node, "
            "trainer.master_dtype: bfloat16, or a checkpoint with the names that transformers computes with"
        )


def _open(path: str | Path, dtype: torch.dtype) -> MetaModel:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        directory = model_directory(path, _PATTERNS)
    except ConfigError as error:
        raise _NotByShardsError(error.message) from error
    if not any((directory / name).is_file() for name in (INDEX, SINGLE)):
        raise _NotByShardsError("no safetensors")
    files = weight_files(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise _NotByShardsError("its weights are quantised")
        with torch.device("meta"):
            causal_lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except _NotByShardsError:
        raise
    except Exception as error:  # code of any architecture with numbers of any author; loading it whole tells the remedy
        raise _NotByShardsError(f"no model can be made from its config: {error}") from error
    shapes = {name: list(weight.shape) for name, weight in named_weights(causal_lm).items()}
    tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)} - shapes.keys()
    stored = files.keys() - tied
    experts = merged_experts(config.model_type, shapes, stored)
    expected = (shapes.keys() - experts.keys()) | {name for each in experts.values() for own in each for name in own}
    if differing := stored ^ expected:
        raise _NotByShardsError(
            f"{len(differing)} names differ from the model's, such as {min(differing)}",
            sum(math.prod(shape) for shape in shapes.values()),
        )
    for file in sorted(set(files.values())):  # before memory of these sizes is taken
        for name, place in places(file).items():
            if name not in experts and list(place.shape) != shapes.get(name, list(place.shape)):
                _refuse_shape(file, name, place.shape, shapes[name])
    buffers = _computed_buffers(causal_lm)
    try:
        causal_lm.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        pass  # some checkpoints have none: keep the model's defaults
    causal_lm.config.name_or_path = str(path)
    return MetaModel(
        causal_lm=causal_lm.eval(), files={name: files[name] for name in expected}, experts=experts, buffers=buffers
    )


def _computed_buffers(causal_lm: Any) -> dict[str, torch.Tensor]:
    """The values of buffers, from a second copy of their modules with memory. These modules are small."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in causal_lm.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        if own.keys() - module._non_persistent_buffers_set or any(True for _ in module.parameters(recurse=False)):
            raise _NotByShardsError(f"{prefix} stores buffers")
        try:
            values = dict(type(module)(module.config).named_buffers(recurse=False))
        except (AttributeError, TypeError) as error:
            raise _NotByShardsError(f"the buffers of {prefix} cannot be computed: {error}") from error
        if {name: b.shape for name, b in values.items()} != {name: b.shape for name, b in own.items()}:
            raise _NotByShardsError(f"{prefix} computes other buffers when made again")
        found |= {f"{prefix}.{name}": value for name, value in values.items()}
    return found


def _refuse_shape(file: Path, name: str, stored: Sequence[int], shape: list[int]) -> None:
    raise ModelMismatchError(
        f"{file}: weights do not fit config.json: {name} has shape {list(stored)}, the model {shape}"
    )


def _read_rows(causal_lm: Any, files: Mapping[str, Path], experts: Mapping[str, list[Sources]]) -> int:
    """Fill this rank's rows of every weight but an adapter's, file by file; returns the number of bytes read.

    Raises ``ModelMismatchError`` for a tensor of another shape, ``ConfigError`` for an unreadable file.
    """
    from safetensors import SafetensorError, safe_open

    targets: dict[str, torch.Tensor] = {}  # by name of the stored tensor: the memory of the rows that this rank reads
    firsts: dict[str, int] = {}  # and where they begin in the stored tensor
    shapes: dict[str, list[int]] = {}  # of the whole stored tensor
    for name, weight in base_weights(causal_lm).items():
        rows, first = local_rows(weight)
        if name not in experts:
            targets[name], firsts[name], shapes[name] = rows, first, list(weight.shape)
            continue
        for expert, matrix in enumerate(rows, start=first):
            sources = experts[name][expert]
            for source, part in zip(sources, matrix.chunk(len(sources)), strict=True):
                targets[source], firsts[source], shapes[source] = part, 0, list(part.shape)
    num_bytes = 0
    for file in sorted({files[name] for name in targets}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in (name for name in targets if files[name] == file):
                    stored, rows, first = opened.get_slice(name), targets[name], firsts[name]
                    if list(stored.get_shape()) != shapes[name]:
                        _refuse_shape(file, name, stored.get_shape(), shapes[name])
                    if len(rows):
                        values = stored[first : first + len(rows)]
                        num_bytes += values.numel() * values.element_size()
                        rows.copy_(values)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
    return num_bytes


Scorer = Callable[..., tuple[torch.Tensor, ...]]  # a policy model, or another with its arguments and results


# --- A hand-written backward pass for plain RMSNorms on the CPU: transformers' RMSNorm is half a dozen elementwise operations
# forwards and twice as many backwards, a seventh of a training step of a small model. This one gives the same bits forwards and
# saves half of the passes backwards.


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        normalized = x * rstd
        ctx.save_for_backward(normalized, rstd, weight)
        return weight * normalized

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """With n = x * rstd and g = grad * weight: dx = rstd * (g - n * mean(g * n))."""
        (grad,) = grads
        normalized, rstd, weight = ctx.saved_tensors
        grad_n = grad * normalized
        width = weight.shape[0]
        # mean(g * n) = (grad * n) @ weight / width: this needs no copy of g.
        along = (grad_n @ weight)[..., None].div_(-width)
        grad_x = (grad * weight).addcmul_(normalized, along).mul_(rstd)
        return grad_x, grad_n.reshape(-1, width).sum(0), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last axis. [..., width], [width] -> [..., width]"""
    output: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return output


def _forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.dtype != torch.float32:  # mixed precision: the original computes in float32 and rounds back
        original: torch.Tensor = type(module).forward(module, hidden)
        return original
    output: torch.Tensor = _RmsNorm.apply(hidden, module.weight, module.variance_epsilon)
    return output


def speed_up_norms(model: torch.nn.Module, device: torch.device) -> int:
    """Replace the passes of every plain float32 RMSNorm of a model on the CPU; returns the number of norms.

    A norm with another formula (Gemma's 1 + weight) gives other numbers in a test and stays as is. The weights may still
    be on the meta device.
    """
    if device.type != "cpu":
        return 0
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            count += 1
    return count


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or not hasattr(module, "variance_epsilon") or weight.ndim != 1:
        return False
    if weight.dtype != torch.float32:  # transformers' norm rounds any other type to float32 and back
        return False
    width = min(weight.shape[0], 64)  # the formula depends on no width
    trial = torch.linspace(0.5, 1.5, width)
    probe = torch.linspace(-1.0, 2.0, 3 * width).view(3, width)
    theirs = torch.func.functional_call(module, {"weight": trial}, (probe,))
    return torch.allclose(theirs, rms_norm(probe, trial, module.variance_epsilon), rtol=1e-6, atol=1e-6)


class PolicyModel(torch.nn.Module):
    """Wraps a causal LM. The root of sharding, so that embedding, final norm and head are gathered during ``forward``."""

    def __init__(
        self,
        causal_lm: Any,
        attention: Kernel = "auto",
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self._own_attention = causal_lm.config._attn_implementation
        self._attention = register_attention(attention)
        if getattr(causal_lm.get_output_embeddings(), "weight", None) is None:
            raise ModelMismatchError(f"{type(causal_lm).__name__} has no LM head that is a matrix: train another model")
        causal_lm.set_attn_implementation(self._attention)
        self.causal_lm = causal_lm
        self.value_head = value_head
        self.logit_scale = 1.0  # of the model's own head, as ``self_test`` finds it
        self.limit: Limit | None = None
        # Of a model with an adapter, set once the base has its values.
        self.adapter: AdapterIdentity | None = None
        self.base: Base | None = None
        names = set(causal_lm._no_split_modules or ())
        # The repeated blocks: the unit of sharding and of gradient checkpointing. Found now: sharding renames classes.
        self.layers: list[torch.nn.Module] = [
            m
            for m in causal_lm.modules()
            if (type(m).__name__ in names if names else isinstance(m, GradientCheckpointingLayer))
        ]
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: noise comes under too many names to be switched off one by one."""
        return super().train(False)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64, branches end to end
        position_ids: torch.Tensor,  # [num_tokens] int64, from 0 in every document
        documents: Documents,
        targets: Targets,
        temperature: float,
        drawn: Drawn | None = None,  # the targets' sampling distributions; if given, each target is scored alone
    ) -> tuple[torch.Tensor, ...]:
        """Log-probability and entropy of each target under its sampling distribution. [num_targets] each

        With a value head also the value of the state before the target. [num_targets]

        Raises ``ModelMismatchError`` for a document beyond the model's ``limit``.
        """
        if self.limit is not None:
            self.limit.check(documents.max_length)
        hidden = self._below_head()(
            input_ids=token_ids[None], position_ids=position_ids[None], documents=documents, use_cache=False
        ).last_hidden_state[0]  # [num_tokens, hidden]
        # Only states that predict a trained token pass a head.
        predicting = hidden.index_select(0, targets.predecessors)
        logprobs, entropy = token_logprobs(
            predicting if self.logit_scale == 1.0 else predicting * self.logit_scale,
            self.causal_lm.get_output_embeddings().weight,
            targets.token_ids,
            temperature,
            drawn=drawn,
        )
        scores = (logprobs, entropy) if self.value_head is None else (logprobs, entropy, self.value_head(predicting))
        return tuple(targets.each(score) for score in scores)

    @torch.no_grad()
    def plain(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One document through the model's own forward pass and attention: its logits, and those of the head's matrix alone.

        [num_tokens] -> [num_tokens, vocabulary] twice
        """
        self.causal_lm.set_attn_implementation(self._own_attention)
        try:
            logits = self.causal_lm(input_ids=token_ids[None], use_cache=False).logits[0]
            hidden = self._below_head()(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
            return logits, hidden @ self.causal_lm.get_output_embeddings().weight.to(hidden.dtype).T
        finally:
            self.causal_lm.set_attn_implementation(self._attention)

    def _below_head(self) -> Any:
        base = self.causal_lm.base_model  # the model itself where the attribute has another name
        return base if base is not self.causal_lm else base.get_decoder()

    def published(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a version, by name: those of the adapter if there is one, else all weights."""
        return named_weights(self.causal_lm) if self.adapter is None else adapter_weights(self.causal_lm)


def build_policy_model(
    causal_lm: Any,
    ranks: Ranks,
    *,
    trainable: bool = True,
    gradient_checkpointing: bool = False,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    attention: Kernel = "auto",
    value_head: bool = False,
    adapter: AdapterSetup | None = None,
) -> PolicyModel:
    """Prepare a model for training (or as a frozen reference) on these ranks.

    A model on the meta device gets the memory of its weights later. ``offload`` keeps the weights on the host. With
    ``adapter`` only the adapter is trained, and the value head.

    Raises:
        ConfigError: a target of the adapter is no linear module of the model.
    """
    if adapter is not None:
        attach(causal_lm, adapter.config, adapter.dtype)
    head = value_head_for(causal_lm) if value_head else None
    model = PolicyModel(causal_lm, attention, head)
    if trainable and gradient_checkpointing:
        for layer in model.layers:  # not transformers' own, which asks for training mode
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
    elif not trainable:
        model.requires_grad_(False)
    if not causal_lm.get_input_embeddings().weight.is_meta:
        model.to(ranks.device)
        if adapter is not None:
            reset_adapter(causal_lm, adapter)
    if trainable:
        speed_up_norms(model, ranks.device)
    shard(model, model.layers, ranks, compute_dtype, offload, exact=[] if head is None else [head])
    register_fsdp_forward_method(model, "plain")
    return model


def load_policy_model(
    path: str | Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
    adapter: AdapterSetup | None = None,
    **settings: Any,
) -> PolicyModel:
    """Load from a directory or hub name, with master weights in ``dtype``; each rank reads only its own rows.

    ``settings`` are further arguments of ``build_policy_model``.

    Raises the errors of ``services.common.text.chat.load_model``.
    """
    by_shards = open_by_shards(path, dtype)
    causal_lm = by_shards.causal_lm if by_shards is not None else load_model(path, dtype)
    try:
        limit = architecture_limit(causal_lm.config)
    except NoTinyCopyError as reason:
        limit = None
        log.warning("model.no_tiny_copy", path=str(path), reason=str(reason))
    model = build_policy_model(causal_lm, ranks, offload=offload, adapter=adapter, **settings)
    if by_shards is not None:
        began = time.monotonic()
        read = by_shards.materialize(model, ranks.device, offload)
        if model.value_head is not None:
            for parameter in model.value_head.parameters():
                torch.nn.init.zeros_(parameter)
        if adapter is not None:
            reset_adapter(model.causal_lm, adapter)
        log.info("model.loaded", path=str(path), bytes=read, seconds=round(time.monotonic() - began, 3))
    model.limit = limit
    check_loaded(model, ranks.device)
    return model


def architecture_limit(config: Any) -> Limit | None:
    """``check_architecture`` of the policy model."""
    return check_architecture(config, lambda causal_lm: PolicyModel(causal_lm, attention="sdpa"))
