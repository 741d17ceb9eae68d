"""A decoder-only transformer (Llama, Qwen2, Qwen3) over a slot KV cache, with few and large operations.

It owns the tensors: query, key and value weights lie in one matrix, gate and up in another, and the Hugging Face
model it was built from keeps working on views of them, so there is one copy of the weights and both always agree.
It knows nothing about requests, sampling or versions: callers say which slots to read and write.

Entry points: ``extend`` computes the KV of many tokens of some slots (no logits: the last token of a
sequence is always left to ``decode``), ``decode`` feeds one token to each slot of a leading range, ``score`` says how
likely given tokens are and leaves the cache alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.common.errors import ModelMismatchError
from services.common.models import named_weights
from services.inference.engine.in_place import PreparedUpdate, prepare
from services.inference.engine.kv_cache import KvCache
from services.inference.engine.weight_update import WeightUpdate

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
SCORED_AT_ONCE = 512  # positions whose logits exist at once while a sequence is scored
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slots [start, stop) attend to the first ``width`` positions."""

    start: int
    stop: int
    width: int


@dataclass(slots=True)
class _Layer:
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


class Decoder:
    """Forward passes for one model on one device; all calls from one thread."""

    def __init__(self, model: Any, *, num_slots: int, context_length: int, device: str | torch.device = "cpu") -> None:
        check_supported(model)
        config = model.config
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        self.device = torch.device(device)
        model.to(self.device)
        with torch.no_grad():
            self._layers = [_fuse(layer) for layer in model.model.layers]
            self._embedding = model.get_input_embeddings().weight.data
            self._final_norm = model.model.norm.weight.data
            self._head = model.get_output_embeddings().weight.data
            self._cos, self._sin = _rope_tables(model, context_length, self.device)
        self.weights = {name: tensor.data for name, tensor in named_weights(model).items()}
        self.dtype = self._embedding.dtype
        self.context_length = context_length
        self.cache = KvCache(
            num_layers=len(self._layers),
            num_slots=num_slots,
            kv_heads=self.kv_heads,
            context_length=context_length,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def prepare(self, update: WeightUpdate) -> PreparedUpdate:
        """From any thread. ``ModelMismatchError`` when the update is not for this model."""
        return prepare(update, self.weights)

    def load(self, prepared: PreparedUpdate) -> None:
        """Write into the existing tensors. What could be wrong with it, ``prepare`` has refused."""
        prepared.apply()
        for layer in self._layers:
            self._refresh(layer)

    def _refresh(self, layer: _Layer) -> None:
        if layer.norms is not None and layer.qk_norm is not None:
            layer.qk_norm[: self.heads] = layer.norms[0]
            layer.qk_norm[self.heads :] = layer.norms[1]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, buckets: Sequence[Bucket]) -> torch.Tensor:
        """Feed ``tokens`` [num_rows] at ``positions`` [num_rows] to slots 0…num_rows-1; logits [num_rows, vocabulary].

        Position p of a slot attends to its positions 0…p. ``buckets`` cover the rows in order.
        """
        num_rows = tokens.shape[0]
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        slots = self.cache.slot_index[:num_rows]
        cos, sin = self._cos[positions][:, None, :], self._sin[positions][:, None, :]
        masks = [self._decode_mask(positions, bucket) for bucket in buckets]
        x = F.embedding(tokens, self._embedding)  # [num_rows, hidden]
        for index, layer in enumerate(self._layers):
            qk, v = self._project(layer, x, cos, sin)
            keys, values = self.cache.layer(index)
            keys[slots, :, positions] = qk[:, heads:]
            values[slots, :, positions] = v
            # The query heads of one KV head sit where query positions usually do: no repetition of keys and values.
            query = qk[:, :heads].view(num_rows, kv_heads, heads // kv_heads, head_dim)
            parts = [
                F.scaled_dot_product_attention(
                    query[b.start : b.stop],
                    keys[b.start : b.stop, :, : b.width],
                    values[b.start : b.stop, :, : b.width],
                    attn_mask=mask,
                ).reshape(b.stop - b.start, heads * head_dim)
                for b, mask in zip(buckets, masks, strict=True)
            ]
            x += F.linear(parts[0] if len(parts) == 1 else torch.cat(parts), layer.output, layer.output_bias)
            self._feed_forward(layer, x)
        return F.linear(self._norm(x, self._final_norm), self._head)

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, *, fresh: bool) -> None:
        """Compute the KV of ``tokens`` [rows, width] at positions ``starts`` [rows] onward of ``slots`` [rows].

        Rows are padded on the right with any token; the KV written for padding lies behind the row's last token
        and is overwritten before anything attends to it. ``fresh``: all starts are 0, so nothing is read back.
        """
        rows, width = tokens.shape
        heads, head_dim = self.heads, self.head_dim
        offsets = torch.arange(width, device=self.device)
        positions = (starts[:, None] + offsets).clamp_(max=self.context_length - 1)  # [rows, width]
        flat = positions.reshape(-1)
        cos, sin = self._cos[flat][:, None, :], self._sin[flat][:, None, :]
        reach = 0 if fresh else int(positions[:, -1].max()) + 1
        mask = None if fresh else (torch.arange(reach, device=self.device) <= positions[:, :, None])[:, None]
        x = F.embedding(tokens.reshape(-1), self._embedding)  # [rows * width, hidden]
        for index, layer in enumerate(self._layers):
            qk, v = self._project(layer, x, cos, sin)
            keys, values = self.cache.layer(index)
            new_keys = qk[:, heads:].view(rows, width, self.kv_heads, head_dim)
            new_values = v.view(rows, width, self.kv_heads, head_dim)
            keys[slots[:, None], :, positions] = new_keys
            values[slots[:, None], :, positions] = new_values
            if index == len(self._layers) - 1:
                return  # the last layer's output would only feed logits
            query = qk[:, :heads].view(rows, width, heads, head_dim).transpose(1, 2)
            if fresh:
                attended = F.scaled_dot_product_attention(
                    query, new_keys.transpose(1, 2), new_values.transpose(1, 2), is_causal=True, enable_gqa=True
                )
            else:
                attended = F.scaled_dot_product_attention(
                    query, keys[slots, :, :reach], values[slots, :, :reach], attn_mask=mask, enable_gqa=True
                )
            attended = attended.transpose(1, 2).reshape(rows * width, heads * head_dim)
            x += F.linear(attended, layer.output, layer.output_bias)
            self._feed_forward(layer, x)

    def score(self, tokens: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [num_scored] in float32 of ``tokens`` [num_tokens] at ``positions``, each at its temperature.

        A causal pass over one sequence, apart from the cache; logits exist for SCORED_AT_ONCE positions at a time.
        """
        num_tokens = len(tokens)
        heads, head_dim = self.heads, self.head_dim
        cos, sin = self._cos[:num_tokens, None, :], self._sin[:num_tokens, None, :]
        x = F.embedding(tokens, self._embedding)  # [num_tokens, hidden]
        for layer in self._layers:
            qk, v = self._project(layer, x, cos, sin)
            query, key, value = (part.transpose(0, 1)[None] for part in (qk[:, :heads], qk[:, heads:], v))
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            attended = attended[0].transpose(0, 1).reshape(num_tokens, heads * head_dim)
            x += F.linear(attended, layer.output, layer.output_bias)
            self._feed_forward(layer, x)
        x = self._norm(x[positions - 1], self._final_norm)
        found = []
        for rows in range(0, len(positions), SCORED_AT_ONCE):
            part = slice(rows, rows + SCORED_AT_ONCE)
            logits = F.linear(x[part], self._head).float().div_(temperatures[part, None])
            wanted = logits.gather(1, tokens[positions[part], None])
            found.append((wanted - logits.logsumexp(dim=-1, keepdim=True))[:, 0])
        return torch.cat(found) if found else torch.zeros(0, device=self.device)

    def _decode_mask(self, positions: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Additive [rows, 1, 1, width]; made once per step, where a boolean one is converted in every layer."""
        hidden = self.cache.position_index[: bucket.width] > positions[bucket.start : bucket.stop, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return mask[:, None, None, :]

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated query and key heads [tokens, heads + kv_heads, head_dim]; value heads [tokens, kv_heads, head_dim]."""
        qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * layer.qk_norm
        # sin carries the sign of the rotation, so that a roll by half a head replaces negate-and-concatenate.
        rotated = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, dims=-1), sin)
        return rotated, v

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> None:
        gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        x += F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def check_supported(model: Any) -> None:
    """``ModelMismatchError`` with what is supported, when this forward pass is not the model's."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    problem = ""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        problem = f"model_type is {config.model_type!r}"
    elif config.hidden_act not in ("silu", "swish"):
        problem = f"hidden_act is {config.hidden_act!r}"
    elif getattr(config, "use_sliding_window", False):
        problem = "use_sliding_window is true"
    elif rope.get("rope_type", "default") not in _STATIC_ROPE_TYPES:
        problem = f"rope_type is {rope['rope_type']!r}"
    elif getattr(model.get_output_embeddings(), "bias", None) is not None:
        problem = "the output head has a bias"
    if problem:
        raise ModelMismatchError(
            f"the torch engine cannot run this model: {problem}. It supports model types "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} with SiLU, full attention and rope types {', '.join(_STATIC_ROPE_TYPES)}; "
            "use the sglang engine for others"
        )


def _fuse(layer: Any) -> _Layer:
    """Copy a Hugging Face layer's matrices into fused ones, and leave views of them in the layer."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = None
    qk_norm = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight.data, attention.k_norm.weight.data)
        head_dim = norms[0].shape[0]
        heads, kv_heads = (p.weight.shape[0] // head_dim for p in projections[:2])
        qk_norm = torch.cat([norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1)])
    return _Layer(
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
    )


def _stack(modules: Sequence[Any], attribute: str) -> Any:
    parameters = [getattr(module, attribute) for module in modules]
    if parameters[0] is None:
        return None
    fused = torch.cat([p.data for p in parameters])
    for parameter, view in zip(parameters, torch.split(fused, [p.shape[0] for p in parameters]), strict=True):
        parameter.data = view
    return fused


def _bias(module: Any) -> torch.Tensor | None:
    return None if module.bias is None else module.bias.data


def _rope_tables(model: Any, context_length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine for every position, [context, head_dim], from the model's own rotary embedding."""
    sample = model.get_input_embeddings().weight[:1][None]
    cos, sin = model.model.rotary_emb(sample, torch.arange(context_length, device=device)[None])
    half = sin.shape[-1] // 2
    sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=device)
    sign[:half] = -1
    return cos[0].contiguous(), (sin[0] * sign).contiguous()
