"""Computes a decoder's layers between embedding, KV cache and logits, on the model's own tensors.

Query, key and value weights lie in one matrix, gate and up in another, and the Hugging Face model keeps working on views of
them. For any size, type and device; ``extras/compiled`` computes small float32 models on a CPU faster, from these tensors. The
products of an adapter are added to those of the base: several engines of one process may compute on one base, each with its
own adapter, and no update writes into the base.

Independent of slots, caches and requests. Rows of ``x`` are tokens; ``rotation`` belongs to their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.common.errors import ModelMismatchError
from services.common.weights.snapshot import PEFT_PREFIX, A, B

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in the type and on the device of its decoder; updates write into its tensors."""

    tensors: Mapping[str, torch.Tensor]  # by their names in PEFT's files
    scale: float

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        """A copy of its own."""
        tensors = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in self.tensors.items()}
        return Adapter(tensors=tensors, scale=self.scale)


@dataclass(frozen=True, slots=True)
class _Target:
    columns: slice  # of the fused output
    low: torch.Tensor  # [rank, inputs]
    high: torch.Tensor  # [outputs, rank]


class LowRank:
    """The adapters of the modules whose outputs lie side by side in one fused matrix."""

    def __init__(self, targets: Sequence[_Target], scale: float) -> None:
        self._targets = targets
        self._scale = scale

    @classmethod
    def of(cls, adapter: Adapter | None, modules: Sequence[tuple[str, torch.nn.Linear]]) -> LowRank:
        """``modules`` with their names, in the order of the fused matrix."""
        targets: list[_Target] = []
        begin = 0
        for name, module in modules:
            columns = slice(begin, begin + module.out_features)
            begin = columns.stop
            if adapter is not None and f"{PEFT_PREFIX}{name}.{A}" in adapter.tensors:
                low, high = (adapter.tensors[f"{PEFT_PREFIX}{name}.{factor}"] for factor in (A, B))
                targets.append(_Target(columns, low, high))
        return cls(targets, 0.0 if adapter is None else adapter.scale)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters' products to the output of the base, in place. [n, outputs], [n, inputs]"""
        for target in self._targets:
            out[:, target.columns].addmm_(F.linear(x, target.low), target.high.t(), alpha=self._scale)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """W + scale B A as a new matrix; the given one without adapters. [outputs, inputs]"""
        if not self._targets:
            return weight
        whole = weight.clone()
        for target in self._targets:
            whole[target.columns].addmm_(target.high, target.low, alpha=self._scale)
        return whole


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim], repeated from the two norms below
    norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * ffn, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    adapters: _Adapters


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The adapters of one layer's fused matrices."""

    qkv: LowRank
    output: LowRank
    gate_up: LowRank
    down: LowRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def rotated(self) -> int:
        return self.heads + self.kv_heads


class Blocks:
    """``model`` has its device already; from here on its matrices are views of the fused ones.

    With an ``adapter`` the matrices stay those of the base, and another engine may share them. ``compiled``: torch.compile
    fuses the operations of a layer around its attention; without a graph break, so that a CUDA graph can hold them.
    """

    def __init__(
        self, model: Any, sizes: Sizes, context_length: int, adapter: Adapter | None = None, *, compiled: bool = False
    ) -> None:
        self.sizes = sizes
        # Functions of the layer, not of its index: one compilation for all layers.
        self._project: Any = torch.compile(_project, fullgraph=True) if compiled else _project
        self._finish: Any = torch.compile(_finish, fullgraph=True) if compiled else _finish
        self.layers = _fuse_layers(model, adapter)
        self.num_layers = len(self.layers)
        self.final_norm = model.model.norm.weight.data
        self.head = model.get_output_embeddings().weight.data
        self.cos, self.sin = _rope_tables(model, context_length, self.head.device)

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotation of ``positions`` [num_tokens], in the form that ``project`` takes."""
        return self.cos[positions][:, None, :], self.sin[positions][:, None, :]

    def project(self, index: int, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Query heads, key heads (both rotated) and value heads: [num_tokens, heads + 2 * kv_heads, head_dim]."""
        return self._project(self.layers[index], self.sizes, x, rotation)

    def finish(self, index: int, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the part of layer ``index`` after attention to ``x`` in place; ``attended`` [num_tokens, heads * head_dim]."""
        self._finish(self.layers[index], self.sizes, x, attended)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_norm(x, self.final_norm, self.sizes), self.head)


def _project(layer: Layer, sizes: Sizes, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    normed = _norm(x, layer.input_norm, sizes)
    qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
    layer.adapters.qkv.add_to(qkv, normed)
    qkv = qkv.view(x.shape[0], sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    qk = place = qkv[:, : sizes.rotated]
    if layer.qk_norm is not None:
        qk = F.rms_norm(qk, (sizes.head_dim,), None, sizes.eps) * layer.qk_norm
    # sin carries the sign of the rotation, so that a roll by half a head replaces negate-and-concatenate.
    place.copy_(torch.addcmul(qk * cos, qk.roll(sizes.head_dim // 2, dims=-1), sin))  # torch.compile knows no out= here
    return qkv


def _finish(layer: Layer, sizes: Sizes, x: torch.Tensor, attended: torch.Tensor) -> None:
    x += F.linear(attended, layer.output, layer.output_bias)
    layer.adapters.output.add_to(x, attended)
    normed = _norm(x, layer.post_norm, sizes)
    gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
    layer.adapters.gate_up.add_to(gate_up, normed)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    x += F.linear(inner, layer.down, layer.down_bias)
    layer.adapters.down.add_to(x, inner)


def _norm(x: torch.Tensor, weight: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, sizes.eps)


def _rope_tables(model: Any, context_length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine for every position, [context, head_dim], from the model's own rotary embedding."""
    sample = model.get_input_embeddings().weight[:1][None]
    cos, sin = model.model.rotary_emb(sample, torch.arange(context_length, device=device)[None])
    half = sin.shape[-1] // 2
    sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=device)
    sign[:half].fill_(-1)
    return cos[0].contiguous(), (sin[0] * sign).contiguous()


