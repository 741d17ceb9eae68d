"""A decoder-only transformer (Llama, Qwen2, Qwen3) over a KV cache, with few and large operations.

The decoder owns the tensors; ``blocks`` defines their layout. The original Hugging Face model keeps working on views of the
tensors, so both always agree. Independent of requests, sampling and versions: callers name the slots to read and write.

Entry points: ``extend`` computes the KV of many tokens of some slots (no logits: the last token of a
sequence is always left to ``decode``), ``decode`` feeds one token to each of some slots, ``score`` computes the
log-probabilities of given tokens without the cache.

Small float32 models on a CPU extend and decode in compiled code (``native``), which takes any slots, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from services.common.config.processes import BLOCK_TOKENS, blocks_of
from services.common.errors import ModelMismatchError
from services.common.system.parking import Released
from services.common.text.chat import named_weights
from services.inference.engine.base import WeightUpdate
from services.inference.engine.in_place import PreparedUpdate, prepare
from services.inference.engine.torch.blocks import Adapter, Blocks, Sizes
from services.inference.engine.torch.kv import DUMP, EMPTY, Bucket, Ints, KvCache, KvShape, Reach, attend_to_trunk
from services.inference.engine.torch.native.step import NativeStep, build_native_step
from services.inference.engine.torch.slots import Drawn, sample_plain

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Stepping = Literal["eager", "graph", "compiled"]
Replay = Callable[[], torch.Tensor]
Capture = Callable[[Replay], Replay]

ROW_STEP = 8  # rows are rounded up to a power of two up to this, then to its multiples
LEAST_WIDTH = 256  # positions that attention reads are rounded up to this times a power of two
DUMP_PLACE = DUMP * BLOCK_TOKENS
WARM_UPS = 2  # calls before a capture, in which libraries allocate their workspaces

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
BLOCK_ROWS = 8  # rows that a bucket starts from
CALL_COST = 1024  # row-positions of attention that one more attention call is worth, measured on one core
WIDTH_STEP = 16  # bucket widths are rounded up to this, so that allocations repeat
SCORED_AT_ONCE = 512  # positions whose logits exist at once while a sequence is scored
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
        capture: Capture | None = None,
    ) -> None:
        """With ``adapter`` only its tensors change, and several decoders may share the model. The KV cache takes at most
        ``kv_bytes``; without this limit, as many as all slots can fill. ``stepping`` beside ``eager`` is for a GPU; ``capture``
        is for tests (see ``StaticStep``).

        Raises:
            ModelMismatchError: the model is none that this forward pass computes.
            ConfigError: ``kv_bytes`` holds no sequence of the context's length.
        """
        check_supported(model)
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
            self._blocks = Blocks(model, sizes, context_length, own, compiled=stepping == "compiled")
            self._embedding = model.get_input_embeddings().weight.data
        changing = named_weights(model) if own is None else own.tensors
        self.weights = {name: tensor.data for name, tensor in changing.items()}
        self._owns_weights = own is None
        self._released: Released | None = None
        self.dtype = self._embedding.dtype
        self.context_length = context_length
        shape = KvShape(
            num_layers=self._blocks.num_layers,
            num_slots=num_slots,
            kv_heads=self.kv_heads,
            context_length=context_length,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.cache = KvCache(shape, kv_bytes)
        with torch.no_grad():
            self._native: NativeStep | None = None
            if stepping == "eager":
                self._native = build_native_step(model, self._blocks, self._embedding, self.cache, num_slots)
        self._static: StaticStep | None = None
        if stepping != "eager":
            capture = capture or CudaCapture()
            self._static = StaticStep(self, num_slots, capture)
        self._position_index = torch.arange(context_length, device=self.device)

    def release(self) -> None:
        """Free the memory of cache and weights, whose contents are lost. The base of an adapter stays: others may compute on it."""
        if self._static is not None:
            self._static.forget()
        weights = self.weights.values() if self._owns_weights else ()
        self._released = Released([*weights, self.cache.kv])

    def restore(self) -> None:
        """Take the memory again. The weights must be loaded next; the cache is empty."""
        if self._released is not None:
            self._released.restore()
            self._released = None
        if self.device.type != "cpu":  # fresh pages of the host are zeros, and untouched ones take no memory
            self.cache.kv.zero_()  # what is masked must be finite

    def prepare(self, update: WeightUpdate) -> PreparedUpdate:
        """Prepare an update, in any thread. ``ModelMismatchError`` if the update is for another model."""
        return prepare(update, self.weights)

    def load(self, prepared: PreparedUpdate) -> None:
        """Write an update into the existing tensors; ``prepare`` has validated the update."""
        prepared.apply()
        self._blocks.refresh()
        if self._native is not None:
            self._native.refresh()

    @property
    def extends_each(self) -> bool:
        """Whether ``extend_each`` is there."""
        return self._native is not None

    def arranged(self, slots: Ints, lengths: Ints) -> Ints:
        """The slots in the order in which ``decode`` takes the least time; any order gives the same logits."""
        eager = self._native is None and self._static is None
        return self.cache.arranged(slots, lengths) if eager else slots

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        """Feed ``tokens`` at ``positions`` to ``slots`` (all [num_rows]); logits [num_rows, vocabulary].

        Position p of a slot attends to its positions 0…p. The logits are valid until the next call.
        """
        if self._native is not None:
            return self._native.decode(slots, tokens, positions)
        if self._static is not None:
            return self._static.decode(slots, tokens, positions)
        places = self.cache.places(slots, positions)
        buckets = self.cache.split(slots, bucket_bounds(positions + 1))
        reaches = [self.cache.reach(slots[b.start : b.stop], b.width, may_share=True) for b in buckets]
        fed, at = (torch.from_numpy(numbers).to(self.device) for numbers in (tokens, positions))
        return self.step(fed, at, places, buckets, reaches)

    def draw(self, logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> Drawn:
        """``sample_plain`` for the logits of the last ``decode``, which are overwritten."""
        return sample_plain(logits, uniform) if self._native is None else self._native.draw(logits, uniform)

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
        blocks = self._blocks
        rotation = blocks.rotation(positions)
        masks = [
            mask if reach.trunk is None else mask[..., reach.trunk_width :]
            for mask, reach in zip((self._decode_mask(positions, b) for b in buckets), reaches, strict=True)
        ]
        x = F.embedding(tokens, self._embedding)  # [num_rows, hidden]
        for index in range(blocks.num_layers):
            qkv = blocks.project(index, x, rotation)
            self.cache.write(index, places, qkv[:, heads:])
            # The query heads of one KV head sit where query positions usually do: no repetition of keys and values.
            query = qkv[:, :heads].unflatten(1, (kv_heads, heads // kv_heads))
            parts = []
            for bucket, mask, reach in zip(buckets, masks, reaches, strict=True):
                rows, own = query[bucket.start : bucket.stop], self.cache.read(index, reach)
                if reach.trunk is not None:
                    attended = attend_to_trunk(rows, self.cache.read_trunk(index, reach.trunk), own, mask)
                else:
                    attended = F.scaled_dot_product_attention(rows, *own, attn_mask=mask)
                parts.append(attended.reshape(bucket.stop - bucket.start, heads * head_dim))
            blocks.finish(index, x, parts[0] if len(parts) == 1 else torch.cat(parts))
        return blocks.logits(x)

    def extend_each(self, slots: Ints, tokens: Ints, positions: Ints) -> None:
        """Compute the KV of ``tokens`` at ``positions`` of ``slots`` (all [num_tokens]); needs ``extends_each``.

        The positions of one slot come in order.
        """
        assert self._native is not None
        self._native.extend(slots, tokens, positions)

    def extend(self, slots: Ints, tokens: torch.Tensor, starts: Ints, *, fresh: bool) -> None:
        """Compute the KV of ``tokens`` [rows, width] at positions ``starts`` [rows] onward of ``slots`` [rows].

        Rows are padded on the right with any token; the KV written for padding lies behind the row's last token
        and is overwritten before any token attends to that position. ``fresh``: all starts are 0, so the cache is not read.
        """
        rows, width = tokens.shape
        heads, head_dim = self.heads, self.head_dim
        at = np.minimum(starts[:, None] + np.arange(width), self.context_length - 1)  # [rows, width]
        positions = torch.from_numpy(at).to(self.device)
        blocks = self._blocks
        places = self.cache.places(slots.repeat(width), at.reshape(-1))
        rotation = blocks.rotation(positions.reshape(-1))
        longest = 0 if fresh else int(at[:, -1].max()) + 1
        mask = None if fresh else (self._position_index[:longest] <= positions[:, :, None])[:, None]
        reach = self.cache.reach(slots, longest)
        x = F.embedding(tokens.reshape(-1), self._embedding)  # [rows * width, hidden]
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
        blocks = self._blocks
        rotation = blocks.rotation(torch.arange(num_tokens, device=self.device))
        x = F.embedding(tokens, self._embedding)  # [num_tokens, hidden]
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


class CudaCapture:
    """Captures steps as CUDA graphs that share one memory pool: one graph runs at a time."""

    def __init__(self) -> None:
        self._pool: _POOL_HANDLE | None = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, step: Replay) -> Replay:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()  # writes the same keys and values to the same places each time
        torch.cuda.current_stream().wait_stream(side)
        if not self._graphs:  # a pool ends with its last graph, and torch refuses a capture into it
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        # Other threads prepare weight updates on the device meanwhile, which the default mode would forbid.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class StaticStep:
    """``Decoder.decode`` over static buffers, so that a CUDA graph of each shape is captured once and replayed afterwards.

    A step is hundreds of kernels. At few rows their submission from Python takes longer than they run; a graph submits all
    at once. A replay reads and writes the memory of its capture, so the inputs are copied into buffers that stay, and shapes
    are rounded up to few: rows that pad read EMPTY and write to DUMP (``kv``). Weights and the pool of blocks stay in place
    over updates, so graphs stay valid.

    A capture is given as a function, and tests on a CPU pass one that calls the step: buffers, shapes and arguments are the
    same.
    """

    def __init__(self, decoder: Decoder, num_slots: int, capture: Capture) -> None:
        self._cache = decoder.cache
        self._decoder = decoder
        self._capture = capture
        self._num_slots = num_slots
        device = decoder.device
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._places = torch.full((num_slots,), DUMP_PLACE, device=device)
        self._table = torch.full((num_slots, blocks_of(decoder.context_length)), EMPTY, device=device)
        self._replays: dict[tuple[int, int], Replay] = {}

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        """Logits [num_rows, vocabulary], valid until the next call."""
        num_rows = len(tokens)
        rows = padded_rows(num_rows, self._num_slots)
        width = padded_width(int(positions.max()) + 1, self._decoder.context_length)
        self._fill(slots, tokens, positions, rows, blocks_of(width))
        key = rows, width
        if key not in self._replays:
            self._replays[key] = self._capture(self._bound(rows, width))
        return self._replays[key]()[:num_rows]

    def forget(self) -> None:
        """Drop all captured steps and their memory: what they name will have other addresses."""
        self._replays.clear()

    def _fill(self, slots: Ints, tokens: Ints, positions: Ints, rows: int, num_blocks: int) -> None:
        num_rows = len(tokens)
        inputs = np.zeros((2, rows), dtype=np.int64)
        inputs[:, :num_rows] = tokens, positions
        table = np.full((rows, num_blocks), EMPTY, dtype=np.int64)
        table[:num_rows] = self._cache.table[slots, :num_blocks]
        fed = torch.from_numpy(inputs).to(self._decoder.device)
        self._tokens[:rows].copy_(fed[0])
        self._positions[:rows].copy_(fed[1])
        self._places[:num_rows].copy_(self._cache.places(slots, positions))
        self._places[num_rows:rows].fill_(DUMP_PLACE)
        self._table[:rows, :num_blocks].copy_(torch.from_numpy(table))

    def _bound(self, rows: int, width: int) -> Replay:
        """The step over the leading parts of the buffers."""
        tokens, positions, places = self._tokens[:rows], self._positions[:rows], self._places[:rows]
        reach = Reach(self._table[:rows, : blocks_of(width)], width)
        return lambda: self._decoder.step(tokens, positions, places, [Bucket(0, rows, width)], [reach])


def padded_rows(num_rows: int, most: int) -> int:
    """
    >>> [padded_rows(n, 20) for n in (1, 3, 8, 9, 17)]
    [1, 4, 8, 16, 20]
    """
    rows = 1 << (num_rows - 1).bit_length() if num_rows <= ROW_STEP else -(-num_rows // ROW_STEP) * ROW_STEP
    return min(rows, most)


def padded_width(width: int, most: int) -> int:
    """
    >>> [padded_width(n, 1000) for n in (1, 256, 257, 600)]
    [256, 256, 512, 1000]
    """
    return min(most, LEAST_WIDTH << max(0, -(-width // LEAST_WIDTH) - 1).bit_length())


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
            "use the sglang engine for others"
        )
