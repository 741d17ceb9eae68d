"""The lossless delta codec: encodes the difference of two tensors of the same shape and dtype, and decodes the bytes.

A tensor is cut into chunks of 2**20 elements. Unchanged chunks take no space. Each other chunk has a record

    chunk index (4 bytes) | method (1) | padding (3) | number of changes (4) | body

and takes one of

- sparse: gaps between changed positions, and the steps there (``planes``);
- two-bit: the difference of every element, in two bits if it is small (``two_bit``);
- dense: the step of every element, in byte planes;
- raw: the new elements.

Two-bit is for long chunks that begin with more than .15 of changed elements and have few large differences: beside sparse it
takes up to 7% more bytes and three quarters of the time for decoding. Other chunks take the fewest bytes of the three.

A step is the number of representable values from the old element to the new one (``elements``). Planes go through zstd's
entropy coder if that saves bytes (``planes``). The first byte of a coded tensor is its format, which is 1.

Consecutive deltas of one tensor merge into one, from the newest version's bits alone: elements that no delta changes are the
same in the base and in the newest version. Steps wrap, so stepping back all deltas from the newest bits, the newest delta
first, gives exactly the base. Only raw chunks have no steps: a chunk that is raw in any delta is sent with its newest elements, for which
no base is needed.

Independent of tensors' names, versions and digests; the caller verifies results.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError
from services.common.weights.elements import Bits, element_type, step_back, step_forward, zigzagged_steps
from services.common.weights.planes import (
    PlaneReader,
    pack_columns,
    pack_positions,
    pack_steps,
    scatter,
    true_positions,
    unpack_columns,
    unpack_positions,
    unpack_steps,
)
from services.common.weights.two_bit import pack_differences, unpack_values

CHUNK_ELEMENTS = 1 << 20

_FORMAT = 1  # first byte of every coded tensor
_RECORD = struct.Struct("<IBxxxI")  # chunk index, method, number of changes
_BLOCK = 1 << 17  # elements that are compared at once
_DENSE_FROM = 0.9  # bits of positions per element, below which dense is not tried
_TWO_BIT_FROM = 0.15  # changed share of the first block above which two-bit is tried before the others
_SPARSE_UP_TO = 0.5  # changed share above which sparse is never the cheapest


class Method(enum.IntEnum):
    SPARSE = 1
    DENSE = 2
    RAW = 3
    TWO_BIT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChange:
    """New absolute values of one chunk: ``write_to`` is idempotent."""

    start: int  # first element of the chunk
    positions: npt.NDArray[np.intp] | None  # ascending, from ``start``; None when ``values`` covers the chunk
    values: Bits
    num_changes: int

    def write_to(self, target: Bits) -> None:
        if self.positions is None:
            target[self.start : self.start + len(self.values)] = self.values
        else:
            scatter(target[self.start : self.start + CHUNK_ELEMENTS], self.positions, self.values)

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSteps:
    """One chunk of a delta in coded form, independent of the base."""

    start: int
    positions: npt.NDArray[np.intp] | None  # None when ``steps`` covers the chunk
    steps: Bits | None  # zigzagged; None for a raw chunk, whose new elements are the receiver's already
    of_bits: bool = False  # ``steps`` are the differences of a two-bit chunk instead


def encode_tensor(old: Bits, new: Bits, dtype: str) -> bytes:
    """The difference of two flat arrays of bits; empty when there is none."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"a delta needs equal tensors, not {old.shape} {old.dtype} and {new.shape} {new.dtype}")
    encoder = TensorEncoder(dtype)
    for start in range(0, len(new), CHUNK_ELEMENTS):
        encoder.add(start, old[start : start + CHUNK_ELEMENTS], new[start : start + CHUNK_ELEMENTS])
    return encoder.finish()


