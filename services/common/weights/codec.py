"""The lossless delta codec: two tensors of the same shape and dtype in, the bytes of their difference out, and back.

A tensor is cut into chunks of 2**20 elements. Each changed chunk is coded in the cheapest of three ways:

- sparse: gaps between changed positions (one byte each, 255 escapes), and the steps there as a bit for the sign,
  a bit for "more than one", and the few larger sizes;
- dense: the step of every element, in byte planes;
- raw: the new elements.

A step is the number of neighbouring representable values from the old element to the new one, so an update by
one unit in the last place is +1 or -1, whatever its exponent, and every bit pattern (NaN payloads, both zeros,
denormals) survives. Each plane goes through zstd level 1 unless that does not pay. Unchanged chunks take no space.
Integers use plain differences. docs/weights.md has the layout.

Knows nothing about tensors' names, versions or digests; the caller verifies results.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError
from services.common.weights.dtypes import Bits, element_type
from services.common.weights.planes import PlaneReader, pack_plane

CHUNK_ELEMENTS = 1 << 20
FORMAT = 1  # first byte of every coded tensor

_RECORD = struct.Struct("<IBxxxI")  # chunk index, method, number of changes
_ESCAPE = 255
_SPARSE_UP_TO = 0.5  # changed share above which sparse is never the cheapest
_DENSE_FROM = 0.12  # changed share below which dense is never the cheapest


class Method(enum.IntEnum):
    SPARSE = 1
    DENSE = 2
    RAW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChange:
    """New absolute values of one chunk, so that writing them twice does no harm."""

    start: int  # first element of the chunk
    positions: (
        npt.NDArray[np.intp] | None
    )  # changed elements relative to ``start``; None when ``values`` covers the chunk
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


def encode_tensor(old: Bits, new: Bits, dtype: str) -> bytes:
    """The difference of two flat arrays of bits; empty when there is none."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"a delta needs equal tensors, not {old.shape} {old.dtype} and {new.shape} {new.dtype}")
    is_float = element_type(dtype).is_float
    records = [bytes([FORMAT])]
    for index, start in enumerate(range(0, len(new), CHUNK_ELEMENTS)):
        stop = start + CHUNK_ELEMENTS
        record = _encode_chunk(index, old[start:stop], new[start:stop], is_float)
        if record is not None:
            records.append(record)
    return b"".join(records) if len(records) > 1 else b""


def decode_tensor(old: Bits, data: bytes | memoryview, dtype: str) -> Iterator[ChunkChange]:
    """The changes, chunk by chunk, as absolute values. ``CorruptDataError`` when the bytes make no sense."""
    if not len(data):
        return
    if data[0] != FORMAT:
        raise CorruptDataError(f"delta format {data[0]} is unknown here; this end reads format {FORMAT}")
    is_float = element_type(dtype).is_float
    reader = PlaneReader(memoryview(data)[1:])
    previous = -1
    while not reader.at_end:
        index, method, num_changes = reader.unpack(_RECORD)
        start = index * CHUNK_ELEMENTS
        if index <= previous or start >= len(old):
            raise CorruptDataError(
                f"delta names chunk {index} after chunk {previous} of a tensor of {len(old)} elements"
            )
        previous = index
        yield _decode_chunk(reader, method, num_changes, start, old[start : start + CHUNK_ELEMENTS], is_float)


def _encode_chunk(index: int, old: Bits, new: Bits, is_float: bool) -> bytes | None:
    positions = np.flatnonzero(old != new)
    num_changes = len(positions)
    if num_changes == 0:
        return None
    share = num_changes / len(new)
    coded = {Method.RAW: [new.tobytes()]}
    if share <= _SPARSE_UP_TO:
        steps = _steps(old[positions], new[positions], is_float)
        coded[Method.SPARSE] = [pack_plane(_gaps(positions)), *_pack_sparse_steps(steps)]
    if share >= _DENSE_FROM:
        coded[Method.DENSE] = _pack_steps(_steps(old, new, is_float))
    method = min(coded, key=lambda candidate: sum(map(len, coded[candidate])))
    return b"".join([_RECORD.pack(index, method, num_changes), *coded[method]])


