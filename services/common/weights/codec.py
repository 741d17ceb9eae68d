"""The lossless delta codec: encodes the difference of two tensors of the same shape and dtype, and decodes the bytes.

A tensor is cut into chunks of 2**20 elements. Unchanged chunks take no space. Each other chunk has a record

    chunk index (4 bytes) | method (1) | padding (3) | number of changes (4) | body

and takes one of

- sparse: gaps between changed positions, and the steps there;
- two-bit: the difference of every element, in two bits if it is small;
- dense: the step of every element, in byte planes;
- raw: the new elements.

Two-bit is for long chunks that begin with more than .15 of changed elements and have few large differences: beside sparse it
takes up to 7% more bytes and three quarters of the time for decoding. Other chunks take the fewest bytes of the three.

A step is the number of representable values from the old element to the new one (``elements``). Planes go through zstd's
entropy coder if that saves bytes. The first byte of a coded tensor is its format, which is 1.

Independent of tensors' names, versions and digests; the caller verifies results.
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from services.common.errors import CorruptDataError
from services.common.weights.snapshot import (
    Bits,
    cast_bits,
    element_type,
    step_forward,
    unzigzag,
    zigzag,
    zigzagged_steps,
)

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
            target[self.start : self.start + CHUNK_ELEMENTS][self.positions] = self.values

    def cast(self, source: str, target: str) -> ChunkChange:
        """The change in another floating type."""
        return self if source == target else replace(self, values=cast_bits(self.values, source, target))

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


def encode_tensor(old: Bits, new: Bits, dtype: str) -> bytes:
    """The difference of two flat arrays of bits; empty when there is none."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"a delta needs equal tensors, not {old.shape} {old.dtype} and {new.shape} {new.dtype}")
    is_float = element_type(dtype).is_float
    coded = [bytes([_FORMAT])]
    for index, start in enumerate(range(0, len(new), CHUNK_ELEMENTS)):
        before, after = old[start : start + CHUNK_ELEMENTS], new[start : start + CHUNK_ELEMENTS]
        method, num_changes, body = _encode_chunk(before, after, is_float)
        if num_changes:
            coded += [_RECORD.pack(index, method, num_changes), *body]
    return b"".join(coded) if len(coded) > 1 else b""


def decode_tensor(old: Bits, data: bytes | memoryview, dtype: str) -> Iterator[ChunkChange]:
    """The changes, chunk by chunk, as absolute values. ``CorruptDataError`` when the bytes make no sense."""
    if not len(data):
        return
    if data[0] != _FORMAT:
        raise CorruptDataError(f"delta format {data[0]} is unknown here; this end reads format {_FORMAT}")
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
        here = old[start : start + CHUNK_ELEMENTS]
        if not 0 < num_changes <= len(here):
            raise CorruptDataError(f"delta says {num_changes} changes in chunk {index}")
        positions, values = None, here
        if method == Method.RAW:
            values = np.frombuffer(reader.take(here.nbytes), dtype=old.dtype)
        elif method == Method.TWO_BIT:
            values = unpack_values(reader, here)
        elif method == Method.DENSE:
            values = step_forward(here, unpack_columns(reader, len(here), here.dtype), is_float)
        elif method == Method.SPARSE:
            if num_changes > _SPARSE_UP_TO * len(here):
                raise CorruptDataError(f"delta has {num_changes} sparse changes in {len(here)} elements")
            positions = unpack_positions(reader, num_changes, len(here))
            values = step_forward(here[positions], unpack_steps(reader, num_changes, here.dtype), is_float)
        else:
            raise CorruptDataError(f"delta uses method {method}, which is unknown here")
        yield ChunkChange(start=start, positions=positions, values=values, num_changes=num_changes)


