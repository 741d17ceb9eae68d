"""Fuses the matrices of a Hugging Face layer: query, key and value side by side, gate and up side by side.

The layer keeps working on views of the fused matrices. Independent of slots, caches and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.inference.engine.torch.adapter import Adapter, LowRank, check_used

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


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


def fuse_layers(model: Any, adapter: Adapter | None) -> list[Layer]:
    """The layers of a model on its device, with their adapters.

    Raises:
        ModelMismatchError: the adapter has a target that is none of these matrices.
    """
    names = [f"model.layers.{index}" for index in range(len(model.model.layers))]
    if adapter is not None:
        check_used(adapter, [f"{name}.{module}" for name in names for module in (*_ATTENTION, *_MLP)])
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
