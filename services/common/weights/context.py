"""The small form of sparse chunks: gaps and steps are coded per class of the old value's exponent, over a whole tensor.

    number of classes (1 byte) | upper bounds of their exponents, of all but the last (1 byte each) | per class, as varints:
        changes, and if there are any:
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
from services.common.weights.classes import MAX_CLASSES, ClassIndex, Ranks, choose_bounds, exponents_of
from services.common.weights.dtypes import Bits, element_type
from services.common.weights.planes import PLANE_HEADER_BYTES, PlaneReader, pack_plane, pack_varint
from services.common.weights.rice import MAX_PARAMETER, RiceReader, RiceWriter, choose_parameter
from services.common.weights.sparse import pack_columns, pack_positions, unpack_columns, unpack_positions

_HEAD = struct.Struct("<B")
MAX_SHARE = 0.12  # of the elements that may have changed in what is coded like this: more is dense
_NOT_RICE = MAX_PARAMETER + 1


class ContextEncoder:
    """Collects the sparse chunks of one tensor, in order."""

    def __init__(self, dtype: str, scale: float) -> None:
        """``scale``: elements of the tensor over elements of a chunk."""
        self._dtype = dtype
        self._scale = scale
        self._bounds: list[int] | None = None
        self._seen: list[int] = []  # members per class
        self._ranks: list[list[Ranks]] = []
        self._steps: list[list[Bits]] = []

    def add(self, old: Bits, positions: Ranks, steps: Bits) -> None:
        exponents = exponents_of(old, self._dtype)
        if self._bounds is None:
            self._bounds = choose_bounds(exponents, positions, self._scale)
            self._seen = [0] * (len(self._bounds) + 1)
            self._ranks = [[] for _ in self._seen]
            self._steps = [[] for _ in self._seen]
        index = ClassIndex(exponents, self._bounds)
        for number, members in enumerate(index.split(positions)):
            if len(members):
                self._ranks[number].append(index.ranks(number, positions[members]) + self._seen[number])
                self._steps[number].append(steps[members])
            self._seen[number] += index.num_members(number)

    def finish(self) -> bytes:
        """Everything; at least one chunk was added."""
        assert self._bounds is not None
        heads = [_HEAD.pack(len(self._seen)), bytes(self._bounds)]
        planes: list[bytes] = []
        directions: list[Bits] = []
        rice = RiceWriter()
        for ranks, steps in zip(self._ranks, self._steps, strict=True):
            heads.append(pack_varint(sum(map(len, ranks))))
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


def _most_bits(count: int, itemsize: int) -> int:
    """Of ``count`` values as columns, headers and all."""
    return 8 * itemsize * (count + PLANE_HEADER_BYTES)


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
    if 8 * len(columns) < num_bits:
        planes.append(columns)
        return _NOT_RICE
    rice.add(sizes, parameter)
    return parameter


@dataclass(frozen=True, slots=True)
class _Class:
    """What is said of a class before its lists."""

    changes: int
    gaps: int = 0  # Rice parameter, or _NOT_RICE
    large: int = 0
    between: int = 0
    sizes: int = 0

    @classmethod
    def read(cls, reader: PlaneReader) -> _Class:
        changes = reader.varint()
        if not changes:
            return cls(0)
        gaps, large, between, sizes = (reader.varint() for _ in range(4))
        if gaps > _NOT_RICE or between > MAX_PARAMETER or sizes > _NOT_RICE or large > changes:
            raise CorruptDataError(
                f"delta has a class with parameters {gaps}, {between}, {sizes} and {large} large steps"
            )
        return cls(changes, gaps, large, between, sizes)

    def check(self, num_elements: int) -> None:
        """``CorruptDataError`` for parameters with which no writer reaches numbers this small."""
        if self.gaps != _NOT_RICE and self.changes << self.gaps > 4 * num_elements:
            raise CorruptDataError(f"delta has {self.changes} gaps of parameter {self.gaps} in {num_elements} elements")
        if self.large << self.between > 4 * self.changes:
            raise CorruptDataError(f"delta has {self.large} gaps of parameter {self.between} in {self.changes} changes")

    @property
    def lists(self) -> list[tuple[int, int]]:
        """Length and parameter of its Rice coded lists."""
        every = ((self.changes, self.gaps), (self.large, self.between), (self.large, self.sizes))
        return [(count, parameter) for count, parameter in every if parameter != _NOT_RICE]


class ContextDecoder:
    """Gives back what ``ContextEncoder`` collected, chunk by chunk in the same order."""

    def __init__(self, reader: PlaneReader, dtype: str, num_elements: int) -> None:
        """``CorruptDataError`` when the planes make no sense. ``num_elements`` of the whole tensor bounds everything."""
        [count] = reader.unpack(_HEAD)
        if not 0 < count <= MAX_CLASSES:
            raise CorruptDataError(f"delta has {count} classes; 1 to {MAX_CLASSES} are read")
        self._dtype = dtype
        self._bounds = list(reader.take(count - 1))
        if sorted(set(self._bounds)) != self._bounds:
            raise CorruptDataError(f"delta has classes of exponents up to {self._bounds}")
        classes = [_Class.read(reader) for _ in range(count)]
        changes = sum(kind.changes for kind in classes)
        if changes > num_elements * MAX_SHARE:
            raise CorruptDataError(f"delta has {changes} changes in classes of {num_elements} elements")
        for kind in classes:
            kind.check(num_elements)
        bits_dtype = element_type(dtype).bits_dtype
        num_bytes = -(-changes // 8)
        plane = reader.plane(at_least=num_bytes, at_most=num_bytes)
        directions = np.unpackbits(plane, count=changes, bitorder="little").astype(bits_dtype)
        lists = [shape for kind in classes for shape in kind.lists]
        rice = RiceReader(
            reader,
            count=sum(length for length, _ in lists),
            num_low_bits=sum(length * parameter for length, parameter in lists),
            # Gaps of all classes skip members, those between large steps skip changes; and sizes are columns unless
            # Rice codes are smaller.
            max_zeros=num_elements + changes + sum(_most_bits(kind.large, bits_dtype.itemsize) for kind in classes),
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
        index = ClassIndex(exponents_of(old, self._dtype), self._bounds)
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
    return _places(rice.take(kind.changes, kind.gaps, below=num_elements), num_elements)


def _steps(kind: _Class, directions: Bits, rice: RiceReader, reader: PlaneReader) -> Bits:
    """Zigzagged steps of a class; ``directions`` is changed into them."""
    large = _places(rice.take(kind.large, kind.between, below=kind.changes), kind.changes)
    one = directions.dtype.type(1)
    if kind.sizes == _NOT_RICE:
        sizes = unpack_columns(reader, kind.large, directions.dtype)
    else:
        highest = int(np.iinfo(directions.dtype).max)
        sizes = rice.take(kind.large, kind.sizes, below=highest).astype(directions.dtype)
    directions[large] += (sizes + one) << one
    directions += one
    return directions


def _places(gaps: Ranks, end: int) -> Ranks:
    places: Ranks = np.cumsum(gaps + 1) - 1
    if len(places) and places[-1] >= end:
        raise CorruptDataError(f"delta names place {places[-1]} of {end}")
    return places


def _ordered(positions: Sequence[Ranks], steps: Sequence[Bits]) -> tuple[Ranks, Bits]:
    together, their_steps = np.concatenate(positions), np.concatenate(steps)
    order = np.argsort(together)
    return together[order], their_steps[order]
