"""Causal attention over packed documents, registered with transformers under one name per kernel.

A row is a sequence of branches. A branch without a prefix is a whole document, or the beginning of several; a branch with
a prefix continues rows of earlier branches. A token sees the prefix of its branch, and its branch up to its own place.

* ``runs``: the branches at the beginning of the row that share no rows with others, neighbours of equal length together
* ``blocks``: the rest. Consecutive branches of up to ``BLOCK_ROWS`` rows are the queries of one block; its keys are the
  prefix of the first of them and the same rows. Blocks of similar sizes are padded to one batch. The masked part of a
  small block takes less time than the start of another call.

The documents travel as the keyword argument ``documents`` through the model's forward pass, not in a global or a context
variable: gradient checkpointing recomputes layers on autograd's own threads, where a context variable of the caller does
not exist.

* CPU: one ``is_causal`` SDPA call per run of equally long neighbours that share nothing. Attention treats batch rows
  alone, so every such document's result is bit-equal to the same document alone. One masked call per batch of blocks for
  documents that share their beginning.
* GPU, 16-bit: torch's varlen flash attention; else the CPU path, which also runs there. The queries of a branch are the
  last of its keys: the kernel aligns the causal mask at the lower right. ``varlen`` is used or refused, never replaced.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.common.errors import ConfigError, ModelMismatchError

Ints = npt.NDArray[np.int64]
Kernel = Literal["auto", "varlen", "sdpa"]

_AMPERE = (8, 0)  # the least compute capability for flash attention

# Arguments that change the result and that the functions here do not implement: refuse, never ignore.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")

BLOCK_ROWS = 64
_PADDED_ROWS = 16
_PADDED_PAIRS = 1 << 16  # blocks with more (query, key) pairs are not padded


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive rows of one document, and the earlier rows of the same document."""

    start: int
    length: int
    prefix: Ints  # [positions before the branch] rows, ascending

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> Ints:
        """All rows that the last one sees, itself included. [prefix + length]"""
        return np.concatenate([self.prefix, np.arange(self.start, self.end, dtype=np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Blocks of similar sizes, padded to the largest."""

    num_blocks: int
    num_queries: int  # of each
    num_keys: int
    mask: (
        torch.Tensor | None
    )  # [num_blocks, 1, num_queries, num_keys] bool: whether the query sees the key; None: causal


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """All blocks of a row. Padding repeats a row of the block: results of padding queries are unused, their keys masked."""

    batches: tuple[BlockBatch, ...]
    query_rows: torch.Tensor  # [blocks * queries, of one batch after another]
    key_rows: torch.Tensor  # [blocks * keys, likewise]
    places: torch.Tensor  # [rows behind the runs]: where each is in query_rows


class Documents:
    """The documents of a row. Immutable; arguments of kernels are computed at their first use and kept."""

    def __init__(self, branches: Seq[Branch], device: torch.device | str = "cpu") -> None:
        self.branches = tuple(branches)
        self._device = device
        has_parts = [bool(len(after.prefix)) for after in self.branches[1:]] + [False]
        is_part = [bool(len(branch.prefix)) for branch in self.branches]
        shares = [one or other for one, other in zip(is_part, has_parts, strict=True)]
        self._num_alone = shares.index(True) if any(shares) else len(shares)
        runs: list[tuple[int, int]] = []
        for branch in self.branches[: self._num_alone]:
            if runs and runs[-1][1] == branch.length:
                runs[-1] = (runs[-1][0] + 1, branch.length)
            else:
                runs.append((1, branch.length))
        self.runs = tuple(runs)  # (number of branches, their length)
        self.max_length = max((len(b.prefix) + b.length for b in self.branches), default=0)  # of a document
        self.max_branch = max((b.length for b in self.branches), default=0)
        # Number of pairs (token, visible token), the token itself included.
        self.num_pairs = sum(b.length * len(b.prefix) + b.length * (b.length + 1) // 2 for b in self.branches)

    @classmethod
    def from_offsets(cls, offsets: Ints, device: torch.device | str = "cpu") -> Documents:
        """Documents without shared rows: document i is offsets[i]:offsets[i + 1].

        >>> Documents.from_offsets(np.array([0, 3, 6, 8])).runs
        ((2, 3), (1, 2))
        """
        starts, nothing = [int(offset) for offset in offsets], np.zeros(0, dtype=np.int64)
        pairs = itertools.pairwise(starts)
        return cls([Branch(start, end - start, nothing) for start, end in pairs], device)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Bounds of the branches: branch i is offsets[i]:offsets[i + 1]. [num_branches + 1] int32"""
        return self._cumulative([b.length for b in self.branches])

    @cached_property
    def key_rows(self) -> torch.Tensor | None:
        """The prefix and the rows of each branch, end to end; None when they are the row itself."""
        if not any(len(b.prefix) for b in self.branches):
            return None
        rows = np.concatenate([b.rows for b in self.branches])
        return torch.from_numpy(rows).to(self._device)

    @cached_property
    def key_offsets(self) -> torch.Tensor:
        """Branch i sees key_rows[key_offsets[i]:key_offsets[i + 1]]. [num_branches + 1] int32"""
        return self._cumulative([len(b.prefix) + b.length for b in self.branches])

    @cached_property
    def blocks(self) -> Blocks | None:
        """The blocks of the row; None when the row has only runs."""
        units: list[Branch] = []
        for branch in self.branches[self._num_alone :]:
            if units and branch.end - units[-1].start <= BLOCK_ROWS:
                units[-1] = replace(units[-1], length=branch.end - units[-1].start)
            else:
                units.append(branch)
        if not units:
            return None
        groups: dict[tuple[int, int], list[Branch]] = {}  # none is padded by _PADDED_ROWS or more
        for unit in units:
            size = (unit.length, len(unit.rows))
            if size[0] * size[1] <= _PADDED_PAIRS:
                size = (-(-size[0] // _PADDED_ROWS), -(-size[1] // _PADDED_ROWS))
            groups.setdefault(size, []).append(unit)
        ends = np.empty(self.branches[-1].end, dtype=np.int64)  # of the range of rows that see each row
        path = np.zeros(0, dtype=np.int64)
        for branch in self.branches:
            ends[path[len(branch.prefix) :]] = branch.start
            path = branch.rows
        ends[path] = self.branches[-1].end
        first = units[0].start
        query_rows, key_rows, batches = [], [], []
        places = np.zeros(len(ends) - first, dtype=np.int64)
        begin = 0
        for group in groups.values():
            num_queries, num_keys = max(u.length for u in group), max(len(u.rows) for u in group)
            queries = np.stack([_padded(np.arange(u.start, u.end), num_queries) for u in group])
            keys = np.stack([_padded(u.rows, num_keys) for u in group])
            real = np.arange(num_keys) < np.array([len(u.rows) for u in group])[:, None]
            # A query sees a key if the query lies in the key's subtree, which is a range of rows.
            seen = (keys[:, None] <= queries[..., None]) & (queries[..., None] < ends[keys][:, None]) & real[:, None]
            # The mask of a long branch without prefix is causal: the kernel needs no mask and computes half of it.
            is_causal = num_queries == num_keys and bool((seen == np.tri(num_queries, dtype=np.bool_)).all())
            mask = None if is_causal else torch.from_numpy(seen[:, None]).to(self._device)
            batches.append(BlockBatch(len(group), num_queries, num_keys, mask))
            for unit in group:
                places[unit.start - first : unit.end - first] = np.arange(begin, begin + unit.length)
                begin += num_queries
            query_rows.append(queries.ravel())
            key_rows.append(keys.ravel())
        return Blocks(
            batches=tuple(batches),
            query_rows=torch.from_numpy(np.concatenate(query_rows)).to(self._device),
            key_rows=torch.from_numpy(np.concatenate(key_rows)).to(self._device),
            places=torch.from_numpy(places).to(self._device),
        )

    def _cumulative(self, lengths: Seq[int]) -> torch.Tensor:
        return torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=self._device)


def _padded(rows: Ints, length: int) -> Ints:
    return np.concatenate([rows, np.full(length - len(rows), rows[0])])


def register_attention(kernel: Kernel = "auto") -> str:
    """Register packed attention with this kernel in transformers; returns its name there. Idempotent.

    Raises ``ConfigError`` when the kernel is not installed.
    """
    if kernel == "varlen" and not has_varlen():
        raise ConfigError("trainer.attention: varlen needs torch 2.10 or newer: install it, or write auto")
    name = f"rollmill_documents_{get_args(Kernel).index(kernel)}"  # transformers refuses models by "sdpa" in a name
    AttentionInterface.register(name, partial(documents_attention, kernel=kernel))
    return name


def documents_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    kernel: Kernel = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The signature transformers calls; returns [1, num_tokens, num_heads, head_dim]."""
    name = type(module).__name__
    if documents is None:
        raise ModelMismatchError(f"{name} was not given documents=; its model does not pass keyword arguments through")
    unsupported = [k for k in _UNSUPPORTED if kwargs.get(k) is not None]
    if unsupported or attention_mask is not None or dropout:
        raise ModelMismatchError(f"{name} asks for {unsupported or 'a mask or dropout'}, which packed attention lacks")
    if sliding_window is not None and documents.max_length > sliding_window:
        raise ModelMismatchError(
            f"{name} has a sliding window of {sliding_window}; a document of {documents.max_length} tokens exceeds it"
        )
    if not _takes_varlen(kernel, query):
        return attend_by_calls(query, key, value, documents, scaling), None
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [num_tokens, heads, head_dim]
    return attend_varlen(q, k, v, documents, scaling).unsqueeze(0), None


def attend_by_calls(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    """SDPA with one call per run and batch of blocks. [1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, head_dim]"""
    blocks = documents.blocks
    if blocks is None:
        return _attend_by_runs(query, key, value, documents, scaling).unsqueeze(0)
    of_blocks = _attend_by_blocks(query, key, value, blocks, scaling)
    if not documents.runs:
        return of_blocks.unsqueeze(0)
    at = [query.shape[2] - len(of_blocks), len(of_blocks)]
    q, k, v = (t.split(at, dim=2)[0] for t in (query, key, value))
    return torch.cat([_attend_by_runs(q, k, v, documents, scaling), of_blocks]).unsqueeze(0)


def _attend_by_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    """Attention of the rows in runs. [1, heads, rows, head_dim] -> [rows, heads, head_dim]"""
    grouped = key.shape[1] != query.shape[1]
    sizes = [count * length for count, length in documents.runs]
    outputs = []
    # split, not slices: the backward of a split is one concatenation, that of each slice a zero-filled full row.
    for (count, length), q, k, v in zip(
        documents.runs, *(t.squeeze(0).split(sizes, dim=1) for t in (query, key, value)), strict=True
    ):
        # [count, heads, length, head_dim]
        q, k, v = (t.unflatten(1, (count, length)).transpose(0, 1) for t in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [count * length, heads, head_dim]
    return torch.cat(outputs)


def _attend_by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, scaling: float | None
) -> torch.Tensor:
    """Attention of the rows behind the runs. [1, heads, num_tokens, head_dim] -> [rows, heads, head_dim]"""
    grouped = key.shape[1] != query.shape[1]
    query_sizes = [b.num_blocks * b.num_queries for b in blocks.batches]
    key_sizes = [b.num_blocks * b.num_keys for b in blocks.batches]
    pieces = (
        _Repeated.apply(t.squeeze(0).transpose(0, 1), rows).split(sizes)
        for t, rows, sizes in (
            (query, blocks.query_rows, query_sizes),
            (key, blocks.key_rows, key_sizes),
            (value, blocks.key_rows, key_sizes),
        )
    )
    outputs = []
    for batch, q, k, v in zip(blocks.batches, *pieces, strict=True):
        # [blocks, heads, queries or keys, head_dim]
        q, k, v = (t.unflatten(0, (batch.num_blocks, -1)).transpose(1, 2) for t in (q, k, v))
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=batch.mask, is_causal=batch.mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [blocks * queries, heads, head_dim]
    return torch.cat(outputs).index_select(0, blocks.places)


def _takes_varlen(kernel: Kernel, query: torch.Tensor) -> bool:
    """Whether torch's varlen kernel computes these queries. Raises ``ConfigError`` where it is named and cannot."""
    if kernel == "sdpa":
        return False
    fits = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if kernel == "auto":
        return fits and has_varlen() and torch.cuda.get_device_capability(query.device) >= _AMPERE
    if not fits:
        raise ConfigError(
            f"trainer.attention: {kernel} runs on a GPU in 16 bits, not on {query.device.type} in {query.dtype}: "
            "write auto, or trainer.compute_dtype: bfloat16"
        )
    return True


@cache
def has_varlen() -> bool:
    """Whether torch has varlen attention with a window, by which the mask is causal; torch 2.9 has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


def attend_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    """Flash attention over branches of any length. [num_tokens, heads, head_dim] each -> the same shape as q."""
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if (rows := documents.key_rows) is not None:  # the prefix and the rows of each branch, end to end
        k, v = (_Repeated.apply(t, rows) for t in (k, v))
    output = varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(),
        documents.offsets, documents.key_offsets, documents.max_branch, documents.max_length,
        scale=scaling, window_size=(-1, 0), **grouped,
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)  # a pair only where the log-sum-exp is asked for
    return output


class _Repeated(torch.autograd.Function):
    """Selects rows, with repetition; the backward pass sums their gradients in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), (rows,) = grads, ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros((ctx.num_rows, *grad.shape[1:]), dtype=dtype, device=grad.device)
        return total.index_add_(0, rows, grad.to(dtype)).to(grad.dtype), None