def decode_tensor(old: Bits, data: bytes | memoryview, dtype: str) -> Iterator[ChunkChange]:
    """The changes, chunk by chunk, as absolute values. ``CorruptDataError`` when the bytes make no sense."""
    is_float = element_type(dtype).is_float
    for record in _records(old, data):
        start, here = record.start, old[record.start : record.start + CHUNK_ELEMENTS]
        if record.method in (Method.RAW, Method.TWO_BIT):
            values: Bits
            if record.method == Method.RAW:
                values = np.frombuffer(record.reader.take(here.nbytes), dtype=old.dtype)
            else:
                values = unpack_values(record.reader, here)
            yield ChunkChange(start=start, positions=None, values=values, num_changes=record.num_changes)
            continue
        positions, steps = record.steps(here)
        before = here if positions is None else here[positions]
        values = step_forward(before, steps, is_float)
        yield ChunkChange(start=start, positions=positions, values=values, num_changes=record.num_changes)


def decode_steps(like: Bits, data: bytes | memoryview) -> Iterator[ChunkSteps]:
    """A delta as positions and steps; ``like`` is any version of the tensor. ``CorruptDataError`` as ``decode_tensor``."""
    for record in _records(like, data):
        here = like[record.start : record.start + CHUNK_ELEMENTS]
        if record.method == Method.RAW:
            record.reader.take(here.nbytes)
            yield ChunkSteps(start=record.start, positions=None, steps=None)
        elif record.method == Method.TWO_BIT:
            differences = unpack_values(record.reader, np.zeros_like(here))
            yield ChunkSteps(start=record.start, positions=None, steps=differences, of_bits=True)
        else:
            positions, steps = record.steps(here)
            yield ChunkSteps(start=record.start, positions=positions, steps=steps)


def merge_tensor(deltas: Sequence[bytes], newest: Bits, dtype: str) -> bytes:
    """One delta from the base of the first delta to ``newest``.

    ``deltas`` are consecutive and end at ``newest``, oldest first; b"" is a version in which the tensor did not change. Applied to the base, the result
    gives ``newest`` bit for bit, without elements that changed and changed back. ``CorruptDataError``: a delta is
    damaged.
    """
    changed = [delta for delta in deltas if len(delta)]
    if not changed:
        return b""
    if len(changed) == 1:
        return bytes(changed[0])
    is_float = element_type(dtype).is_float
    encoder = TensorEncoder(dtype)
    streams = [decode_steps(newest, delta) for delta in changed]
    upcoming = [next(stream, None) for stream in streams]
    while waiting := [chunk.start for chunk in upcoming if chunk is not None]:
        start = min(waiting)
        here: list[ChunkSteps] = []
        for place, chunk in enumerate(upcoming):
            if chunk is not None and chunk.start == start:
                here.append(chunk)
                upcoming[place] = next(streams[place], None)
        after = newest[start : start + CHUNK_ELEMENTS]
        if any(chunk.steps is None for chunk in here):
            encoder.add_raw(start, after)
        else:
            encoder.add(start, _before(after, here, is_float), after)
    return encoder.finish()


