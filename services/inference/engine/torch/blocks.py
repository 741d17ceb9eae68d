"""Computes a decoder's layers between embedding, KV cache and logits, on the model's own tensors.

Query, key and value weights lie in one matrix, gate and up in another, and the Hugging Face model keeps working on views of
them. For any size, type and device; ``native`` computes small float32 models on a CPU faster, from these tensors. The
products of an adapter are added to those of the base.

Independent of slots, caches and requests. Rows of ``x`` are tokens; ``rotation`` belongs to their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.inference.engine.torch.adapter import Adapter
from services.inference.engine.torch.fused import Layer, fuse_layers


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
        self.layers = fuse_layers(model, adapter)
        self.num_layers = len(self.layers)
        self.final_norm = model.model.norm.weight.data
        self.head = model.get_output_embeddings().weight.data
        self.cos, self.sin = _rope_tables(model, context_length, self.head.device)

    def refresh(self) -> None:
        """Update derived tensors after an in-place change of the model's tensors."""
        for layer in self.layers:
            if layer.norms is not None and layer.qk_norm is not None:
                layer.qk_norm[: self.sizes.heads] = layer.norms[0]
                layer.qk_norm[self.sizes.heads :] = layer.norms[1]

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
