"""Elements of weights in numpy: types, casts between floating types, and the steps between two elements.

numpy has no bfloat16, so weights are handled as arrays of *bits*: unsigned integers as wide as the element.

A step is the number of representable values from one element to another. For floats, patterns are ranked so that
neighbouring values are neighbouring integers, so an update by one unit in the last place is +1 or -1 for any exponent. For
integers the rank is the pattern itself. Differences wrap, so every pair of patterns (NaN payloads, both zeros, denormals)
has exactly one step, and steps can be summed and undone. On the wire a step is zigzagged: 0, -1, +1, -2, +2 … become 0, 1,
2, 3, 4 ….

Independent of torch, positions, chunks and bytes.
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
    """An element type: its name in torch, and the unsigned type of its bits."""

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


def zigzagged_steps(old: Bits, new: Bits, is_float: bool) -> Bits:
    """Zigzagged steps from ``old`` to ``new``, in their dtype."""
    difference = new - old
    if is_float and len(difference):
        if _signs_differ(old, new):
            difference = rank(new, is_float)
            difference -= rank(old, is_float)
        else:
            _turn(difference, old)
    return zigzag(difference)


def zigzag(difference: Bits) -> Bits:
    """Zigzagged differences; ``difference`` itself is changed."""
    fill = _sign_fill(difference)
    difference <<= _one(difference)
    difference ^= fill
    return difference


def step_forward(old: Bits, zigzagged: Bits, is_float: bool) -> Bits:
    """The value ``zigzagged`` steps after ``old``."""
    difference = unzigzag(zigzagged)
    if not is_float:
        return old + difference
    # Without a change of sign, ranks rise with the pattern for positive values and fall for negative ones: fewer passes.
    _turn(difference, old)
    difference += old
    if not len(old) or not _signs_differ(old, difference):
        return difference
    difference -= old
    _turn(difference, old)
    ranks = rank(old, is_float)
    ranks += difference
    return unrank(ranks, is_float)


def _turn(difference: Bits, bits: Bits) -> None:
    """Negate, in place, the differences of negative ``bits``. A second call undoes the first one."""
    fill = _sign_fill(bits)
    difference ^= fill
    difference -= fill


def _signs_differ(one: Bits, other: Bits) -> bool:
    """Whether the sign bits of any two elements differ; at least one element."""
    return bool((one ^ other).view(np.dtype(f"i{one.dtype.itemsize}")).min() < 0)


def rank(bits: Bits, is_float: bool) -> Bits:
    """A fresh array of integers in value order: -NaN < -inf < … < -0 < +0 < … < inf < NaN."""
    if not is_float:
        return bits.copy()
    flips = _sign_fill(bits)
    flips |= _sign_bit(bits)
    flips ^= bits
    return flips


def unrank(ranks: Bits, is_float: bool) -> Bits:
    """The patterns of those ranks; ``ranks`` itself may be changed."""
    if not is_float:
        return ranks
    flips = _sign_fill(ranks)
    np.invert(flips, out=flips)
    flips |= _sign_bit(ranks)
    ranks ^= flips
    return ranks


def unzigzag(zigzagged: Bits) -> Bits:
    """The differences of zigzagged ones."""
    one = _one(zigzagged)
    difference: Bits = zigzagged & one
    np.negative(difference, out=difference)
    difference ^= zigzagged >> one
    return difference


def _sign_fill(bits: Bits) -> Bits:
    """All ones where the top bit is set, else zero."""
    signed = bits.view(np.dtype(f"i{bits.dtype.itemsize}"))
    filled: Bits = (signed >> (bits.dtype.itemsize * 8 - 1)).view(bits.dtype)
    return filled


def _sign_bit(bits: Bits) -> Any:
    return bits.dtype.type(1 << (bits.dtype.itemsize * 8 - 1))


def _one(bits: Bits) -> Any:
    return bits.dtype.type(1)
