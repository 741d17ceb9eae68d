"""The lossless delta codec: two tensors of the same shape and dtype in, the bytes of their difference out, and back.

A tensor is cut into chunks of 2**20 elements. Unchanged chunks take no space. Each other chunk has a record

    chunk index (4 bytes) | method (1) | padding (3) | number of changes (4) | body

and takes the cheapest of

- sparse: gaps between changed positions, and the steps there (``sparse``);
- context: the same, counted and coded within classes of the old value's magnitude (``context``); the body is empty,
  because these changes are coded once for the whole tensor, before the records. Only in the small profile, and only
  where it takes fewer bytes than the sparse form of the same chunks;
- dense: the step of every element, in byte planes;
- raw: the new elements.

A step is the number of representable values from the old element to the new one (``steps``). Planes go through zstd's
entropy coder where that pays (``planes``). A coded tensor begins with its format: 1 is records; 2 is the context part,
then records. Integers have no magnitudes to be classed by and always take format 1.

Knows nothing about tensors' names, versions or digests; the caller verifies results.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError
from services.common.weights.classes import has_classes
from services.common.weights.context import MAX_SHARE, ContextDecoder, ContextEncoder
from services.common.weights.dtypes import Bits, element_type
from services.common.weights.manifest import Profile
from services.common.weights.planes import PlaneReader
from services.common.weights.sparse import (
    pack_columns,
    pack_positions,
    pack_steps,
    unpack_columns,
    unpack_positions,
    unpack_steps,
)
from services.common.weights.steps import step_forward, zigzagged_steps

CHUNK_ELEMENTS = 1 << 20

_RECORDS, _WITH_CONTEXT = 1, 2  # first byte of every coded tensor
_RECORD = struct.Struct("<IBxxxI")  # chunk index, method, number of changes
_SPARSE_UP_TO = 0.5  # changed share above which sparse is never the cheapest
_DENSE_FROM = MAX_SHARE  # changed share below which dense is never the cheapest
# Classes cost a few bytes per chunk, and time per element whether it changed or not.
_CONTEXT_FROM = 16  # changes in a chunk below which that does not pay,
_CONTEXT_FROM_SHARE = 1 / 2048  # and their share in it


class Method(enum.IntEnum):
    SPARSE = 1
    DENSE = 2
    RAW = 3
    CONTEXT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChange:
    """New absolute values of one chunk, so that writing them twice does no harm."""

    start: int  # first element of the chunk
    positions: npt.NDArray[np.intp] | None  # ascending, from ``start``; None when ``values`` covers the chunk
    values: Bits
    num_changes: int

    def write_to(self, target: Bits) -> None:
        if self.positions is None:
            target[self.start : self.start + len(self.values)] = self.values
        else:
            target[self.start : self.start + CHUNK_ELEMENTS][self.positions] = self.values

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSteps:
    """One chunk of a delta as it is coded, for which no base is needed."""

    start: int
    positions: npt.NDArray[np.intp] | None  # None when ``steps`` covers the chunk
    steps: Bits | None  # zigzagged; None for a raw chunk, whose new elements are the receiver's already


def encode_tensor(old: Bits, new: Bits, dtype: str, profile: Profile = Profile.FAST) -> bytes:
    """The difference of two flat arrays of bits; empty when there is none."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"a delta needs equal tensors, not {old.shape} {old.dtype} and {new.shape} {new.dtype}")
    encoder = TensorEncoder(dtype, profile, len(new))
    for start in range(0, len(new), CHUNK_ELEMENTS):
        encoder.add(start, old[start : start + CHUNK_ELEMENTS], new[start : start + CHUNK_ELEMENTS])
    return encoder.finish()


def decode_tensor(old: Bits, data: bytes | memoryview, dtype: str) -> Iterator[ChunkChange]:
    """The changes, chunk by chunk, as absolute values. ``CorruptDataError`` when the bytes make no sense."""
    is_float = element_type(dtype).is_float
    for record in _Records(old, data, dtype):
        start, here = record.start, old[record.start : record.start + CHUNK_ELEMENTS]
        if record.method == Method.RAW:
            values: Bits = np.frombuffer(record.reader.take(here.nbytes), dtype=old.dtype)
            yield ChunkChange(start=start, positions=None, values=values, num_changes=record.num_changes)
            continue
        positions, steps = record.steps(here)
        before = here if positions is None else here[positions]
        values = step_forward(before, steps, is_float)
        yield ChunkChange(start=start, positions=positions, values=values, num_changes=record.num_changes)


def decode_steps(like: Bits, data: bytes | memoryview) -> Iterator[ChunkSteps]:
    """A delta in the fast profile as positions and steps; ``like`` is any version of the tensor.

    Raises:
        CorruptDataError: the bytes make no sense.
        ValueError: the delta needs its base to be read.
    """
    if len(data) and data[0] == _WITH_CONTEXT:
        raise ValueError("a delta in the small profile cannot be read without its base")
    for record in _Records(like, data, None):
        here = like[record.start : record.start + CHUNK_ELEMENTS]
        if record.method == Method.RAW:
            record.reader.take(here.nbytes)
            yield ChunkSteps(start=record.start, positions=None, steps=None)
        else:
            positions, steps = record.steps(here)
            yield ChunkSteps(start=record.start, positions=positions, steps=steps)


