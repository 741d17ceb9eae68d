"""The KV cache of a decoder: a pool of blocks, and the table that says which block holds which positions of which slot.

A block holds BLOCK_TOKENS consecutive positions. Slots that begin alike name the same blocks; a slot that is about to
write into a block that another one names too gets a block of its own, with the contents copied if some of them stay
(copy-on-write). Attention gathers the blocks that it reads.

A token's keys and values of a layer are contiguous and written at once: [..., position, key heads then value heads, dim].
The CPU attention kernel reads heads of 16 and 24 dimensions 5-18 % faster from this order than from one with positions of a
head together, and heads of 128 dimensions 8-11 % slower. ``slots.SlotTable`` tracks the tokens.

Invariants: ``refs[b]`` is the number of entries of ``table`` that name b; a block is either free or named; the first
``held[s]`` entries of slot s name blocks, and the others name EMPTY. EMPTY is never written, so that positions behind a
row's last block are finite; DUMP is never named, so that nothing reads the values written there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from services.common.config.processes import BLOCK_TOKENS, RESERVED_BLOCKS, blocks_of, least_blocks, too_small
from services.common.errors import ConfigError

EMPTY = 0  # the block of zeros
DUMP = 1  # takes the values of padding
assert RESERVED_BLOCKS == 2

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows [start, stop) of a decoding step attend to the first ``width`` positions."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class Reach:
    """The first ``width`` positions of some slots, which attention reads."""

    places: torch.Tensor  # blocks [num_slots, blocks]
    width: int


class KvCache:
    """Keys and values [layer, block, position in it, heads, dim], allocated once."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        context_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        limit_bytes: int | None = None,
    ) -> None:
        """As many blocks as the slots can fill, or fewer within ``limit_bytes``.

        Raises:
            ConfigError: no sequence of the whole context fits into the limit.
        """
        num_entries = blocks_of(context_length)
        num_blocks = most = num_slots * num_entries + RESERVED_BLOCKS
        if limit_bytes is not None:
            token_bytes = num_layers * 2 * kv_heads * head_dim * dtype.itemsize
            if problem := too_small(limit_bytes, context_length, token_bytes):
                raise ConfigError(problem)
            num_blocks = min(most, max(least_blocks(context_length), limit_bytes // (BLOCK_TOKENS * token_bytes)))
        self.table = np.full((num_slots, num_entries), EMPTY, dtype=np.int64)
        self.refs = np.zeros(num_blocks, dtype=np.int64)
        self.held = np.zeros(num_slots, dtype=np.int64)
        self._free = list(range(num_blocks - 1, RESERVED_BLOCKS - 1, -1))  # lowest first out
        self._kv_heads, self._head_dim = kv_heads, head_dim
        # Zeros, not empty: a masked position still enters the arithmetic, and NaN times 0 is NaN.
        self.kv = torch.zeros(
            (num_layers, num_blocks, BLOCK_TOKENS, 2 * kv_heads, head_dim), dtype=dtype, device=device
        )
        self._context_length = context_length
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
        num, held = -(-num_positions // BLOCK_TOKENS), int(self.held[slot])
        if num >= held:
            return
        dropped = self.table[slot, num:held]
        self.refs[dropped] -= 1  # a slot names a block once
        self._free.extend(dropped[self.refs[dropped] == 0].tolist())
        self.table[slot, num:held] = EMPTY
        self.held[slot] = num

    def own(self, slots: Ints, starts: Ints, stops: Ints, victims: Iterator[int] = iter(())) -> None:
        """Give each slot blocks that only it names for its positions [start, stop), and drop its blocks behind ``start``.

        ``victims``: slots that lose all their blocks, one after another, while no block is free.
        """
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
                    targets.append(self._take(victims))
                    self.table[slot, place] = targets[-1]
            for place in range(int(self.held[slot]), blocks_of(stop)):
                self.table[slot, place] = self._take(victims)
                self.held[slot] = place + 1
        if sources:
            # All are read before the first is written: a victim's block may be a source and, free again, a target.
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

    def _take(self, victims: Iterator[int]) -> int:
        while not self._free:
            self.cut(next(victims), 0)
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

    def reach(self, slots: Ints, width: int) -> Reach:
        """For ``read``: the first ``width`` positions of these slots."""
        width = min(width, self._context_length)
        table = np.ascontiguousarray(self.table[slots, : blocks_of(width)])
        return Reach(torch.from_numpy(table).to(self.kv.device), width)

    def read(self, index: int, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [slot, kv head, position, dim]."""
        found = F.embedding(reach.places, self._blocks[index])  # one copy of what is read
        found = found.view(len(reach.places), -1, 2 * self._kv_heads, self._head_dim)[:, : reach.width]
        return found[:, :, : self._kv_heads].transpose(1, 2), found[:, :, self._kv_heads :].transpose(1, 2)
