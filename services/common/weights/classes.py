"""Classes of old values by magnitude: how many elements of a class stand before a position, and where the n-th one is.

Small weights change more often than large ones, because a step to the neighbouring value is smaller for them. Both ends
have the old values, so positions may be counted within classes of like magnitude, which makes them cheaper to write.

A class is a range of exponents, as the type has them: biased, the sign left out. It is given by its upper bound
(exclusive); the last class has no bound. Masks are packed into 64-bit words, so that counting takes a population count
per 64 elements. Knows nothing about deltas.
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

_BLOCK = 1 << 16  # elements at a time, so that what lies between stays in the cache

_EXPONENTS = {"bfloat16": (7, 8), "float16": (10, 5), "float32": (23, 8)}  # lowest bit, and how many

Exponents = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Ranks = npt.NDArray[np.intp]


def has_classes(dtype: str) -> bool:
    """Whether values of this type have magnitudes to be classed by."""
    return dtype in _EXPONENTS


def exponents_of(bits: Bits, dtype: str) -> Exponents:
    """The biased exponent of each element."""
    lowest, count = _EXPONENTS[dtype]
    exponents = np.empty(len(bits), dtype=np.uint8)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK] >> bits.dtype.type(lowest)
        np.copyto(exponents[start : start + _BLOCK], block, casting="unsafe")
    if count < 8:  # else the sign is cut off with what does not fit into a byte
        exponents &= np.uint8((1 << count) - 1)
    return exponents


def choose_bounds(exponents: Exponents, positions: Ranks, scale: float) -> list[int]:
    """Upper bounds of all classes but the last, ascending: neighbours are one class unless telling them apart pays.

    ``exponents`` and the changed ``positions`` are a part of the tensor; ``scale`` is how much larger the whole is.
    """
    # A sample may miss an exponent that is there; what changed certainly is.
    changes = np.bincount(exponents[positions], minlength=256).astype(np.float64)
    population = np.bincount(exponents[::_SAMPLE_EVERY], minlength=256) * float(_SAMPLE_EVERY)
    population = np.maximum(population, changes)
    worth = max(_CLASS_COST_BITS, _CLASS_COST_SHARE * len(positions) * scale)
    bounds: list[int] = []
    members = hits = 0.0
    for exponent in range(256):
        n, k = float(population[exponent]), float(changes[exponent])
        if not n:
            continue
        together = _mask_bits(members + n, hits + k)
        apart = _mask_bits(members, hits) + _mask_bits(n, k)
        if members and (together - apart) * scale > worth and len(bounds) < MAX_CLASSES - 1:
            bounds.append(exponent)
            members = hits = 0.0
        members, hits = members + n, hits + k
    return bounds


def _mask_bits(members: float, hits: float) -> float:
    """Entropy of which ``hits`` of ``members`` changed."""
    if not 0 < hits < members:
        return 0.0
    share = hits / members
    return float(-members * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))


class ClassIndex:
    """The classes of one chunk of old values."""

    def __init__(self, exponents: Exponents, bounds: Sequence[int]) -> None:
        self._exponents = exponents
        self._bounds = np.array(bounds, dtype=np.uint8)
        self._words: list[Words] = []
        self._before: list[Ranks] = []  # members before each word, and in all at the end
        below: Words = np.zeros(-(-len(exponents) // 64), dtype=np.uint64)
        mask = np.empty(len(exponents), dtype=np.bool_)
        for bound in self._bounds:
            upto = _packed(np.less(exponents, bound, out=mask))
            self._add(upto ^ below)
            below = upto
        mask.fill(True)
        self._add(_packed(mask) ^ below)

    def _add(self, words: Words) -> None:
        before = np.zeros(len(words) + 1, dtype=np.intp)
        np.cumsum(np.bitwise_count(words).astype(np.intp), out=before[1:])
        self._words.append(words)
        self._before.append(before)

    def num_members(self, number: int) -> int:
        return int(self._before[number][-1])

    def split(self, positions: Ranks) -> list[Ranks]:
        """For each class, which of ``positions`` (by their index) belong to it, in order."""
        numbers = np.searchsorted(self._bounds, self._exponents[positions], side="right")
        order = np.argsort(numbers.astype(np.uint8), kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(self._words)))
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