def _fuse_layers(model: Any, adapter: Adapter | None) -> list[Layer]:
    """The layers of a model on its device, with their adapters.

    Raises:
        ModelMismatchError: the adapter has a target that is none of these matrices.
    """
    names = [f"model.layers.{index}" for index in range(len(model.model.layers))]
    if adapter is not None:
        check_targets(model, adapter)
    return [_fuse(layer, name, adapter) for layer, name in zip(model.model.layers, names, strict=True)]


def _fuse(layer: Any, name: str, adapter: Adapter | None) -> Layer:
    """Copy a Hugging Face layer's matrices into fused ones, and leave views of them in the layer.

    A layer that another engine fused stays as it is.
    """
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = None
    qk_norm = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight.data, attention.k_norm.weight.data)
        head_dim = norms[0].shape[0]
        heads, kv_heads = (p.weight.shape[0] // head_dim for p in projections[:2])
        qk_norm = torch.cat([norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1)])
    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_stack(projections, "weight"),
        qkv_bias=_stack(projections, "bias"),
        qk_norm=qk_norm,
        norms=norms,
        output=attention.o_proj.weight.data,
        output_bias=_bias(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_stack((mlp.gate_proj, mlp.up_proj), "weight"),
        gate_up_bias=_stack((mlp.gate_proj, mlp.up_proj), "bias"),
        down=mlp.down_proj.weight.data,
        down_bias=_bias(mlp.down_proj),
        adapters=_Adapters(
            *(
                LowRank.of(adapter, [(f"{name}.{module}", layer.get_submodule(module)) for module in fused])
                for fused in (_ATTENTION[:3], _ATTENTION[3:], _MLP[:2], _MLP[2:])
            )
        ),
    )


def _stack(modules: Sequence[Any], attribute: str) -> Any:
    parameters = [getattr(module, attribute) for module in modules]
    if parameters[0] is None:
        return None
    if (shared := _fused_already([p.data for p in parameters])) is not None:
        return shared
    fused = torch.cat([p.data for p in parameters])
    for parameter, view in zip(parameters, torch.split(fused, [p.shape[0] for p in parameters]), strict=True):
        parameter.data = view
    return fused


def _fused_already(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrix whose consecutive rows these are; None when they lie apart."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        apart = part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _bias(module: Any) -> torch.Tensor | None:
    return None if module.bias is None else module.bias.data


def check_targets(model: Any, adapter: Adapter) -> None:
    """Raise ``ModelMismatchError`` for a target outside the modules that the decoder computes."""
    layers = range(len(model.model.layers))
    modules = [f"model.layers.{index}.{module}" for index in layers for module in (*_ATTENTION, *_MLP)]
    known = {f"{PEFT_PREFIX}{name}.{factor}" for name in modules for factor in (A, B)}
    if unknown := sorted(adapter.tensors.keys() - known):
        raise ModelMismatchError(
            f"the torch engine cannot apply the adapter of {unknown[0].removeprefix(PEFT_PREFIX)}: it knows adapters of "
            "attention and MLP projections"
        )
