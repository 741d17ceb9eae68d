"""The KV cache in two layouts behind one interface: a row for each slot, or a pool of blocks.

``RowCache`` holds one row of positions for each slot. Attention reads a range of slots in place, and a shared prefix is
copied. ``block_cache.BlockCache`` holds blocks of positions that slots name in a table (``ledger``): a shared prefix is there once,
memory is bounded, rows move without a copy; attention gathers the blocks that it reads.

In both, a token's keys and values of a layer are contiguous and written at once: [..., position, key heads then value
heads, dim]. The CPU attention kernel reads heads of 16 and 24 dimensions 5-18 % faster from this order than from one with
positions of a head together, and heads of 128 dimensions 8-11 % slower. ``slots.SlotTable`` tracks the contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.common.config.processes.kv_cache import (
    BLOCK_TOKENS,
)
from services.inference.engine.torch.kv.ledger import BlockLedger, Ints


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slots [start, stop) attend to the first ``width`` positions."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Positions that attention reads: those of the trunk, then those of each slot behind it."""

    places: Any  # slots, or blocks [num_slots, blocks]
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

    @property
    def row_bytes(self) -> int:
        """Of rows for all slots."""
        return self.num_slots * self.context_length * self.token_bytes

    def zeros(self, *places: int) -> torch.Tensor:
        # Zeros, not empty: a masked position still enters the arithmetic, and NaN times 0 is NaN.
        shape = (self.num_layers, *places, 2 * self.kv_heads, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class KvCache(Protocol):
    num_bytes: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of the cache."""
        ...

    @property
    def ledger(self) -> BlockLedger | None:
        """None: each slot has its row, and memory never runs out."""
        ...

    @property
    def paging(self) -> tuple[Ints, int]:
        """Where positions lie in ``tensors``, which is one tensor: table [num_slots, entries] and positions per entry.

        Position p of slot s lies at place table[s, p // n] * n + p % n of each layer.
        """
        ...

    def share(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        """The source's leading positions become those of the targets, which drop all of theirs."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> None:
        """Leading positions of ``sources`` are now at ``targets``; the two are permutations of each other."""
        ...

    def cut(self, slot: int, num_positions: int) -> None:
        """Forget a slot's positions behind the leading ones."""
        ...

    def shortage(self, slots: Ints, starts: Ints, stops: Ints, more: int = 0) -> int:
        """Blocks that are missing before positions [start, stop) of the slots, and ``more`` blocks, can be written."""
        ...

    def own(self, slots: Ints, starts: Ints, stops: Ints) -> None:
        """Make positions [start, stop) of the slots writable; ``shortage`` of the same is 0."""
        ...

    def clear(self, slot: int) -> None:
        """Remove the values of a slot, which are not finite, so that no other slot reads them."""
        ...

    def places(self, slots: Ints, positions: Ints) -> torch.Tensor:
        """For ``write``: where tokens at ``positions`` of ``slots`` (both [num_tokens]) lie, in any layer."""
        ...

    def write(self, index: int, places: torch.Tensor, heads: torch.Tensor) -> None:
        """Key heads, then value heads, of the tokens of ``places``: [num_tokens, 2 * kv_heads, dim]."""
        ...

    def split(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """The buckets, with rows that begin alike in buckets of their own where that pays."""
        ...

    def reach(self, slots: slice | Ints, width: int) -> Reach:
        """For ``read``: the first ``width`` positions of these slots. Of a slice of ``split`` it may have a trunk."""
        ...

    def read(self, index: int, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer behind the trunk, each [slot, kv head, position, dim]."""
        ...

    def read_trunk(self, index: int, trunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer in the trunk, each [1, kv head, position, dim]."""
        ...


class RowCache:
    """Keys and values [layer, slot, position, heads, dim], allocated once."""

    ledger = None

    def __init__(self, shape: KvShape) -> None:
        num_slots, context_length, kv_heads = shape.num_slots, shape.context_length, shape.kv_heads
        self._kv = shape.zeros(num_slots, context_length)
        self.num_bytes = self._kv.nbytes
        self._device = shape.device
        # Between rows numpy moves bytes about four times faster than torch does; it has no bfloat16.
        signed = {2: torch.int16, 4: torch.int32}.get(self._kv.element_size())
        self._host = self._kv.view(signed).numpy() if self._kv.device.type == "cpu" and signed else None
        self._layers = [
            (layer[:, :, :kv_heads].transpose(1, 2), layer[:, :, kv_heads:].transpose(1, 2)) for layer in self._kv
        ]
        self._flat = [layer.view(num_slots * context_length, 2 * kv_heads * shape.head_dim) for layer in self._kv]
        self._context_length = context_length
        self._slots = np.arange(num_slots)[:, None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._kv]

    @property
    def paging(self) -> tuple[Ints, int]:
        return self._slots, self._context_length

    def share(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        if others := [target for target in targets if target != source]:
            self.move([source] * len(others), others, num_positions)

    def move(self, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> None:
        if not num_positions:
            return
        if self._host is not None:
            self._host[:, targets, :num_positions] = self._host[:, sources, :num_positions]
            return
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        self._kv[:, target, :num_positions] = self._kv[:, source, :num_positions]

    def cut(self, slot: int, num_positions: int) -> None:
        pass

    def shortage(self, slots: Ints, starts: Ints, stops: Ints, more: int = 0) -> int:
        return 0

    def own(self, slots: Ints, starts: Ints, stops: Ints) -> None:
        pass

    def clear(self, slot: int) -> None:
        self._kv[:, slot].zero_()

    def places(self, slots: Ints, positions: Ints) -> torch.Tensor:
        return torch.from_numpy(slots * self._context_length + positions).to(self._device)

    def write(self, index: int, places: torch.Tensor, heads: torch.Tensor) -> None:
        self._flat[index].index_copy_(0, places, heads.flatten(1))

    def split(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return buckets

    def reach(self, slots: slice | Ints, width: int) -> Reach:
        return Reach(slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self._device), width)

    def read(self, index: int, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._layers[index]
        return keys[reach.places, :, : reach.width], values[reach.places, :, : reach.width]

    def read_trunk(self, index: int, trunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("rows have no trunk")