class TensorEncoder:
    """Codes one tensor, chunk by chunk in ascending order."""

    def __init__(self, dtype: str) -> None:
        self._is_float = element_type(dtype).is_float
        self._records: list[bytes] = []

    def add(self, start: int, old: Bits, new: Bits) -> None:
        """One chunk, changed or not."""
        # One block decides: to count first would be one more pass over every chunk. Short chunks have little time to save.
        if len(new) >= _BLOCK and np.count_nonzero(old[:_BLOCK] != new[:_BLOCK]) > _TWO_BIT_FROM * _BLOCK:
            body = pack_differences(old, new)
            if body is not None:
                self._record(start, Method.TWO_BIT, int(np.count_nonzero(old != new)), body)
                return
        positions, steps = self._changes(old, new)
        num_changes = len(positions)
        if not num_changes:
            return
        coded: dict[Method, list[bytes]] = {}
        if num_changes <= _SPARSE_UP_TO * len(new):
            coded[Method.SPARSE] = [pack_positions(positions), pack_steps(steps)]
        # The steps cost about the same in both forms. Dense adds at least a bit for every element, sparse the positions:
        # where these are clearly smaller, coding all elements only costs time, most of all at 10 to 30% changed.
        if Method.SPARSE not in coded or len(coded[Method.SPARSE][0]) > _DENSE_FROM * len(new) / 8:
            coded[Method.DENSE] = pack_columns(zigzagged_steps(old, new, self._is_float))
            coded[Method.RAW] = [new.tobytes()]
        method = min(coded, key=lambda candidate: _size(coded[candidate]))
        self._record(start, method, num_changes, coded[method])

    def add_raw(self, start: int, new: Bits) -> None:
        """Add one chunk with unknown old elements."""
        self._record(start, Method.RAW, len(new), [new.tobytes()])

    def finish(self) -> bytes:
        """The coded tensor; empty without a change."""
        return b"".join([bytes([_FORMAT]), *self._records]) if self._records else b""

    def _changes(self, old: Bits, new: Bits) -> tuple[npt.NDArray[np.intp], Bits]:
        """Positions of changes, and their zigzagged steps: block by block, so that a block stays in the cache."""
        positions, steps = [], []
        for begin in range(0, len(new), _BLOCK):
            before, after = old[begin : begin + _BLOCK], new[begin : begin + _BLOCK]
            where = true_positions(before != after)
            if len(where):
                steps.append(zigzagged_steps(before[where], after[where], self._is_float))
                where += begin
                positions.append(where)
        if not positions:
            return np.empty(0, dtype=np.intp), old[:0]
        return np.concatenate(positions), np.concatenate(steps)

    def _record(self, start: int, method: Method, num_changes: int, body: list[bytes]) -> None:
        self._records.append(b"".join([_RECORD.pack(start // CHUNK_ELEMENTS, method, num_changes), *body]))


@dataclass(slots=True)
class _Record:
    """The head of one chunk; its body is next in the reader."""

    start: int
    method: int
    num_changes: int
    reader: PlaneReader

    def steps(self, here: Bits) -> tuple[npt.NDArray[np.intp] | None, Bits]:
        if self.method == Method.SPARSE:
            if self.num_changes > _SPARSE_UP_TO * len(here):
                raise CorruptDataError(f"delta has {self.num_changes} sparse changes in {len(here)} elements")
            positions = unpack_positions(self.reader, self.num_changes, len(here))
            return positions, unpack_steps(self.reader, self.num_changes, here.dtype)
        if self.method == Method.DENSE:
            return None, unpack_columns(self.reader, len(here), here.dtype)
        raise CorruptDataError(f"delta uses method {self.method}, which is unknown here")


def _size(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts))


def _records(like: Bits, data: bytes | memoryview) -> Iterator[_Record]:
    """The records of a coded tensor. Read each record's body before the next one."""
    if not len(data):
        return
    if data[0] != _FORMAT:
        raise CorruptDataError(f"delta format {data[0]} is unknown here; this end reads format {_FORMAT}")
    reader = PlaneReader(memoryview(data)[1:])
    previous = -1
    while not reader.at_end:
        index, method, num_changes = reader.unpack(_RECORD)
        start = index * CHUNK_ELEMENTS
        if index <= previous or start >= len(like):
            raise CorruptDataError(
                f"delta names chunk {index} after chunk {previous} of a tensor of {len(like)} elements"
            )
        previous = index
        if not 0 < num_changes <= min(CHUNK_ELEMENTS, len(like) - start):
            raise CorruptDataError(f"delta says {num_changes} changes in chunk {index}")
        yield _Record(start, method, num_changes, reader)


def _before(after: Bits, chunks: Sequence[ChunkSteps], is_float: bool) -> Bits:
    """The chunk before ``chunks``, oldest first, of which none is raw."""
    before: Bits = np.array(after)
    for chunk in reversed(chunks):  # differences of bits lead from the very bits of their version
        assert chunk.steps is not None
        if chunk.of_bits:
            before -= chunk.steps
        elif chunk.positions is None:
            before = step_back(before, chunk.steps, is_float)
        else:
            before[chunk.positions] = step_back(before[chunk.positions], chunk.steps, is_float)
    return before
