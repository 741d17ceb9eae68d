"""Lists of small numbers as bits: Rice codes, each list with the parameter that suits it, in two planes for all lists.

A number v of a list with parameter k is v >> k zero bits and a one bit in the first plane, and its k low bits in the
second (the lowest bit of every number of the list, then the next bit of every number …). For gaps between independent
events that comes within a few hundredths of a bit of their entropy, and unlike a Huffman table costs nothing per list,
which is what counts where lists have a few hundred numbers. Bits fill bytes from the lowest.

Knows nothing about what the numbers mean. The reader walks over untrusted bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import CorruptDataError
from services.common.weights.planes import PlaneReader, pack_plane

MAX_PARAMETER = 31

Numbers = npt.NDArray[Any]  # integers, not negative, below 2**32
Flags = npt.NDArray[np.uint8]  # 0 or 1


def choose_parameter(numbers: Numbers) -> tuple[int, int]:
    """The parameter that takes the fewest bits, and how many those are."""
    if not len(numbers):
        return 0, 0
    # The best parameter lies beside the binary logarithm of the mean, and 2**parameter is at most twice the mean + 1.
    near = max(0, int(np.log2(float(numbers.mean()) + 1)) - 1)
    candidates = range(max(0, near - 1), min(MAX_PARAMETER, near + 2) + 1)
    bits = {k: int((numbers >> k).sum(dtype=np.int64)) + len(numbers) * (k + 1) for k in candidates}
    best = min(bits, key=lambda k: bits[k])
    return best, bits[best]


class RiceWriter:
    """Takes lists, gives two planes."""

    def __init__(self) -> None:
        self._quotients: list[Numbers] = []
        self._low_bits: list[Flags] = []

    def add(self, numbers: Numbers, parameter: int) -> None:
        self._quotients.append(np.right_shift(numbers, parameter).astype(np.int64))
        narrow: Numbers = numbers.astype(np.uint8 if parameter <= 8 else np.uint32)
        self._low_bits += [((narrow >> place) & 1).astype(np.uint8) for place in range(parameter)]

    def finish(self) -> bytes:
        ends = np.cumsum(np.concatenate([*self._quotients, np.empty(0, dtype=np.int64)]) + 1) - 1
        unary = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, dtype=np.uint8)
        unary[ends] = 1
        lows = np.concatenate([*self._low_bits, np.empty(0, dtype=np.uint8)])
        return b"".join(pack_plane(np.packbits(bits, bitorder="little")) for bits in (unary, lows))


class RiceReader:
    """Gives back what ``RiceWriter`` took, list by list."""

    def __init__(self, reader: PlaneReader, *, count: int, num_low_bits: int, max_zeros: int) -> None:
        """All lists together have ``count`` numbers, whose quotients add up to at most ``max_zeros``.

        Raises:
            CorruptDataError: the planes hold anything else.
        """
        coded = reader.plane(at_least=-(-count // 8), at_most=-(-(count + max_zeros) // 8))
        if int(np.bitwise_count(coded).sum(dtype=np.int64)) != count:
            raise CorruptDataError(f"delta holds another number of Rice codes than the {count} announced")
        ends = np.flatnonzero(np.unpackbits(coded, bitorder="little"))
        self._quotients = np.diff(ends, prepend=-1) - 1
        num_bytes = -(-num_low_bits // 8)
        lows = reader.plane(at_least=num_bytes, at_most=num_bytes)
        self._low_bits = np.unpackbits(lows, count=num_low_bits, bitorder="little")
        self._number = 0
        self._bit = 0

    def take(self, count: int, parameter: int, *, below: int) -> npt.NDArray[np.int64]:
        """The next list, whose numbers must be less than ``below``.

        Raises:
            CorruptDataError: they are not.
        """
        quotients = self._quotients[self._number : self._number + count]
        if count and int(quotients.max()) > below >> parameter:  # before the shift, which might overflow
            raise CorruptDataError(f"delta holds a number of {below} or more in a list of smaller ones")
        numbers: npt.NDArray[np.int64] = quotients << parameter
        self._number += count
        for place in range(parameter):
            numbers |= self._low_bits[self._bit : self._bit + count].astype(np.int64) << place
            self._bit += count
        if count and int(numbers.max()) >= below:
            raise CorruptDataError(f"delta holds a number of {below} or more in a list of smaller ones")
        return numbers
