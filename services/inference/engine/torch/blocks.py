"""Computes a decoder's layers between embedding, KV cache and logits, in two layouts of the weights.

``SharedBlocks`` works on the model's own tensors: query, key and value weights lie in one matrix, gate and up in another,
and the Hugging Face model keeps working on views of them. For any size, type and device.

``FoldedBlocks`` keeps a second copy that ``refresh`` derives: matrices transposed, as the matrix product reads them fastest,
with the norms' weights multiplied in; query and key dimensions ordered so that a rotation is one complex product. At the
sizes that a CPU trains, a pass over few rows is bound by the number of operations, and this halves them. The copy costs the
memory of the weights again and its making is part of a weight update, hence only for small float32 models on a CPU.

The products of an adapter are added to those of the base in the first layout, and merged into the copy in the second.

Both are independent of slots, caches and requests. Rows of ``x`` are tokens; ``rotation`` belongs to their positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from services.inference.engine.torch.adapter import Adapter
from services.inference.engine.torch.fused import Layer, fuse_layers

FOLDED_BYTES = 64 << 20  # weights above this are not copied: an update would wait for the copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def rotated(self) -> int:
        return self.heads + self.kv_heads


class Blocks(Protocol):
    num_layers: int

    def refresh(self) -> None:
        """Update derived tensors after an in-place change of the model's tensors."""
        ...

    def rotation(self, positions: torch.Tensor) -> Any:
        """The rotation of ``positions`` [num_tokens], in the form that ``project`` takes."""
        ...

    def project(self, index: int, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        """Query heads, key heads (both rotated) and value heads: [num_tokens, heads + 2 * kv_heads, head_dim]."""
        ...

    def finish(self, index: int, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the part of layer ``index`` after attention to ``x`` in place; ``attended`` [num_tokens, heads * head_dim]."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor: ...


class SharedBlocks:
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
        for layer in self.layers:
            if layer.norms is not None and layer.qk_norm is not None:
                layer.qk_norm[: self.sizes.heads] = layer.norms[0]
                layer.qk_norm[self.sizes.heads :] = layer.norms[1]

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[positions][:, None, :], self.sin[positions][:, None, :]

    def project(self, index: int, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._project(self.layers[index], self.sizes, x, rotation)

    def finish(self, index: int, x: torch.Tensor, attended: torch.Tensor) -> None:
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


@dataclass(slots=True)
class _Folded:
    qkv: torch.Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    output: torch.Tensor  # [heads * head_dim, hidden]
    gate_up: torch.Tensor  # [hidden, 2 * ffn]
    down: torch.Tensor  # [ffn, hidden]


class FoldedBlocks:
    """The same arithmetic as ``shared``, from a copy of its weights; see the module's docstring. Adapters are merged into
    the copy."""

    def __init__(self, shared: SharedBlocks) -> None:
        self._shared = shared
        self._sizes = sizes = shared.sizes
        self.num_layers = shared.num_layers
        hidden = shared.head.shape[1]
        half = sizes.head_dim // 2
        # Dimensions i and i + half of a head, which rotate together, side by side. Queries and keys are permuted alike, so
        # their products stay; values keep their order.
        pairs = torch.arange(sizes.head_dim).view(2, half).t().reshape(-1)
        self._order = torch.arange((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim).view(-1, sizes.head_dim)
        self._order[: sizes.rotated] = self._order[: sizes.rotated, pairs]
        self._order = self._order.view(-1)
        self._pairs = pairs
        self._turns = torch.complex(shared.cos[:, :half], shared.sin[:, half:])  # [context, half]
        # x / sqrt(mean(x²) + eps) = sqrt(n) x / hypot(|x|, sqrt(n eps)); sqrt(n) is folded in.
        self._floor = torch.tensor(math.sqrt(hidden * sizes.eps))
        self._qk_floor = torch.tensor(math.sqrt(sizes.head_dim * sizes.eps))
        self._layers = [self._fold(layer) for layer in shared.layers]
        self._head = _folded(shared.head, shared.final_norm)

    def refresh(self) -> None:
        shared = self._shared
        shared.refresh()
        for index, layer in enumerate(shared.layers):
            self._layers[index] = self._fold(layer)
        self._head = _folded(shared.head, shared.final_norm)

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        return self._turns[positions][:, None, :]

    def project(self, index: int, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        layer, sizes = self._layers[index], self._sizes
        qkv = _product(self._scaled(x), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(x.shape[0], sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
        qk = qkv[:, : sizes.rotated]
        if layer.qk_norm is not None:
            length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
            qk.div_(torch.hypot(length, self._qk_floor)).mul_(layer.qk_norm)
        torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(rotation)
        return qkv

    def finish(self, index: int, x: torch.Tensor, attended: torch.Tensor) -> None:
        layer, own = self._layers[index], self._shared.layers[index]
        x.addmm_(attended, layer.output)
        if own.output_bias is not None:
            x += own.output_bias
        gate, up = _product(self._scaled(x), layer.gate_up, own.gate_up_bias).chunk(2, dim=-1)
        x.addmm_(F.silu(gate).mul_(up), layer.down)
        if own.down_bias is not None:
            x += own.down_bias

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self._scaled(x), self._head)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)

    def _fold(self, layer: Layer) -> _Folded:
        order, sizes, adapters = self._order, self._sizes, layer.adapters
        return _Folded(
            qkv=_folded(adapters.qkv.merged(layer.qkv)[order], layer.input_norm),
            qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias[order],
            qk_norm=None if layer.qk_norm is None else layer.qk_norm[:, self._pairs] * math.sqrt(sizes.head_dim),
            output=adapters.output.merged(layer.output).t().contiguous(),
            gate_up=_folded(adapters.gate_up.merged(layer.gate_up), layer.post_norm),
            down=adapters.down.merged(layer.down).t().contiguous(),
        )


def build_blocks(
    model: Any, sizes: Sizes, context_length: int, adapter: Adapter | None = None, *, compiled: bool = False
) -> Blocks:
    """The faster layout that suits the model, which is on its device, as is the adapter."""
    shared = SharedBlocks(model, sizes, context_length, adapter, compiled=compiled)
    parameters = list(model.parameters())
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
    if on_cpu and sum(p.numel() * p.element_size() for p in parameters) <= FOLDED_BYTES:
        return FoldedBlocks(shared)
    return shared


def _folded(weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """[inputs, outputs] of a matrix [outputs, inputs] that follows an RMS norm with these weights."""
    return (weight * (norm * math.sqrt(norm.shape[0]))).t().contiguous()


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _rope_tables(model: Any, context_length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine for every position, [context, head_dim], from the model's own rotary embedding."""
    sample = model.get_input_embeddings().weight[:1][None]
    cos, sin = model.model.rotary_emb(sample, torch.arange(context_length, device=device)[None])
    half = sin.shape[-1] // 2
    sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=device)
    sign[:half].fill_(-1)
    return cos[0].contiguous(), (sin[0] * sign).contiguous()
