"""Changes as gaps and steps, in planes: what a sparse chunk and a class of the context form have in common.

Gaps are the unchanged elements before each change, one byte each, every full 255 of them one escape byte. Steps are
never zero: one bit for the direction, one bit for "more than one", and byte planes for the few larger sizes.

Knows nothing about chunks, tensors or old values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError
from services.common.weights.dtypes import Bits
from services.common.weights.planes import PlaneReader, pack_plane

_ESCAPE = 255

Positions = npt.NDArray[np.intp]


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
        positions = np.cumsum(coded, dtype=np.intp)
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
    return b"".join([pack_plane(directions), pack_plane(np.packbits(large)), *pack_columns(sizes[large] - one)])


def unpack_steps(reader: PlaneReader, count: int, dtype: np.dtype[Any]) -> Bits:
    num_bytes = -(-count // 8)
    directions, large = (
        np.unpackbits(reader.plane(at_least=num_bytes, at_most=num_bytes), count=count) for _ in ("directions", "large")
    )
    where = np.flatnonzero(large)
    one = dtype.type(1)
    sizes: Bits = np.zeros(count, dtype=dtype)
    sizes[where] = unpack_columns(reader, len(where), dtype) + one
    sizes <<= one
    sizes |= directions
    sizes += one
    return sizes


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
