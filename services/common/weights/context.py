"""The small form of sparse chunks: gaps and steps are coded per class of the old value's magnitude, over a whole tensor.

    classes: number of classes, their bounds; per class: number of changes, members seen, planes of gaps and of steps

A class's gaps count its own members only, over all chunks that this form covers, one after the other. The reader walks the
same chunks with the same old values and finds the same members. Needs the base to be read, unlike the sparse form.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from services.common.errors import CorruptDataError
from services.common.weights.classes import MAX_CLASSES, ClassIndex, Ranks, choose_bounds
from services.common.weights.dtypes import Bits
from services.common.weights.planes import PlaneReader
from services.common.weights.sparse import pack_positions, pack_steps, unpack_positions, unpack_steps

_HEAD = struct.Struct("<B")
_CLASS = struct.Struct("<QII")  # members in the chunks covered, upper bound, changes


class ContextEncoder:
    """Collects the sparse chunks of one tensor, in order."""

    def __init__(self, dtype: str, scale: float) -> None:
        """``scale``: elements of the tensor over elements of a chunk."""
        self._dtype = dtype
        self._scale = scale
        self._bounds: list[int] = []
        self._seen: list[int] = []  # members per class
        self._ranks: list[list[Ranks]] = []
        self._steps: list[list[Bits]] = []

    def add(self, old: Bits, positions: Ranks, steps: Bits) -> None:
        if not self._bounds:
            self._bounds = choose_bounds(old, positions, self._dtype, self._scale)
            self._seen = [0] * len(self._bounds)
            self._ranks = [[] for _ in self._bounds]
            self._steps = [[] for _ in self._bounds]
        index = ClassIndex(old, self._bounds)
        for number, members in enumerate(index.split(positions)):
            if len(members):
                self._ranks[number].append(index.ranks(number, positions[members]) + self._seen[number])
                self._steps[number].append(steps[members])
            self._seen[number] += index.num_members(number)

    def finish(self) -> bytes:
        parts = [_HEAD.pack(len(self._bounds))]
        for bound, seen, ranks, steps in zip(self._bounds, self._seen, self._ranks, self._steps, strict=True):
            changes = sum(map(len, ranks))
            parts.append(_CLASS.pack(seen, bound, changes))
            if changes:
                parts += [pack_positions(np.concatenate(ranks)), pack_steps(np.concatenate(steps))]
        return b"".join(parts)


class ContextDecoder:
    """Gives back what ``ContextEncoder`` collected, chunk by chunk in the same order."""

    def __init__(self, reader: PlaneReader, like: Bits, num_elements: int) -> None:
        """``CorruptDataError`` when the planes make no sense. ``num_elements`` of the whole tensor bounds everything."""
        [count] = reader.unpack(_HEAD)
        if count > MAX_CLASSES:
            raise CorruptDataError(f"delta has {count} classes; at most {MAX_CLASSES} are read")
        self._bounds: list[int] = []
        self._ranks: list[Ranks] = []
        self._steps: list[Bits] = []
        for _ in range(count):
            seen, bound, changes = reader.unpack(_CLASS)
            highest = int(np.iinfo(like.dtype).max // 2 + 1)
            if (
                changes > num_elements
                or seen > num_elements
                or bound > highest
                or bound <= max(self._bounds, default=-1)
            ):
                raise CorruptDataError(f"delta has a class of {seen} members up to {bound} with {changes} changes")
            self._bounds.append(bound)
            if changes:
                self._ranks.append(unpack_positions(reader, changes, seen))
                self._steps.append(unpack_steps(reader, changes, like.dtype))
            else:
                self._ranks.append(np.empty(0, dtype=np.intp))
                self._steps.append(np.empty(0, dtype=like.dtype))
        if count and self._bounds[-1] != int(np.iinfo(like.dtype).max // 2 + 1):
            raise CorruptDataError("the classes of a delta leave some values out")
        self._seen = [0] * count
        self._taken = [0] * count

    def take(self, old: Bits, num_changes: int) -> tuple[Ranks, Bits]:
        """Ascending positions in the next chunk, and their steps."""
        index = ClassIndex(old, self._bounds)
        positions: list[Ranks] = []
        steps: list[Bits] = []
        for number, ranks in enumerate(self._ranks):
            end = self._seen[number] + index.num_members(number)
            first = self._taken[number]
            last = first + int(np.searchsorted(ranks[first:], end, side="left"))
            if last > first:
                positions.append(index.positions(number, ranks[first:last] - self._seen[number]))
                steps.append(self._steps[number][first:last])
            self._seen[number], self._taken[number] = end, last
        found = sum(map(len, positions))
        if found != num_changes:
            raise CorruptDataError(f"delta holds {found} changes where {num_changes} were announced")
        return _ordered(positions, steps)

    def check_finished(self) -> None:
        """``CorruptDataError`` when changes are left that no chunk has taken."""
        left = sum(len(ranks) - taken for ranks, taken in zip(self._ranks, self._taken, strict=True))
        if left:
            raise CorruptDataError(f"delta holds {left} changes that belong to no chunk")


def _ordered(positions: Sequence[Ranks], steps: Sequence[Bits]) -> tuple[Ranks, Bits]:
    together, their_steps = np.concatenate(positions), np.concatenate(steps)
    order = np.argsort(together)
    return together[order], their_steps[order]
