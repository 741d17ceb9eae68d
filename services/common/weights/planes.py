"""Byte planes of the delta codec, and positions and steps in planes.

A plane is empty (all zero), raw, or one zstd frame: the smallest of the three. It begins with one byte of coding and four of
length (of the body; for an all-zero plane, of the plane). Positions are coded as gaps: the unchanged elements before each
change, one byte each, every full 255 of them one escape byte. Steps are never zero: one bit for the direction, one bit for
"more than one", and byte planes for the few larger sizes.

``PlaneReader`` reads untrusted bytes and raises ``CorruptDataError`` rather than allocate or read more than the caller
expects.
"""

from __future__ import annotations

import struct
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from services.common.errors import CorruptDataError
from services.common.weights.elements import Bits

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

_WORTH_TORCH = 4096  # elements; a call of torch takes longer than one of numpy

_ESCAPE = 255  # that many unchanged elements, and the gap goes on
_FEW_LONG = 1 / 64  # share of gaps with escapes, below which only these are looked at

Positions = npt.NDArray[np.intp]

_local = threading.local()  # zstandard's contexts must not be shared between threads


def pack_plane(plane: npt.NDArray[np.uint8]) -> bytes:
    """Header and body of one plane."""
    if not plane.any():
        return _HEADER.pack(_ZERO, len(plane))
    raw = plane.tobytes()
    compressed = _compressor().compress(raw)
    if len(compressed) < len(raw):
        return _HEADER.pack(_ZSTD, len(compressed)) + compressed
    return _HEADER.pack(_RAW, len(raw)) + raw


class PlaneReader:
    """A cursor over the bytes of a coded tensor."""

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
        return _decompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"delta holds a broken zstd frame: {error}") from error


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        parameters = zstandard.ZstdCompressionParameters(**_ENTROPY_ONLY)
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


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


def scatter(target: Bits, positions: Positions, values: Bits) -> None:
    """Write ``values`` at ``positions`` of ``target``."""
    torch = _torch()
    if torch is None or target.dtype.itemsize != 2 or len(positions) < _WORTH_TORCH or not values.flags.writeable:
        target[positions] = values
        return
    into, source = (torch.from_numpy(bits.view(np.int16)) for bits in (target, values))
    into.scatter_(0, torch.from_numpy(positions), source)  # two thirds of numpy's time


def _torch() -> Any:
    """The module torch if this process has it; it is not imported for this, because publishers have none."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "cumsum") else None  # it may be half imported by another thread


def _prefix_sums(values: Positions) -> Positions:
    """The inclusive prefix sums of values that this call may change."""
    torch = _torch()
    if torch is None or len(values) < _WORTH_TORCH:
        return np.cumsum(values, out=values)
    sums: Positions = torch.cumsum(torch.from_numpy(values), 0).numpy()  # a third of numpy's time
    return sums


def pack_positions(positions: Positions) -> bytes:
    """Ascending positions, at least one."""
    gaps = np.empty(len(positions), dtype=np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    if gaps.max() < _ESCAPE:
        return pack_plane(gaps.astype(np.uint8))
    long = np.flatnonzero(gaps >= _ESCAPE)
    if len(long) < _FEW_LONG * len(gaps):
        escapes = gaps[long] // np.uint32(_ESCAPE)
        gaps[long] -= escapes * np.uint32(_ESCAPE)
        return pack_plane(np.insert(gaps.astype(np.uint8), np.repeat(long, escapes), _ESCAPE))
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
        positions = _prefix_sums(positions)
    elif len(coded) < (1 + _FEW_LONG) * count:
        is_end = coded != _ESCAPE
        if not is_end[-1] or np.count_nonzero(is_end) != count:
            raise CorruptDataError(f"delta holds {np.count_nonzero(is_end)} positions where {count} were announced")
        sums = coded.astype(np.intp)
        sums += is_end
        positions = _prefix_sums(sums)[is_end]
        positions -= 1
    else:
        ends = np.flatnonzero(coded != _ESCAPE)
        if not count or len(ends) != count or ends[-1] != len(coded) - 1:
            raise CorruptDataError(f"delta holds {len(ends)} positions where {count} were announced")
        positions = _prefix_sums(coded.astype(np.intp))[ends]
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
