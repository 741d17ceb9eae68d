"""Steps between bit patterns: how many representable values lie from one element to another.

For floats, patterns are ranked so that neighbouring values are neighbouring integers, so an update by one unit in the
last place is +1 or -1 whatever its exponent. For integers the rank is the pattern itself. Differences wrap, so every
pair of patterns (NaN payloads, both zeros, denormals) has exactly one step, and steps can be summed and undone.
On the wire a step is zigzagged: 0, -1, +1, -2, +2 … become 0, 1, 2, 3, 4 ….

Works on flat arrays of unsigned integers. Knows nothing about positions, chunks or bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.common.weights.dtypes import Bits


def zigzagged_steps(old: Bits, new: Bits, is_float: bool) -> Bits:
    """Zigzagged steps from ``old`` to ``new``, in their dtype."""
    difference = rank(new, is_float)
    difference -= rank(old, is_float)
    fill = _sign_fill(difference)
    difference <<= _one(difference)
    difference ^= fill
    return difference


def step_forward(old: Bits, zigzagged: Bits, is_float: bool) -> Bits:
    """What lies ``zigzagged`` steps after ``old``."""
    ranks = rank(old, is_float)
    ranks += _signed(zigzagged)
    return unrank(ranks, is_float)


def step_back(new: Bits, zigzagged: Bits, is_float: bool) -> Bits:
    """What lies ``zigzagged`` steps before ``new``."""
    ranks = rank(new, is_float)
    ranks -= _signed(zigzagged)
    return unrank(ranks, is_float)


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


def _signed(zigzagged: Bits) -> Bits:
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