def _decode_chunk(
    reader: PlaneReader, method: int, num_changes: int, start: int, old: Bits, is_float: bool
) -> ChunkChange:
    if not 0 < num_changes <= len(old):
        raise CorruptDataError(f"delta says {num_changes} changes in a chunk of {len(old)} elements")
    positions: npt.NDArray[np.intp] | None = None
    if method == Method.SPARSE:
        positions = _positions(
            reader.plane(at_least=num_changes, at_most=num_changes + len(old) // _ESCAPE + 1), num_changes, len(old)
        )
        values = _apply_steps(old[positions], _unpack_sparse_steps(reader, num_changes, old.dtype), is_float)
    elif method == Method.DENSE:
        values = _apply_steps(old, _unpack_steps(reader, len(old), old.dtype), is_float)
    elif method == Method.RAW:
        values = np.frombuffer(reader.take(old.nbytes), dtype=old.dtype)
    else:
        raise CorruptDataError(f"delta uses method {method}, which is unknown here")
    return ChunkChange(start=start, positions=positions, values=values, num_changes=num_changes)


def _gaps(positions: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    """Unchanged elements before each change; every full 255 of them is one escape byte."""
    gaps = np.empty(len(positions), dtype=np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    if gaps.max() < _ESCAPE:
        return gaps.astype(np.uint8)
    escapes = gaps // np.uint32(_ESCAPE)
    rest = (gaps - escapes * np.uint32(_ESCAPE)).astype(np.uint8)
    places = np.cumsum(escapes, dtype=np.intp) + np.arange(len(gaps))
    coded = np.full(int(places[-1]) + 1, _ESCAPE, dtype=np.uint8)
    coded[places] = rest
    return coded


def _positions(coded: npt.NDArray[np.uint8], num_changes: int, num_elements: int) -> npt.NDArray[np.intp]:
    ends = np.flatnonzero(coded != _ESCAPE)
    if len(ends) != num_changes or ends[-1] != len(coded) - 1:
        raise CorruptDataError(f"delta holds {len(ends)} positions where {num_changes} were announced")
    positions = np.cumsum(coded, dtype=np.intp)[ends]
    positions += np.arange(num_changes)
    if positions[-1] >= num_elements:
        raise CorruptDataError(f"delta changes element {positions[-1]} of a chunk of {num_elements}")
    return positions


def _steps(old: Bits, new: Bits, is_float: bool) -> Bits:
    """Zigzagged number of representable values from old to new, wrapping."""
    difference = _rank(new, is_float) - _rank(old, is_float)
    zigzagged: Bits = (difference << _one(difference)) ^ _sign_fill(difference)
    return zigzagged


def _apply_steps(old: Bits, zigzagged: Bits, is_float: bool) -> Bits:
    one = _one(zigzagged)
    difference = (zigzagged >> one) ^ (np.zeros_like(one) - (zigzagged & one))
    return _unrank(_rank(old, is_float) + difference, is_float)


def _rank(bits: Bits, is_float: bool) -> Bits:
    """Bits of floats mapped so that neighbouring values are neighbouring integers: -NaN < -inf < … < -0 < +0 < … < NaN."""
    return bits ^ (_sign_fill(bits) | _sign_bit(bits)) if is_float else bits


def _unrank(ranks: Bits, is_float: bool) -> Bits:
    return ranks ^ (~_sign_fill(ranks) | _sign_bit(ranks)) if is_float else ranks


def _sign_fill(bits: Bits) -> Bits:
    """All ones where the top bit is set, else zero."""
    signed = bits.view(np.dtype(f"i{bits.dtype.itemsize}"))
    filled: Bits = (signed >> (bits.dtype.itemsize * 8 - 1)).view(bits.dtype)
    return filled


def _sign_bit(bits: Bits) -> Any:
    return bits.dtype.type(1 << (bits.dtype.itemsize * 8 - 1))


def _one(bits: Bits) -> Any:
    return bits.dtype.type(1)


def _pack_steps(steps: Bits) -> list[bytes]:
    columns = np.ascontiguousarray(steps).view(np.uint8).reshape(len(steps), steps.dtype.itemsize)
    return [pack_plane(columns[:, axis]) for axis in range(steps.dtype.itemsize)]


def _unpack_steps(reader: PlaneReader, count: int, dtype: np.dtype[Any]) -> Bits:
    steps: Bits = np.empty(count, dtype=dtype)
    columns = steps.view(np.uint8).reshape(count, dtype.itemsize)
    for axis in range(dtype.itemsize):
        columns[:, axis] = reader.plane(at_least=count, at_most=count)
    return steps


def _pack_sparse_steps(steps: Bits) -> list[bytes]:
    """Steps that are never zero: about 90% are +1 or -1, for which two bits are much tighter than a byte plane.

    zstd would look for repetitions in a byte plane of two random values, find chance ones, and lose half a bit each.
    """
    one = _one(steps)
    ordinals = steps - one  # 0 is -1 or +1 by its lowest bit, and so on
    sizes = ordinals >> one
    large = sizes != 0
    signs = np.packbits((ordinals & one).astype(np.uint8))
    return [pack_plane(signs), pack_plane(np.packbits(large)), *_pack_steps(sizes[large] - one)]


def _unpack_sparse_steps(reader: PlaneReader, count: int, dtype: np.dtype[Any]) -> Bits:
    num_bytes = -(-count // 8)
    signs, large = (
        np.unpackbits(reader.plane(at_least=num_bytes, at_most=num_bytes), count=count) for _ in ("signs", "large")
    )
    where = np.flatnonzero(large)
    sizes: Bits = np.zeros(count, dtype=dtype)
    one = _one(sizes)
    sizes[where] = _unpack_steps(reader, len(where), dtype) + one
    zigzagged: Bits = ((sizes << one) | signs) + one
    return zigzagged