def _encode_chunk(old: Bits, new: Bits, is_float: bool) -> tuple[Method, int, list[bytes]]:
    """Method, number of changes, and body of one chunk."""
    # One block decides: to count first would be one more pass over every chunk. Short chunks have little time to save.
    if len(new) >= _BLOCK and np.count_nonzero(old[:_BLOCK] != new[:_BLOCK]) > _TWO_BIT_FROM * _BLOCK:
        body = pack_differences(old, new)
        if body is not None:
            return Method.TWO_BIT, int(np.count_nonzero(old != new)), body
    where, stepped = [], []
    for begin in range(0, len(new), _BLOCK):  # so that a block stays in the cache
        before, after = old[begin : begin + _BLOCK], new[begin : begin + _BLOCK]
        changed = true_positions(before != after)
        if len(changed):
            stepped.append(zigzagged_steps(before[changed], after[changed], is_float))
            changed += begin
            where.append(changed)
    if not where:
        return Method.SPARSE, 0, []
    positions, steps = np.concatenate(where), np.concatenate(stepped)
    coded: dict[Method, list[bytes]] = {}
    if len(positions) <= _SPARSE_UP_TO * len(new):
        coded[Method.SPARSE] = [pack_positions(positions), pack_steps(steps)]
    # The steps cost about the same in both forms. Dense adds at least a bit for every element, sparse the positions:
    # where these are clearly smaller, coding all elements only costs time, most of all at 10 to 30% changed.
    if Method.SPARSE not in coded or len(coded[Method.SPARSE][0]) > _DENSE_FROM * len(new) / 8:
        coded[Method.DENSE] = pack_columns(zigzagged_steps(old, new, is_float))
        coded[Method.RAW] = [new.tobytes()]
    method = min(coded, key=lambda candidate: sum(map(len, coded[candidate])))
    return method, len(positions), coded[method]


# -- byte planes, positions and steps ---------------------------------------------------------------------------------
#
# A plane is empty (all zero), raw, or one zstd frame: the smallest of the three. It begins with one byte of coding and four
# of length (of the body; for an all-zero plane, of the plane). Positions are coded as gaps: the unchanged elements before
# each change, one byte each, every full 255 of them one escape byte. Steps are never zero: one bit for the direction, one
# bit for "more than one", and byte planes for the few larger sizes.

_HEADER = struct.Struct("<BI")
_ZERO, _RAW, _ZSTD = 0, 1, 2

# Bytes of a plane are independent, without repetitions, so only the entropy coder is useful. zstd's level 1 finds
# accidental repetitions, which makes a plane of gaps up to a third larger, and takes time.
_ENTROPY_ONLY = {
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}

_SEARCHED_SHARE, _WORDS_SHARE, _BRANCHLESS_SHARE = 1 / 80, 1 / 16, 0.1  # of true flags; see ``true_positions``
_WORD = 8  # flags

_ESCAPE = 255  # that many unchanged elements, and the gap goes on

Positions = npt.NDArray[np.intp]


class _Contexts(threading.local):
    """zstandard's contexts, which must not be shared between threads."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(**_ENTROPY_ONLY)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Contexts()


def pack_plane(plane: npt.NDArray[np.uint8]) -> bytes:
    """Header and body of one plane."""
    if not plane.any():
        return _HEADER.pack(_ZERO, len(plane))
    raw = plane.tobytes()
    compressed = _local.compressor.compress(raw)
    if len(compressed) < len(raw):
        return _HEADER.pack(_ZSTD, len(compressed)) + compressed
    return _HEADER.pack(_RAW, len(raw)) + raw


class PlaneReader:
    """A cursor over the untrusted bytes of a coded tensor.

    Raises ``CorruptDataError`` rather than allocate or read more than the caller expects.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._cursor = 0

    @property
    def at_end(self) -> bool:
        return self._cursor == len(self._data)

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        end = self._cursor + size
        if end > len(self._data):
            raise CorruptDataError(f"delta ends {end - len(self._data)} bytes early")
        taken = self._data[self._cursor : end]
        self._cursor = end
        return taken

    def unpack(self, header: struct.Struct) -> tuple[Any, ...]:
        return header.unpack(self.take(header.size))

    def plane(self, *, at_least: int, at_most: int) -> npt.NDArray[np.uint8]:
        """The next plane, with a size within the bounds."""
        coding, size = self.unpack(_HEADER)
        if coding == _ZERO and size <= at_most:
            plane = np.zeros(size, dtype=np.uint8)
        elif coding == _RAW:
            plane = np.frombuffer(self.take(size), dtype=np.uint8)
        elif coding == _ZSTD:
            plane = np.frombuffer(_decompress(self.take(size), at_most), dtype=np.uint8)
        else:
            raise CorruptDataError(f"delta holds a plane of coding {coding} and size {size}, which is unknown here")
        if not at_least <= len(plane) <= at_most:
            raise CorruptDataError(
                f"delta holds a plane of {len(plane)} bytes where {at_least} to {at_most} were expected"
            )
        return plane


