"""Classes of old values by magnitude: how many elements of a class stand before a position, and where the n-th one is.

Small weights change more often than large ones, because a step to the neighbouring value is smaller for them. Both ends
have the old values, so positions may be counted within classes of like magnitude, which makes them cheaper to write.

A class is a range of magnitudes, given by its upper bound (exclusive). Masks are packed into 64-bit words, so that counting
takes a population count per 64 elements. Knows nothing about deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.weights.dtypes import Bits

MAX_CLASSES = 16
_SAMPLE_EVERY = 16
_CLASS_COST_BITS = 80.0  # head of a class, over the whole tensor
_CLASS_COST_SHARE = 0.01  # bits per change that a class must save, because each one takes time on both sides

_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}

Words = npt.NDArray[np.uint64]
Ranks = npt.NDArray[np.intp]


def has_classes(dtype: str) -> bool:
    """Whether values of this type have magnitudes to be classed by."""
    return dtype in _MANTISSA_BITS


def magnitudes(bits: Bits) -> Bits:
    """The bits without the sign."""
    return bits & bits.dtype.type((1 << (bits.dtype.itemsize * 8 - 1)) - 1)


def choose_bounds(old: Bits, positions: Ranks, dtype: str, scale: float) -> list[int]:
    """Upper bounds of classes, ascending: neighbouring exponents are one class unless telling them apart pays.

    ``old`` and its changed ``positions`` are a part of the tensor; ``scale`` is how much larger the whole is.
    """
    shift = _MANTISSA_BITS[dtype]
    exponents = (magnitudes(old[::_SAMPLE_EVERY]) >> shift).astype(np.intp)
    changed = (magnitudes(old[positions]) >> shift).astype(np.intp)
    size = int(max(exponents.max(initial=0), changed.max(initial=0))) + 1
    # A sample may miss an exponent that is there; what changed certainly is.
    population = np.bincount(exponents, minlength=size) * float(_SAMPLE_EVERY)
    changes = np.bincount(changed, minlength=size).astype(np.float64)
    population = np.maximum(population, changes)
    worth = max(_CLASS_COST_BITS, _CLASS_COST_SHARE * len(positions) * scale)
    bounds: list[int] = []
    members = hits = 0.0
    for exponent in range(size):
        n, k = float(population[exponent]), float(changes[exponent])
        if not n:
            continue
        together = _mask_bits(members + n, hits + k)
        apart = _mask_bits(members, hits) + _mask_bits(n, k)
        if members and (together - apart) * scale > worth and len(bounds) < MAX_CLASSES - 1:
            bounds.append(exponent << shift)
            members = hits = 0.0
        members, hits = members + n, hits + k
    return [*bounds, int(np.iinfo(old.dtype).max // 2 + 1)]


def _mask_bits(members: float, hits: float) -> float:
    """Entropy of which ``hits`` of ``members`` changed."""
    if not 0 < hits < members:
        return 0.0
    share = hits / members
    return float(-members * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))


class ClassIndex:
    """The classes of one chunk of old values."""

    def __init__(self, old: Bits, bounds: Sequence[int]) -> None:
        self._num_elements = len(old)
        self._magnitudes = magnitudes(old)
        self._bounds = bounds
        self._words: list[Words] = []
        self._before: list[Ranks] = []  # members before each word, and in all at the end
        below = np.zeros(-(-len(old) // 64), dtype=np.uint64)
        for bound in bounds:
            upto = _packed(self._magnitudes < old.dtype.type(bound))
            words = upto ^ below
            below = upto
            before = np.zeros(len(words) + 1, dtype=np.intp)
            np.cumsum(np.bitwise_count(words), out=before[1:])
            self._words.append(words)
            self._before.append(before)

    def num_members(self, number: int) -> int:
        return int(self._before[number][-1])

    def split(self, positions: Ranks) -> list[Ranks]:
        """For each class, which of ``positions`` (by their index) belong to it, in order."""
        limits = np.asarray(self._bounds[:-1], dtype=self._magnitudes.dtype)
        numbers = np.searchsorted(limits, self._magnitudes[positions], side="right")
        order = np.argsort(numbers.astype(np.uint8), kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(self._bounds)))
        return np.split(order, ends[:-1])

    def ranks(self, number: int, positions: Ranks) -> Ranks:
        """Members of the class before each position, which is a member itself."""
        places = positions >> 6
        lower = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        ranks: Ranks = self._before[number][places] + np.bitwise_count(self._words[number][places] & lower)
        return ranks

    def positions(self, number: int, ranks: Ranks) -> Ranks:
        """The inverse of ``ranks``, for ascending ranks below ``num_members``."""
        before = self._before[number]
        places = np.searchsorted(before, ranks, side="right") - 1
        within = (ranks - before[places]).astype(np.uint8)
        octets = self._words[number][places].view(np.uint8).reshape(len(ranks), 8)
        counts = np.cumsum(np.bitwise_count(octets), axis=1, dtype=np.uint8)
        octet = (counts <= within[:, None]).sum(axis=1)
        rows = np.arange(len(ranks))
        skipped = np.where(octet > 0, counts[rows, octet - 1], 0).astype(np.uint8)
        found: Ranks = places * 64 + octet * 8 + _NTH_BIT[octets[rows, octet], within - skipped]
        return found


def _packed(mask: npt.NDArray[np.bool_]) -> Words:
    packed = np.packbits(mask, bitorder="little")
    if len(packed) % 8:
        packed = np.concatenate([packed, np.zeros(-len(packed) % 8, dtype=np.uint8)])
    return packed.view(np.uint64)


def _nth_bits() -> npt.NDArray[np.intp]:
    table = np.zeros((256, 8), dtype=np.intp)
    for octet in range(256):
        places = [place for place in range(8) if octet >> place & 1]
        table[octet, : len(places)] = places
    return table


_NTH_BIT: Any = _nth_bits()  # [octet, n]: the place of its n-th one
