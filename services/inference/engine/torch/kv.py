"""The KV cache of a decoder: a pool of blocks, and the table that says which block holds which positions of which slot.

A block holds BLOCK_TOKENS consecutive positions. Slots that begin alike name the same blocks; a slot that is about to
write into a block that another one names too gets a block of its own, with the contents copied if some of them stay
(copy-on-write). Attention gathers the blocks that it reads. Of rows that begin with the same blocks it reads these once for
all: the *trunk*.

A token's keys and values of a layer are contiguous and written at once: [..., position, key heads then value heads, dim].
The CPU attention kernel reads heads of 16 and 24 dimensions 5-18 % faster from this order than from one with positions of a
head together, and heads of 128 dimensions 8-11 % slower. ``slots.SlotTable`` tracks the tokens.

Invariants: ``refs[b]`` is the number of entries of ``table`` that name b; a block is either free or named; the first
``held[s]`` entries of slot s name blocks, and the others name EMPTY. EMPTY is never written, so that positions behind a
row's last block are finite; DUMP is never named, so that nothing reads the values written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from services.common.config.processes import BLOCK_TOKENS, RESERVED_BLOCKS, blocks_of, least_blocks, too_small
from services.common.errors import ConfigError

EMPTY = 0  # the block of zeros
DUMP = 1  # takes the values of padding
assert RESERVED_BLOCKS == 2
TRUNK_BLOCKS = 8  # blocks that rows have in common before attention reads them once for all
TRUNK_ROWS = 4  # rows that pay for the two more products of attention

Ints = npt.NDArray[np.int64]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows [start, stop) of a decoding step attend to the first ``width`` positions."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Positions that attention reads: those of the trunk, then those of each slot behind it."""

    places: Any  # blocks [num_slots, blocks]
    width: int  # positions behind the trunk
    trunk: torch.Tensor | None = None  # [blocks], which all the slots begin with

    @property
    def trunk_width(self) -> int:
        return 0 if self.trunk is None else len(self.trunk) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    num_layers: int
    num_slots: int
    kv_heads: int
    context_length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Keys and values of one position in all layers."""
        return self.num_layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values [layer, block, position in it, heads, dim], allocated once."""

    def __init__(self, shape: KvShape, limit_bytes: int | None = None) -> None:
        """As many blocks as the slots can fill, or fewer within ``limit_bytes``.

        Raises:
            ConfigError: no sequence of the whole context fits into the limit.
        """
        num_entries = blocks_of(shape.context_length)
        num_blocks = most = shape.num_slots * num_entries + RESERVED_BLOCKS
        if limit_bytes is not None:
            if problem := too_small(limit_bytes, shape.context_length, shape.token_bytes):
                raise ConfigError(problem)
            least = least_blocks(shape.context_length)
            num_blocks = min(most, max(least, limit_bytes // (BLOCK_TOKENS * shape.token_bytes)))
        self.is_bounded = num_blocks < most  # otherwise blocks are never short: each slot's table has room for its own
        self.table = np.full((shape.num_slots, num_entries), EMPTY, dtype=np.int64)
        self.refs = np.zeros(num_blocks, dtype=np.int64)
        self.held = np.zeros(shape.num_slots, dtype=np.int64)
        self._free = list(range(num_blocks - 1, RESERVED_BLOCKS - 1, -1))  # lowest first out
        self._kv_heads, self._head_dim = shape.kv_heads, shape.head_dim
        # Zeros, not empty: a masked position still enters the arithmetic, and NaN times 0 is NaN.
        self.kv = torch.zeros(
            (shape.num_layers, num_blocks, BLOCK_TOKENS, 2 * shape.kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )
        self._context_length = shape.context_length
        self._has_trunks = shape.dtype is torch.float32  # scores of two products in 16 bits would be rounded
        self._tokens = [layer.view(num_blocks * BLOCK_TOKENS, -1) for layer in self.kv]
        self._blocks = [layer.view(num_blocks, -1) for layer in self.kv]

    # -- which block holds what ---------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that slots can hold."""
        return len(self.refs) - RESERVED_BLOCKS

    @property
    def num_free(self) -> int:
        return len(self._free)

    def share(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        """The source's leading positions become those of the targets, which drop all of theirs."""
        num = blocks_of(num_positions)
        assert num <= self.held[source]
        blocks = self.table[source, :num].copy()
        for target in targets:
            self.refs[blocks] += 1  # first: the target may be the source
            self.cut(target, 0)
            self.table[target, :num] = blocks
            self.held[target] = num

    def cut(self, slot: int, num_positions: int) -> None:
        """Drop the blocks of a slot behind its leading positions."""
        num, held = blocks_of(num_positions), int(self.held[slot])
        if num >= held:
            return
        dropped = self.table[slot, num:held]
        self.refs[dropped] -= 1  # a slot names a block once
        self._free.extend(dropped[self.refs[dropped] == 0].tolist())
        self.table[slot, num:held] = EMPTY
        self.held[slot] = num

    def shortage(self, slots: Ints, starts: Ints, stops: Ints, more: int = 0) -> int:
        """Blocks that are missing before positions [start, stop) of the slots, and ``more`` blocks, can be written.

        Drops all blocks behind ``starts``: the positions there are about to be written.
        """
        if not self.is_bounded:
            return 0
        wanted = more
        copied: dict[int, int] = {}  # block -> slots of this call that leave it
        for slot, start, stop in self._changing(slots, starts, stops):
            self.cut(slot, start)
            wanted += blocks_of(stop) - int(self.held[slot])
            if start % BLOCK_TOKENS:
                tail = int(self.table[slot, start // BLOCK_TOKENS])
                leaving = copied.get(tail, 0)
                if self.refs[tail] - leaving > 1:
                    copied[tail] = leaving + 1
                    wanted += 1
        return max(0, wanted - len(self._free))

    def own(self, slots: Ints, starts: Ints, stops: Ints) -> None:
        """Give each slot blocks that only it names for its positions [start, stop); ``shortage`` of the same is 0."""
        sources: list[int] = []
        targets: list[int] = []
        for slot, start, stop in self._changing(slots, starts, stops):
            self.cut(slot, start)
            if start % BLOCK_TOKENS:
                place = start // BLOCK_TOKENS
                tail = int(self.table[slot, place])
                if self.refs[tail] > 1:
                    self.refs[tail] -= 1
                    sources.append(tail)
                    targets.append(self._take())
                    self.table[slot, place] = targets[-1]
            for place in range(int(self.held[slot]), blocks_of(stop)):
                self.table[slot, place] = self._take()
                self.held[slot] = place + 1
        if sources:
            source, target = (torch.from_numpy(np.array(blocks)).to(self.kv.device) for blocks in (sources, targets))
            self.kv.index_copy_(1, target, self.kv.index_select(1, source))

    def clear(self, slot: int) -> None:
        """Remove the values of a slot, which are not finite, so that no other slot reads them."""
        # Other slots that name the blocks have read the same values, and fail in the same step or the next.
        named = self.table[slot, : self.held[slot]]
        self.kv.index_fill_(1, torch.from_numpy(named).to(self.kv.device), 0)

    def _changing(self, slots: Ints, starts: Ints, stops: Ints) -> list[tuple[int, int, int]]:
        """Those whose blocks are not as ``own`` leaves them; in most decoding steps there are none."""
        held = self.held[slots]
        tail = self.table[slots, np.minimum(starts // BLOCK_TOKENS, self.table.shape[1] - 1)]
        shared = (starts % BLOCK_TOKENS > 0) & (self.refs[tail] > 1)
        changing = shared | (held != -(-stops // BLOCK_TOKENS))
        rows = np.flatnonzero(changing)
        return list(zip(slots[rows].tolist(), starts[rows].tolist(), stops[rows].tolist(), strict=True))

    def _take(self) -> int:
        block = self._free.pop()
        self.refs[block] = 1
        return block

    # -- reading and writing ------------------------------------------------------------------------------------

    def places(self, slots: Ints, positions: Ints) -> torch.Tensor:
        """For ``write``: where tokens at ``positions`` of ``slots`` (both [num_tokens]) lie, in any layer."""
        blocks = self.table[slots, positions // BLOCK_TOKENS]
        # Padding writes where nothing reads.
        blocks = np.where((blocks == EMPTY) | (self.refs[blocks] > 1), DUMP, blocks)
        return torch.from_numpy(blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS).to(self.kv.device)

    def write(self, index: int, places: torch.Tensor, heads: torch.Tensor) -> None:
        """Key heads, then value heads, of the tokens of ``places``: [num_tokens, 2 * kv_heads, dim]."""
        self._tokens[index].index_copy_(0, places, heads.flatten(1))

    def arranged(self, slots: Ints, lengths: Ints) -> Ints:
        """The slots in an order for ``split``: those with a long beginning in common side by side, then by length."""
        if not self._has_trunks or self.table.shape[1] < TRUNK_BLOCKS:
            return slots[np.argsort(-lengths, kind="stable")]
        mark = self.table[slots, TRUNK_BLOCKS - 1]
        return slots[np.lexsort((-lengths, np.where(self.refs[mark] > 1, mark, EMPTY)))]

    def split(self, slots: Ints, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """The buckets of a step over ``slots``, with rows that begin alike in buckets of their own where that pays."""
        if not self._has_trunks:
            return buckets
        found: list[Bucket] = []
        for bucket in buckets:
            if bucket.width <= TRUNK_BLOCKS * BLOCK_TOKENS:
                found.append(bucket)
                continue
            # Rows with one mark have all blocks up to there in common.
            marks = self.table[slots[bucket.start : bucket.stop], TRUNK_BLOCKS - 1]
            edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
            begin = 0  # of the rows that are in no part yet
            for first, last in pairwise(edges):
                if last - first >= TRUNK_ROWS and marks[first] != EMPTY:
                    ends = ((begin, first), (first, last))
                    found += [replace(bucket, start=bucket.start + a, stop=bucket.start + b) for a, b in ends if a < b]
                    begin = last
            if begin < len(marks):
                found.append(replace(bucket, start=bucket.start + begin))
        return found

    def reach(self, slots: Ints, width: int, *, may_share: bool = False) -> Reach:
        """For ``read``: the first ``width`` positions of these slots; ``may_share``: with a trunk where that pays."""
        width = min(width, self._context_length)
        table = self.table[slots, : blocks_of(width)]
        trunk = None
        if may_share and self._has_trunks and len(table) >= TRUNK_ROWS and (table[1:, 0] == table[0, 0]).all():
            # A row's last block is its own, so blocks in common hold positions that every row attends to.
            differs = (table != table[0]).any(axis=0) | (table[0] == EMPTY)
            num = int(differs.argmax())
            if num >= TRUNK_BLOCKS:
                trunk = torch.from_numpy(table[0, :num].copy()).to(self.kv.device)
                table, width = table[:, num:], width - num * BLOCK_TOKENS
        return Reach(torch.from_numpy(np.ascontiguousarray(table)).to(self.kv.device), width, trunk)

    def read(self, index: int, reach: Reach) -> Pair:
        """Keys and values of a layer behind the trunk, each [slot, kv head, position, dim]."""
        return self._gathered(index, reach.places, reach.width)

    def read_trunk(self, index: int, trunk: torch.Tensor) -> Pair:
        """Keys and values of a layer in the trunk, each [1, kv head, position, dim]."""
        return self._gathered(index, trunk[None], len(trunk) * BLOCK_TOKENS)

    def _gathered(self, index: int, blocks: torch.Tensor, width: int) -> Pair:
        found = F.embedding(blocks, self._blocks[index])  # one copy of what is read
        found = found.view(blocks.shape[0], -1, 2 * self._kv_heads, self._head_dim)[:, :width]
        return found[:, :, : self._kv_heads].transpose(1, 2), found[:, :, self._kv_heads :].transpose(1, 2)


def attend_to_trunk(query: torch.Tensor, trunk: Pair, own: Pair, mask: torch.Tensor) -> torch.Tensor:
    """Attention of ``query`` to keys and values that all rows have in common, read once as one matrix, and to each row's
    own: one softmax over both. As in Juravsky et al. 2024, "Hydragen".

    ``query`` is [rows, kv heads, heads per kv head, dim], as the result; ``trunk`` [1, kv heads, positions, dim]; ``own``
    [rows, kv heads, positions, dim] is under ``mask``.
    """
    rows, kv_heads, per_head, dim = query.shape
    (far_keys, far_values), (keys, values) = trunk, own
    width = far_keys.shape[2]
    query = query * dim**-0.5
    far = torch.matmul(query.transpose(0, 1).reshape(kv_heads, rows * per_head, dim), far_keys[0].transpose(1, 2))
    near = torch.matmul(query, keys.transpose(2, 3)).add_(mask)
    scores = torch.cat([far.view(kv_heads, rows, per_head, width), near.transpose(0, 1)], dim=-1).softmax(dim=-1)
    far = torch.matmul(scores[..., :width].reshape(kv_heads, rows * per_head, width), far_values[0])
    return far.view(kv_heads, rows, per_head, dim).transpose(0, 1) + torch.matmul(
        scores[..., width:].transpose(0, 1), values
    )
