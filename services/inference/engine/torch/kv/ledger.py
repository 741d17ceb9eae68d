"""The ledger of a paged KV cache: which block of the pool holds which positions of which slot.

A block holds BLOCK_TOKENS consecutive positions. Slots that begin alike name the same blocks; a slot that is about to
write into a block that another one names too gets a block of its own, with the contents copied if some of them stay
(copy-on-write). Pure bookkeeping in numpy; independent of torch, tokens and requests.

Invariants: ``refs[b]`` is the number of entries of ``table`` that name b; a block is either free or named; the first
``held[s]`` entries of slot s name blocks, and the others name EMPTY. EMPTY is never written, so that positions behind a
row's last block are finite; DUMP is never named, so that nothing reads the values written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.config.processes.kv_cache import BLOCK_TOKENS, RESERVED_BLOCKS, blocks_of

EMPTY = 0  # the block of zeros
DUMP = 1  # takes the values of padding and of rows without a request
assert RESERVED_BLOCKS == 2

Ints = npt.NDArray[np.int64]


class BlockLedger:
    def __init__(self, num_blocks: int, num_slots: int, context_length: int) -> None:
        self.table = np.full((num_slots, blocks_of(context_length)), EMPTY, dtype=np.int64)
        self.refs = np.zeros(num_blocks, dtype=np.int64)
        self.held = np.zeros(num_slots, dtype=np.int64)
        self._free = list(range(num_blocks - 1, RESERVED_BLOCKS - 1, -1))  # lowest first out

    @property
    def num_blocks(self) -> int:
        """Blocks that slots can hold."""
        return len(self.refs) - RESERVED_BLOCKS

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks that more than one slot names."""
        return int(np.count_nonzero(self.refs > 1))

    def num_held_by(self, slots: npt.NDArray[np.bool_]) -> int:
        """Different blocks that the slots of this mask name."""
        named = np.unique(self.table[slots])
        return int(np.count_nonzero(named != EMPTY))

    def share(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        """The targets drop their blocks and name those of the source's leading positions."""
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
        """Blocks that are missing for ``own`` and ``more`` blocks. Drops all blocks behind ``starts``: the positions there are about to be written."""
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

    def own(self, slots: Ints, starts: Ints, stops: Ints) -> tuple[list[int], list[int]]:
        """Give each slot blocks that only it names for its positions [start, stop); ``shortage`` of the same is 0.

        Returns the blocks to copy, sources and targets, before the positions are written.
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
                    targets.append(self._take())
                    self.table[slot, place] = targets[-1]
            for place in range(int(self.held[slot]), blocks_of(stop)):
                self.table[slot, place] = self._take()
                self.held[slot] = place + 1
        return sources, targets

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slots ``sources`` are now ``targets``; the two are permutations of each other."""
        self.table[targets] = self.table[sources]
        self.held[targets] = self.held[sources]

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
