"""The small form of sparse chunks: gaps and steps are coded per class of the old value's magnitude, over a whole tensor.

    number of classes (1 byte) | per class, as varints:
        upper bound of its magnitudes / 128 | changes, and if there are any:
        parameter of gaps | large steps | parameter of the large steps' gaps | parameter of their sizes
    directions of all steps, class by class (plane of bits) | Rice codes of all lists (two planes, see ``rice``)
    per class: gaps (plane) when their parameter is 32 | sizes (planes) when theirs is

A class's gaps count its own members only, over all chunks that this form covers, one after the other. The reader walks the
same chunks with the same old values and finds the same members. Gaps between large steps, those of more than one value,
count the class's changes; a size is what a large step has beyond two. Parameter 32 stands for "not Rice coded": gaps that
come in clumps, as where whole rows stay as they are, and sizes of all scales are smaller as byte planes (``sparse``).

Needs the base to be read, unlike the sparse form.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.errors import CorruptDataError
from services.common.weights.classes import MAX_CLASSES, ClassIndex, Ranks, choose_bounds
from services.common.weights.dtypes import Bits
from services.common.weights.planes import PlaneReader, pack_plane, pack_varint
from services.common.weights.rice import MAX_PARAMETER, RiceReader, RiceWriter, choose_parameter
from services.common.weights.sparse import pack_columns, pack_positions, unpack_columns, unpack_positions

_HEAD = struct.Struct("<B")
_BOUND_UNIT = 128  # bounds are whole exponents, and no float type here has fewer than 7 bits of mantissa
_NOT_RICE = MAX_PARAMETER + 1
_MAX_SIZE_BITS = 64  # of a Rice coded size, on average; what takes more is written as columns


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
        heads, planes, directions = [_HEAD.pack(len(self._bounds))], [], []
        rice = RiceWriter()
        for bound, ranks, steps in zip(self._bounds, self._ranks, self._steps, strict=True):
            heads.append(pack_varint(bound // _BOUND_UNIT) + pack_varint(sum(map(len, ranks))))
            if not ranks:
                continue
            together, ordinals = np.concatenate(ranks), np.concatenate(steps)
            ordinals = ordinals - ordinals.dtype.type(1)  # 0 is -1 or +1 by its lowest bit, and so on
            directions.append(ordinals & ordinals.dtype.type(1))
            sizes = ordinals >> ordinals.dtype.type(1)
            large = np.flatnonzero(sizes)
            sizes = sizes[large] - sizes.dtype.type(1)
            between = _gaps(large)
            lists = [_code_gaps(together, rice, planes), choose_parameter(between)[0]]
            rice.add(between, lists[1])
            lists.append(_code_sizes(sizes, rice, planes))
            heads.append(b"".join(map(pack_varint, (lists[0], len(large), *lists[1:]))))
        bits = np.concatenate(directions).astype(np.uint8)
        return b"".join([*heads, pack_plane(np.packbits(bits, bitorder="little")), rice.finish(), *planes])


def _gaps(places: Ranks) -> Ranks:
    gaps: Ranks = np.diff(places, prepend=-1) - 1
    return gaps


def _code_gaps(ranks: Ranks, rice: RiceWriter, planes: list[bytes]) -> int:
    gaps, plane = _gaps(ranks), pack_positions(ranks)
    parameter, num_bits = choose_parameter(gaps)
    if 8 * len(plane) < num_bits:
        planes.append(plane)
        return _NOT_RICE
    rice.add(gaps, parameter)
    return parameter


def _code_sizes(sizes: Bits, rice: RiceWriter, planes: list[bytes]) -> int:
    columns = b"".join(pack_columns(sizes))
    parameter, num_bits = choose_parameter(sizes)
    if 8 * len(columns) < num_bits or num_bits > _MAX_SIZE_BITS * len(sizes):
        planes.append(columns)
        return _NOT_RICE
    rice.add(sizes, parameter)
    return parameter


@dataclass(frozen=True, slots=True)
class _Class:
    """What is said of a class before its lists."""

    bound: int
    changes: int = 0
    gaps: int = 0  # Rice parameter, or _NOT_RICE
    large: int = 0
    between: int = 0
    sizes: int = 0

    @classmethod
    def read(cls, reader: PlaneReader) -> _Class:
        bound, changes = reader.varint() * _BOUND_UNIT, reader.varint()
        if not changes:
            return cls(bound)
        gaps, large, between, sizes = (reader.varint() for _ in range(4))
        if gaps > _NOT_RICE or between > MAX_PARAMETER or sizes > _NOT_RICE or large > changes:
            raise CorruptDataError(
                f"delta has a class with parameters {gaps}, {between}, {sizes} and {large} large steps"
            )
        return cls(bound, changes, gaps, large, between, sizes)

    @property
    def lists(self) -> list[tuple[int, int]]:
        """Length and parameter of its Rice coded lists."""
        every = ((self.changes, self.gaps), (self.large, self.between), (self.large, self.sizes))
        return [(count, parameter) for count, parameter in every if parameter != _NOT_RICE]


class ContextDecoder:
    """Gives back what ``ContextEncoder`` collected, chunk by chunk in the same order."""

    def __init__(self, reader: PlaneReader, like: Bits, num_elements: int) -> None:
        """``CorruptDataError`` when the planes make no sense. ``num_elements`` of the whole tensor bounds everything."""
        [count] = reader.unpack(_HEAD)
        if not 0 < count <= MAX_CLASSES:
            raise CorruptDataError(f"delta has {count} classes; 1 to {MAX_CLASSES} are read")
        classes = [_Class.read(reader) for _ in range(count)]
        self._bounds = [kind.bound for kind in classes]
        if sorted(set(self._bounds)) != self._bounds or self._bounds[-1] != np.iinfo(like.dtype).max // 2 + 1:
            raise CorruptDataError(f"delta has classes of magnitudes up to {self._bounds}")
        changes = sum(kind.changes for kind in classes)
        if changes > num_elements:
            raise CorruptDataError(f"delta has {changes} changes in a tensor of {num_elements} elements")
        num_bytes = -(-changes // 8)
        directions = np.unpackbits(
            reader.plane(at_least=num_bytes, at_most=num_bytes), count=changes, bitorder="little"
        ).astype(like.dtype)
        lists = [shape for kind in classes for shape in kind.lists]
        rice = RiceReader(
            reader,
            count=sum(length for length, _ in lists),
            num_low_bits=sum(length * parameter for length, parameter in lists),
            max_zeros=num_elements + changes * (1 + _MAX_SIZE_BITS),
        )
        self._ranks: list[Ranks] = []
        self._steps: list[Bits] = []
        for kind, mine in zip(
            classes, np.split(directions, np.cumsum([kind.changes for kind in classes])[:-1]), strict=True
        ):
            self._ranks.append(_ranks(kind, rice, reader, num_elements))
            self._steps.append(_steps(kind, mine, rice, reader))
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


def _ranks(kind: _Class, rice: RiceReader, reader: PlaneReader, num_elements: int) -> Ranks:
    if kind.gaps == _NOT_RICE:
        return unpack_positions(reader, kind.changes, num_elements)
    return _places(rice.take(kind.changes, kind.gaps), num_elements)


def _steps(kind: _Class, directions: Bits, rice: RiceReader, reader: PlaneReader) -> Bits:
    """Zigzagged steps of a class; ``directions`` is changed into them."""
    large = _places(rice.take(kind.large, kind.between), kind.changes)
    one = directions.dtype.type(1)
    if kind.sizes == _NOT_RICE:
        sizes = unpack_columns(reader, kind.large, directions.dtype)
    else:
        sizes = rice.take(kind.large, kind.sizes).astype(directions.dtype)
    directions[large] += (sizes + one) << one
    directions += one
    return directions


def _places(gaps: Ranks, end: int) -> Ranks:
    places: Ranks = np.cumsum(gaps + 1) - 1
    if len(places) and (places[-1] >= end or int(gaps.max()) >= end):
        raise CorruptDataError(f"delta names place {places[-1]} of {end}")
    return places


def _ordered(positions: Sequence[Ranks], steps: Sequence[Bits]) -> tuple[Ranks, Bits]:
    together, their_steps = np.concatenate(positions), np.concatenate(steps)
    order = np.argsort(together)
    return together[order], their_steps[order]