def _decompress(body: memoryview, limit: int) -> bytes:
    try:
        # Refuse a frame that states a size above the limit before any allocation.
        if not 0 < zstandard.frame_content_size(body) <= limit:
            raise CorruptDataError(f"delta holds a zstd frame of other size than the at most {limit} bytes expected")
        return _local.decompressor.decompress(body)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"delta holds a broken zstd frame: {error}") from error


def true_positions(flags: npt.NDArray[np.bool_]) -> Positions:
    """The ascending positions of true flags, as ``np.flatnonzero`` gives them, in less time.

    Up to a tenth of true flags numpy searches for each one, which is slow from an eightieth on; above a tenth, it takes
    every flag without a branch. So words of eight flags are taken first, then the flags of those that have a true one; and
    above a sixteenth, true flags at the end make numpy take every flag.
    """
    num_true = np.count_nonzero(flags)
    if not _SEARCHED_SHARE * len(flags) < num_true <= _BRANCHLESS_SHARE * len(flags):
        return np.flatnonzero(flags)
    if num_true > _WORDS_SHARE * len(flags) or len(flags) % _WORD:
        padded = np.empty(len(flags) + len(flags) // 8 + 1, dtype=np.bool_)
        padded[: len(flags)] = flags
        padded[len(flags) :] = True
        return np.flatnonzero(padded)[:num_true]
    words = flags.view(np.uint64)
    where = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[where].view(np.bool_))
    positions: Positions = where[inside >> 3]
    positions <<= 3
    inside &= _WORD - 1
    positions += inside
    return positions


