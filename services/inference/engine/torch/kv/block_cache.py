"""The KV cache as a pool of blocks, and the choice between the two layouts.

Attention gathers the blocks that it reads. Of rows that begin with the same blocks it reads these once for all: the *trunk*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from services.common.config.processes.kv_cache import (
    BLOCK_TOKENS,
    RESERVED_BLOCKS,
    blocks_of,
    least_blocks,
    too_small,
)
from services.common.errors import ConfigError
from services.inference.engine.torch.kv.cache import Bucket, KvCache, KvShape, Reach, RowCache
from services.inference.engine.torch.kv.ledger import DUMP, EMPTY, BlockLedger, Ints

Layout = Literal["auto", "rows", "blocks"]
TRUNK_BLOCKS = 8  # blocks that rows have in common before attention reads them once for all
TRUNK_ROWS = 4  # rows that pay for the two more products of attention


def build_cache(shape: KvShape, limit_bytes: int | None, layout: Layout = "auto") -> KvCache:
    """Rows on a CPU where the limit allows them, because they are faster there; blocks elsewhere.

    Raises:
        ConfigError: no sequence of the whole context fits into the limit.
    """
    limit = shape.row_bytes + RESERVED_BLOCKS * BLOCK_TOKENS * shape.token_bytes if limit_bytes is None else limit_bytes
    if layout == "auto":
        layout = "rows" if shape.device.type == "cpu" and shape.row_bytes <= limit else "blocks"
    if layout == "rows":
        return RowCache(shape)
    least = least_blocks(shape.context_length)
    if limit_bytes is not None and (problem := too_small(limit_bytes, shape.context_length, shape.token_bytes)):
        raise ConfigError(problem)
    most = shape.num_slots * blocks_of(shape.context_length) + RESERVED_BLOCKS
    return BlockCache(shape, min(most, max(least, limit // (BLOCK_TOKENS * shape.token_bytes))))


class BlockCache:
    """Keys and values [layer, block, position in it, heads, dim], allocated once."""

    def __init__(self, shape: KvShape, num_blocks: int) -> None:
        self.ledger = BlockLedger(num_blocks, shape.num_slots, shape.context_length)
        self._kv = shape.zeros(num_blocks, BLOCK_TOKENS)
        self.num_bytes = self._kv.nbytes
        self._device = shape.device
        self._kv_heads, self._head_dim = shape.kv_heads, shape.head_dim
        self._context_length = shape.context_length
        self._has_trunks = shape.dtype is torch.float32  # scores of two products in 16 bits would be rounded
        token = 2 * shape.kv_heads * shape.head_dim
        self._tokens = [layer.view(num_blocks * BLOCK_TOKENS, token) for layer in self._kv]
        self._blocks = [layer.view(num_blocks, BLOCK_TOKENS * token) for layer in self._kv]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._kv]

    @property
    def paging(self) -> tuple[Ints, int]:
        return self.ledger.table, BLOCK_TOKENS

    def share(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        self.ledger.share(source, targets, num_positions)

    def move(self, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> None:
        self.ledger.move(sources, targets)

    def cut(self, slot: int, num_positions: int) -> None:
        self.ledger.cut(slot, num_positions)

    def shortage(self, slots: Ints, starts: Ints, stops: Ints, more: int = 0) -> int:
        return self.ledger.shortage(slots, starts, stops, more)

    def own(self, slots: Ints, starts: Ints, stops: Ints) -> None:
        sources, targets = self.ledger.own(slots, starts, stops)
        if sources:
            source, target = (torch.from_numpy(np.array(blocks)).to(self._device) for blocks in (sources, targets))
            self._kv.index_copy_(1, target, self._kv.index_select(1, source))

    def clear(self, slot: int) -> None:
        # Other slots that name the blocks have read the same values, and fail in the same step or the next.
        named = self.ledger.table[slot, : self.ledger.held[slot]]
        self._kv.index_fill_(1, torch.from_numpy(named).to(self._device), 0)

    def places(self, slots: Ints, positions: Ints) -> torch.Tensor:
        blocks = self.ledger.table[slots, positions // BLOCK_TOKENS]
        # Padding, and slots without a request, write where nothing reads.
        blocks = np.where((blocks == EMPTY) | (self.ledger.refs[blocks] > 1), DUMP, blocks)
        return torch.from_numpy(blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS).to(self._device)

    def write(self, index: int, places: torch.Tensor, heads: torch.Tensor) -> None:
        self._tokens[index].index_copy_(0, places, heads.flatten(1))

    def split(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        if not self._has_trunks:
            return buckets
        found: list[Bucket] = []
        for bucket in buckets:
            if bucket.width <= TRUNK_BLOCKS * BLOCK_TOKENS:
                found.append(bucket)
                continue
            # Rows with one mark have all blocks up to there in common.
            marks = self.ledger.table[bucket.start : bucket.stop, TRUNK_BLOCKS - 1]
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

    def reach(self, slots: slice | Ints, width: int) -> Reach:
        """Blocks [num_slots, blocks of width]."""
        width = min(width, self._context_length)
        table = self.ledger.table[slots, : blocks_of(width)]
        trunk = None
        if (
            self._has_trunks
            and isinstance(slots, slice)
            and len(table) >= TRUNK_ROWS
            and (table[1:, 0] == table[0, 0]).all()
        ):
            # A row's last block is its own, so blocks in common hold positions that every row attends to.
            differs = (table != table[0]).any(axis=0) | (table[0] == EMPTY)
            num = int(differs.argmax())
            if num >= TRUNK_BLOCKS:
                trunk = torch.from_numpy(table[0, :num].copy()).to(self._device)
                table, width = table[:, num:], width - num * BLOCK_TOKENS
        return Reach(torch.from_numpy(np.ascontiguousarray(table)).to(self._device), width, trunk)

    def read(self, index: int, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gathered(index, reach.places, reach.width)

    def read_trunk(self, index: int, trunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gathered(index, trunk[None], len(trunk) * BLOCK_TOKENS)

    def _gathered(self, index: int, blocks: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = F.embedding(blocks, self._blocks[index])  # one copy of what is read
        found = found.view(blocks.shape[0], -1, 2 * self._kv_heads, self._head_dim)[:, :width]
        return found[:, :, : self._kv_heads].transpose(1, 2), found[:, :, self._kv_heads :].transpose(1, 2)