class TensorEncoder:
    """Codes one tensor, chunk by chunk in ascending order."""

    def __init__(self, dtype: str, profile: Profile, num_elements: int) -> None:
        self._is_float = element_type(dtype).is_float
        self._records: list[bytes] = []
        self._context: ContextEncoder | None = None
        self._in_context: list[int] = []  # places in the records of chunks that the context form covers
        if profile is Profile.SMALL and has_classes(dtype):
            self._context = ContextEncoder(dtype, max(1.0, num_elements / CHUNK_ELEMENTS))

    def add(self, start: int, old: Bits, new: Bits) -> None:
        """One chunk, changed or not."""
        positions = np.flatnonzero(old != new)
        num_changes = len(positions)
        if not num_changes:
            return
        share = num_changes / len(new)
        if share < _DENSE_FROM:
            steps = zigzagged_steps(old[positions], new[positions], self._is_float)
            self._add_sparse(start, old, positions, steps)
            return
        coded = {Method.RAW: [new.tobytes()]}
        if share <= _SPARSE_UP_TO:
            steps = zigzagged_steps(old[positions], new[positions], self._is_float)
            coded[Method.SPARSE] = [pack_positions(positions), pack_steps(steps)]
        coded[Method.DENSE] = pack_columns(zigzagged_steps(old, new, self._is_float))
        method = min(coded, key=lambda candidate: sum(map(len, coded[candidate])))
        self._record(start, method, num_changes, coded[method])

    def add_raw(self, start: int, new: Bits) -> None:
        """One chunk whose old elements are not known."""
        self._record(start, Method.RAW, len(new), [new.tobytes()])

    def finish(self) -> bytes:
        """Everything; empty when nothing changed."""
        if not self._records:
            return b""
        if self._context is not None and self._in_context:
            coded = self._context.finish()
            if len(coded) < sum(len(self._records[place]) - _RECORD.size for place in self._in_context):
                for place in self._in_context:
                    index, _, num_changes = _RECORD.unpack_from(self._records[place])
                    self._records[place] = _RECORD.pack(index, Method.CONTEXT, num_changes)
                return b"".join([bytes([_WITH_CONTEXT]), coded, *self._records])
        return b"".join([bytes([_RECORDS]), *self._records])

    def _add_sparse(self, start: int, old: Bits, positions: npt.NDArray[np.intp], steps: Bits) -> None:
        if self._context is not None and len(positions) >= max(_CONTEXT_FROM, _CONTEXT_FROM_SHARE * len(old)):
            self._context.add(old, positions, steps)
            self._in_context.append(len(self._records))
        self._record(start, Method.SPARSE, len(positions), [pack_positions(positions), pack_steps(steps)])

    def _record(self, start: int, method: Method, num_changes: int, body: list[bytes]) -> None:
        self._records.append(b"".join([_RECORD.pack(start // CHUNK_ELEMENTS, method, num_changes), *body]))


@dataclass(slots=True)
class _Record:
    """The head of one chunk; its body is next in the reader."""

    start: int
    method: int
    num_changes: int
    reader: PlaneReader
    context: ContextDecoder | None

    def steps(self, here: Bits) -> tuple[npt.NDArray[np.intp] | None, Bits]:
        if self.method == Method.SPARSE:
            if self.num_changes > _SPARSE_UP_TO * len(here):
                raise CorruptDataError(f"delta has {self.num_changes} sparse changes in {len(here)} elements")
            positions = unpack_positions(self.reader, self.num_changes, len(here))
            return positions, unpack_steps(self.reader, self.num_changes, here.dtype)
        if self.method == Method.DENSE:
            return None, unpack_columns(self.reader, len(here), here.dtype)
        if self.method == Method.CONTEXT and self.context is not None:
            return self.context.take(here, self.num_changes)
        raise CorruptDataError(f"delta uses method {self.method}, which is unknown here")


class _Records:
    """Walks over a coded tensor. Whoever iterates reads each record's body before going on."""

    def __init__(self, like: Bits, data: bytes | memoryview, dtype: str | None) -> None:
        """``dtype`` is what the context form needs to know of ``like``; without it there is no such form."""
        self._like = like
        self._data = data
        self._dtype = dtype if dtype is not None and has_classes(dtype) else None

    def __iter__(self) -> Iterator[_Record]:
        if not len(self._data):
            return
        reader = PlaneReader(memoryview(self._data)[1:])
        context = None
        if self._data[0] == _WITH_CONTEXT and self._dtype is not None:
            context = ContextDecoder(reader, self._dtype, len(self._like))
        elif self._data[0] != _RECORDS:
            raise CorruptDataError(f"delta format {self._data[0]} is unknown here; this end reads formats 1 and 2")
        previous = -1
        while not reader.at_end:
            index, method, num_changes = reader.unpack(_RECORD)
            start = index * CHUNK_ELEMENTS
            if index <= previous or start >= len(self._like):
                raise CorruptDataError(
                    f"delta names chunk {index} after chunk {previous} of a tensor of {len(self._like)} elements"
                )
            previous = index
            if not 0 < num_changes <= min(CHUNK_ELEMENTS, len(self._like) - start):
                raise CorruptDataError(f"delta says {num_changes} changes in chunk {index}")
            yield _Record(start, method, num_changes, reader, context)
        if context is not None:
            context.check_finished()