def pack_positions(positions: Positions) -> bytes:
    """Ascending positions, at least one."""
    gaps = np.empty(len(positions), dtype=np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    if gaps.max() < _ESCAPE:
        return pack_plane(gaps.astype(np.uint8))
    escapes = gaps // np.uint32(_ESCAPE)
    rest = (gaps - escapes * np.uint32(_ESCAPE)).astype(np.uint8)
    places = np.cumsum(escapes, dtype=np.intp) + np.arange(len(gaps))
    coded = np.full(int(places[-1]) + 1, _ESCAPE, dtype=np.uint8)
    coded[places] = rest
    return pack_plane(coded)


def unpack_positions(reader: PlaneReader, count: int, num_elements: int) -> Positions:
    """``count`` ascending positions below ``num_elements``. ``CorruptDataError`` when the plane says otherwise."""
    coded = reader.plane(at_least=count, at_most=count + num_elements // _ESCAPE + 1)
    if len(coded) == count:
        if count and coded.max() == _ESCAPE:
            raise CorruptDataError("delta ends a list of positions with an escape")
        positions = coded.astype(np.intp)
        positions[1:] += 1
        np.cumsum(positions, out=positions)
    else:
        ends = np.flatnonzero(coded != _ESCAPE)
        if not count or len(ends) != count or ends[-1] != len(coded) - 1:
            raise CorruptDataError(f"delta holds {len(ends)} positions where {count} were announced")
        positions = np.cumsum(coded, dtype=np.intp)[ends]
        positions += np.arange(count)
    if count and positions[-1] >= num_elements:
        raise CorruptDataError(f"delta changes element {positions[-1]} of {num_elements}")
    return positions


def pack_steps(steps: Bits) -> bytes:
    """Zigzagged steps, none of them zero.

    About 90% are one up or one down, for which two bits are much tighter than a byte plane.
    """
    one = steps.dtype.type(1)
    ordinals = steps - one  # 0 is -1 or +1 by its lowest bit, and so on
    sizes = ordinals >> one
    large = sizes != 0
    directions = np.packbits((ordinals & one).astype(np.uint8))
    where = true_positions(large)
    return b"".join([pack_plane(directions), pack_plane(np.packbits(large)), *pack_columns(sizes[where] - one)])


def unpack_steps(reader: PlaneReader, count: int, dtype: np.dtype[Any]) -> Bits:
    num_bytes = -(-count // 8)
    directions, large = (
        np.unpackbits(reader.plane(at_least=num_bytes, at_most=num_bytes), count=count) for _ in ("directions", "large")
    )
    where = true_positions(large.view(np.bool_))
    one = dtype.type(1)
    steps: Bits = directions.astype(dtype)
    steps += one
    steps[where] += (unpack_columns(reader, len(where), dtype) + one) << one
    return steps


def pack_columns(values: Bits) -> list[bytes]:
    """Values of several bytes, a plane per byte."""
    columns = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return [pack_plane(columns[:, axis]) for axis in range(values.dtype.itemsize)]


def unpack_columns(reader: PlaneReader, count: int, dtype: np.dtype[Any]) -> Bits:
    values: Bits = np.empty(count, dtype=dtype)
    columns = values.view(np.uint8).reshape(count, dtype.itemsize)
    for axis in range(dtype.itemsize):
        columns[:, axis] = reader.plane(at_least=count, at_most=count)
    return values


# -- two bits for each difference ---------------------------------------------------------------------------------------
#
# A difference is new bits minus old bits as integers. Those from -2 to 1 are codes of two bits; any other difference has
# code 0 and follows in a list: positions as in sparse chunks, and zigzagged differences in byte planes. Codes are one plane
# of words as wide as an element. A word of b bits has the codes of b / 2 elements, one from each of as many equal runs of
# the chunk; the first run's is in the lowest bits, and the last runs may be short or empty. The entropy of the words' bytes
# is coded.
#
# Decoding is two shifts and one addition for each element, and needs neither positions nor signs. A difference is a step of
# ``elements`` only for positive values: bits of negative floats fall as their values rise.

_COUNT = struct.Struct("<I")  # differences in the list
_LISTED_UP_TO = 0.25  # of the elements; with more, other methods take fewer bytes and less time


def pack_differences(old: Bits, new: Bits) -> list[bytes] | None:
    """The differences from ``old`` to ``new``, equally long and not empty; None if many do not fit into two bits."""
    kind = old.dtype.type
    words = np.zeros(_num_words(old), dtype=old.dtype)
    positions, listed = [], []
    for shift, run in _runs(old):
        codes = new[run] - old[run]
        codes += kind(2)
        where = true_positions(codes > kind(3))
        if len(where):
            listed.append(codes[where])
            codes[where] = 2
            where += run.start
            positions.append(where)
        if sum(map(len, listed)) > _LISTED_UP_TO * run.stop:
            return None
        codes ^= kind(2)  # which is the lower two bits of the difference
        codes <<= kind(shift)
        words[: len(codes)] |= codes
    count = sum(map(len, listed))
    body = [pack_plane(words.view(np.uint8)), _COUNT.pack(count)]
    if count:
        differences = np.concatenate(listed)
        differences -= kind(2)
        body += [pack_positions(np.concatenate(positions)), *pack_columns(zigzag(differences))]
    return body


def unpack_values(reader: PlaneReader, old: Bits) -> Bits:
    """The new elements, in an array of their own. ``CorruptDataError`` when a plane has another size than its elements."""
    signed = np.dtype(f"<i{old.dtype.itemsize}")
    unused = 8 * old.dtype.itemsize - 2  # bits of a word beside one code
    size = _num_words(old) * old.dtype.itemsize
    words = reader.plane(at_least=size, at_most=size).view(signed)
    values = np.empty_like(old)
    for shift, run in _runs(old):
        differences = words[: run.stop - run.start] << signed.type(unused - shift)
        differences >>= signed.type(unused)  # fills with the sign
        np.add(old[run], differences.view(old.dtype), out=values[run])
    (count,) = reader.unpack(_COUNT)
    if count > _LISTED_UP_TO * len(old):
        raise CorruptDataError(f"delta lists {count} differences among the {len(old)} of two bits")
    if count:
        positions = unpack_positions(reader, count, len(old))
        values[positions] += unzigzag(unpack_columns(reader, count, old.dtype))
    return values


def _num_words(like: Bits) -> int:
    return -(-len(like) // (4 * like.dtype.itemsize))


def _runs(like: Bits) -> Iterator[tuple[int, slice]]:
    """The runs that are not empty, each with the shift of its codes in the words."""
    size = _num_words(like)
    for number, start in enumerate(range(0, len(like), size)):
        yield 2 * number, slice(start, min(start + size, len(like)))
