"""Element types of weights as numpy sees them: names, sizes, and casts between floating types.

numpy has no bfloat16, so weights are handled as arrays of *bits*: unsigned integers as wide as the element.
Knows nothing about torch, tensors' names or versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequestError

Bits = npt.NDArray[np.unsignedinteger[Any]]  # one unsigned integer per element, little-endian


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """An element type: its name as torch writes it, and the unsigned type of its bits."""

    name: str
    bits_dtype: np.dtype[Any]
    is_float: bool

    @property
    def size_bytes(self) -> int:
        return int(self.bits_dtype.itemsize)


ELEMENT_TYPES: dict[str, ElementType] = {
    kind.name: kind
    for kind in (
        ElementType(name="float32", bits_dtype=np.dtype("<u4"), is_float=True),
        ElementType(name="bfloat16", bits_dtype=np.dtype("<u2"), is_float=True),
        ElementType(name="float16", bits_dtype=np.dtype("<u2"), is_float=True),
        ElementType(name="int32", bits_dtype=np.dtype("<u4"), is_float=False),
        ElementType(name="int64", bits_dtype=np.dtype("<u8"), is_float=False),
        ElementType(name="uint8", bits_dtype=np.dtype("u1"), is_float=False),
    )
}


def element_type(name: str) -> ElementType:
    """The element type of that name."""
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise InvalidRequestError(
            f"weights of dtype {name!r} cannot travel; use one of {sorted(ELEMENT_TYPES)}"
        ) from None


def cast_bits(bits: Bits, source: str, target: str) -> Bits:
    """Cast floating elements, rounding to nearest even as torch does; other elements stay as they are."""
    if source == target or not (element_type(source).is_float and element_type(target).is_float):
        return bits
    return _from_float32(_to_float32(bits, source), target)


def _to_float32(bits: Bits, source: str) -> npt.NDArray[np.float32]:
    if source == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.dtype(source)).astype(np.float32, copy=False)


def _from_float32(values: npt.NDArray[np.float32], target: str) -> Bits:
    if target == "float32":
        return values.view(np.uint32)
    if target == "float16":
        with np.errstate(over="ignore"):  # beyond the range is infinity, as in torch
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    # Adding just under half, plus the last kept bit, rounds ties to even; the carry may run into the exponent.
    rounded = ((wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
