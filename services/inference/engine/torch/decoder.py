"""A decoder-only transformer (Llama, Qwen2, Qwen3) over a KV cache, with few and large operations.

The decoder owns the tensors; ``blocks`` defines their layout. The original Hugging Face model keeps working on views of the
tensors, so both always agree. Independent of requests, sampling and versions: callers name the slots to read and write.

Entry points: ``extend`` computes the KV of many tokens of some slots (no logits: the last token of a
sequence is always left to ``decode``), ``decode`` feeds one token to each of some slots, ``score`` computes the
log-probabilities of given tokens without the cache.

``extras/compiled`` has faster steps: compiled code for small models on a CPU, and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
import torch.nn.functional as F

from services.common.errors import ModelMismatchError
from services.common.extras import load_extra
from services.common.system.parking import Released
from services.common.weights.codec import ChunkChange
from services.common.weights.snapshot import Bits, element_type, named_weights
from services.inference.engine.base import WeightUpdate, check_update
from services.inference.engine.torch.blocks import Adapter, Blocks, Sizes
from services.inference.engine.torch.kv import Bucket, Ints, KvCache, Reach
from services.inference.engine.torch.slots import Drawn, sample_plain

# --- Changes a model's weights in place: values are prepared beforehand, in any thread, so that the pause covers only the writing.


_SIGNED = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """The writes of an update."""

    version: int
    writes: list[Callable[[], object]]

    def apply(self) -> None:
        for write in self.writes:
            write()


def prepare(update: WeightUpdate, weights: Mapping[str, torch.Tensor]) -> PreparedUpdate:
    """Called in any thread. ``weights`` are the decoder's. ``ModelMismatchError`` for a missing or unknown name or another
    shape."""
    check_update(update, weights)
    writes: list[Callable[[], object]] = []
    for name, values in update.whole.items():
        source = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        writes.append(partial(weights[name].copy_, source))
    for name, changes in update.changes.items():
        flat = weights[name].view(-1)
        dtype = str(flat.dtype).removeprefix("torch.")
        cast = [change.cast(update.dtype, dtype) for change in changes]
        if flat.device.type == "cpu":  # numpy scatters into a tensor's memory about 1.5 times faster than torch
            bits = flat.view(_SIGNED[flat.element_size()]).numpy().view(element_type(dtype).bits_dtype)
            writes += [partial(change.write_to, bits) for change in cast]
        else:
            writes += _device_writes(flat, cast)
    return PreparedUpdate(update.version, writes)


def _device_writes(flat: torch.Tensor, changes: Sequence[ChunkChange]) -> list[Callable[[], object]]:
    """The writes into a tensor on a device, which wants few calls: one for all scattered elements."""

    def moved(bits: Bits) -> torch.Tensor:
        signed = np.array(bits).view(f"i{bits.dtype.itemsize}")  # copied: torch wants memory that may be written
        return torch.from_numpy(signed).view(flat.dtype).to(flat.device)

    writes: list[Callable[[], object]] = [
        partial(flat[change.start : change.start + len(change.values)].copy_, moved(change.values))
        for change in changes
        if change.positions is None
    ]
    scattered = [(change.values, change.positions + change.start) for change in changes if change.positions is not None]
    if scattered:
        values, positions = (np.concatenate(parts) for parts in zip(*scattered, strict=True))
        writes.append(partial(flat.index_copy_, 0, torch.from_numpy(positions).to(flat.device), moved(values)))
    return writes


log = structlog.get_logger(__name__)

Stepping = Literal["eager", "graph", "compiled"]

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
BLOCK_ROWS = 8  # rows that a bucket starts from
CALL_COST = 1024  # row-positions of attention that one more attention call is worth, measured on one core
WIDTH_STEP = 16  # bucket widths are rounded up to this, so that allocations repeat
SCORED_AT_ONCE = 512  # positions whose logits exist at once while a sequence is scored
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class FastStep(Protocol):
    """Another way through ``Decoder.decode``, with the same cache; takes any slots, in any order."""

    extends_up_to: int
    """The end of the sequences that ``extend`` computes faster than ``Decoder.extend``; 0 without ``extend``."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor: ...
    def draw(self, logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> Drawn: ...
    def extend(self, slots: Ints, tokens: Ints, positions: Ints) -> None: ...

    def refresh(self) -> None:
        """The weights have changed in place."""
        ...

    def forget(self) -> None:
        """The memory of weights and cache is given back; they will have other addresses."""
        ...


class Decoder:
    """Forward passes for one model on one device; all calls from one thread."""

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int,
        context_length: int,
        device: str | torch.device = "cpu",
        adapter: Adapter | None = None,
        kv_bytes: int | None = None,
        stepping: Stepping = "eager",
    ) -> None:
        """With ``adapter`` only its tensors change, and several decoders may share the model. The KV cache takes at most
        ``kv_bytes``; without this limit, as many as all slots can fill. ``stepping`` beside ``eager`` is for a GPU.

        Raises:
            ModelMismatchError: the model is none that this forward pass computes.
            ConfigError: ``kv_bytes`` holds no sequence of the context's length.
        """
        check_supported(model)
        self.model = model
        config = model.config
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.device = torch.device(device)
        model.to(self.device)
        dtype = model.get_input_embeddings().weight.dtype
        own = None if adapter is None else adapter.to(self.device, dtype)
        with torch.no_grad():
            sizes = Sizes(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, eps=config.rms_norm_eps)
            self.blocks = Blocks(model, sizes, context_length, own, compiled=stepping == "compiled")
            self.embedding = model.get_input_embeddings().weight.data
        changing = named_weights(model) if own is None else own.tensors
        self.weights = {name: tensor.data for name, tensor in changing.items()}
        self._owns_weights = own is None
        self._released: Released | None = None
        self.dtype = self.embedding.dtype
        self.context_length = context_length
        self.cache = KvCache(
            num_layers=self.blocks.num_layers,
            num_slots=num_slots,
            kv_heads=self.kv_heads,
            context_length=context_length,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            limit_bytes=kv_bytes,
        )
        self._fast = fast_step(self, num_slots, stepping)
        self._position_index = torch.arange(context_length, device=self.device)

    def release(self) -> None:
        """Free the memory of cache and weights, whose contents are lost. The base of an adapter stays: others may compute on it."""
        if self._fast is not None:
            self._fast.forget()
        weights = self.weights.values() if self._owns_weights else ()
        self._released = Released([*weights, self.cache.kv])

    def restore(self) -> None:
        """Take the memory again. The weights must be loaded next; the cache is empty."""
        if self._released is not None:
            self._released.restore()
            self._released = None
        if self.device.type != "cpu":  # fresh pages of the host are zeros, and untouched ones take no memory
            self.cache.kv.zero_()  # what is masked must be finite

    def load(self, prepared: PreparedUpdate) -> None:
        """Write an update into the existing tensors; ``prepare`` has validated the update."""
        prepared.apply()
        for layer in self.blocks.layers:
            if layer.norms is not None and layer.qk_norm is not None:
                layer.qk_norm[: self.heads], layer.qk_norm[self.heads :] = layer.norms
        if self._fast is not None:
            self._fast.refresh()

    @property
    def extends_up_to(self) -> int:
        """The end of the sequences that ``extend_each`` computes; 0 where there is none."""
        return 0 if self._fast is None else self._fast.extends_up_to

    def arranged(self, slots: Ints, lengths: Ints) -> Ints:
        """The slots in the order in which ``decode`` takes the least time; any order gives the same logits."""
        return slots[np.argsort(-lengths, kind="stable")] if self._fast is None else slots

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        """Feed ``tokens`` at ``positions`` to ``slots`` (all [num_rows]); logits [num_rows, vocabulary].

        Position p of a slot attends to its positions 0…p. The logits are valid until the next call.
        """
        if self._fast is not None:
            return self._fast.decode(slots, tokens, positions)
        places = self.cache.places(slots, positions)
        buckets = bucket_bounds(positions + 1)
        reaches = [self.cache.reach(slots[b.start : b.stop], b.width) for b in buckets]
        fed, at = (torch.from_numpy(numbers).to(self.device) for numbers in (tokens, positions))
        return self.step(fed, at, places, buckets, reaches)

    def draw(self, logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> Drawn:
        """``sample_plain`` for the logits of the last ``decode``, which are overwritten."""
        return sample_plain(logits, uniform) if self._fast is None else self._fast.draw(logits, uniform)

    def step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        buckets: Sequence[Bucket],
        reaches: Sequence[Reach],
    ) -> torch.Tensor:
        """The operations of ``decode`` on the device alone: no value comes back to the host, so a graph can hold them."""
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        blocks = self.blocks
        rotation = blocks.rotation(positions)
        masks = [self._decode_mask(positions, bucket) for bucket in buckets]
        x = F.embedding(tokens, self.embedding)  # [num_rows, hidden]
        for index in range(blocks.num_layers):
            qkv = blocks.project(index, x, rotation)
            self.cache.write(index, places, qkv[:, heads:])
            # The query heads of one KV head sit where query positions usually do: no repetition of keys and values.
            query = qkv[:, :heads].unflatten(1, (kv_heads, heads // kv_heads))
            parts = []
            for bucket, mask, reach in zip(buckets, masks, reaches, strict=True):
                rows, (keys, values) = query[bucket.start : bucket.stop], self.cache.read(index, reach)
                attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
                parts.append(attended.reshape(bucket.stop - bucket.start, heads * head_dim))
            blocks.finish(index, x, parts[0] if len(parts) == 1 else torch.cat(parts))
        return blocks.logits(x)

    def extend_each(self, slots: Ints, tokens: Ints, positions: Ints) -> None:
        """Compute the KV of ``tokens`` at ``positions`` below ``extends_up_to`` of ``slots`` (all [num_tokens]).

        The positions of one slot come in order.
        """
        assert self._fast is not None
        self._fast.extend(slots, tokens, positions)

    def extend(self, slots: Ints, tokens: torch.Tensor, starts: Ints, *, fresh: bool) -> None:
        """Compute the KV of ``tokens`` [rows, width] at positions ``starts`` [rows] onward of ``slots`` [rows].

        Rows are padded on the right with any token; the KV written for padding lies behind the row's last token
        and is overwritten before any token attends to that position. ``fresh``: all starts are 0, so the cache is not read.
        """
        rows, width = tokens.shape
        heads, head_dim = self.heads, self.head_dim
        at = np.minimum(starts[:, None] + np.arange(width), self.context_length - 1)  # [rows, width]
        positions = torch.from_numpy(at).to(self.device)
        blocks = self.blocks
        places = self.cache.places(slots.repeat(width), at.reshape(-1))
        rotation = blocks.rotation(positions.reshape(-1))
        longest = 0 if fresh else int(at[:, -1].max()) + 1
        mask = None if fresh else (self._position_index[:longest] <= positions[:, :, None])[:, None]
        reach = self.cache.reach(slots, longest)
        x = F.embedding(tokens.reshape(-1), self.embedding)  # [rows * width, hidden]
        for index in range(blocks.num_layers):
            qkv = blocks.project(index, x, rotation)
            self.cache.write(index, places, qkv[:, heads:])
            if index == blocks.num_layers - 1:
                return  # the last layer's output would only feed logits
            query, new_keys, new_values = (
                part.unflatten(0, (rows, width)).transpose(1, 2)
                for part in qkv.split((heads, self.kv_heads, self.kv_heads), dim=1)
            )
            if fresh:
                attended = F.scaled_dot_product_attention(query, new_keys, new_values, is_causal=True, enable_gqa=True)
            else:
                keys, values = self.cache.read(index, reach)
                attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            blocks.finish(index, x, attended.transpose(1, 2).reshape(rows * width, heads * head_dim))

    def score(self, tokens: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [num_scored] in float32 of ``tokens`` [num_tokens] at ``positions``, each at its temperature.

        A causal pass over one sequence, apart from the cache; logits exist for SCORED_AT_ONCE positions at a time.
        """
        num_tokens = len(tokens)
        heads, head_dim = self.heads, self.head_dim
        blocks = self.blocks
        rotation = blocks.rotation(torch.arange(num_tokens, device=self.device))
        x = F.embedding(tokens, self.embedding)  # [num_tokens, hidden]
        for index in range(blocks.num_layers):
            qkv = blocks.project(index, x, rotation).transpose(0, 1)[None]
            query, key, value = qkv.split((heads, self.kv_heads, self.kv_heads), dim=1)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            blocks.finish(index, x, attended[0].transpose(0, 1).reshape(num_tokens, heads * head_dim))
        x = x[positions - 1]
        found = []
        for rows in range(0, len(positions), SCORED_AT_ONCE):
            part = slice(rows, rows + SCORED_AT_ONCE)
            logits = blocks.logits(x[part]).float().div_(temperatures[part, None])
            wanted = logits.gather(1, tokens[positions[part], None])
            found.append((wanted - logits.logsumexp(dim=-1, keepdim=True))[:, 0])
        return torch.cat(found) if found else torch.zeros(0, device=self.device)

    def _decode_mask(self, positions: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Additive [rows, 1, 1, width]; made once per step, where a boolean one is converted in every layer."""
        hidden = self._position_index[: bucket.width] > positions[bucket.start : bucket.stop, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return mask[:, None, None, :]


def fast_step(decoder: Decoder, num_slots: int, stepping: Stepping) -> FastStep | None:
    """The step of ``extras/compiled`` that suits the decoder; None where there is none, and torch computes alone."""
    name = "torch_native" if stepping == "eager" else "torch_graphs"
    try:
        build = load_extra("engines", name)
    except KeyError:
        if stepping != "eager":
            log.warning("engine.eager", asked=stepping, reason="CUDA graphs are in extras/compiled, which is not here")
        return None
    with torch.no_grad():
        step: FastStep | None = build(decoder, num_slots)
    return step


def bucket_bounds(widths: Ints) -> list[Bucket]:
    """Buckets over rows of the given lengths: neighbours merge when that pads less than a call costs."""
    num = len(widths)
    merged: list[tuple[int, int, int]] = []
    blocks = np.maximum.reduceat(widths, np.arange(0, num, BLOCK_ROWS))
    for start, widest in zip(range(0, num, BLOCK_ROWS), blocks.tolist(), strict=True):
        current = (start, min(start + BLOCK_ROWS, num), widest)
        while merged:
            before = merged[-1]
            width = max(before[2], current[2])
            padding = (before[1] - before[0]) * (width - before[2]) + (current[1] - current[0]) * (width - current[2])
            if padding > CALL_COST:
                break
            current = (before[0], current[1], width)
            merged.pop()
        merged.append(current)
    return [Bucket(start, stop, -(-width // WIDTH_STEP) * WIDTH_STEP) for start, stop, width in merged]


def check_supported(model: Any) -> None:
    """Raise ``ModelMismatchError``, naming the supported models, if this forward pass differs from the model's."""
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
            "use another engine, such as sglang"
        )
