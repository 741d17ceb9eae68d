"""Differences of all elements of a chunk in two bits each, for chunks of which many elements change by little.

A difference is new bits minus old bits as integers. Those from -2 to 1 are codes of two bits; any other difference has code 0
and follows in a list: positions as in sparse chunks, and zigzagged differences in byte planes. Codes are one plane of words as
wide as an element. A word of b bits has the codes of b / 2 elements, one from each of as many equal runs of the chunk; the first
run's is in the lowest bits, and the last runs may be short or empty. The entropy of the words' bytes is coded.

Decoding is two shifts and one addition for each element, and needs neither positions nor signs. A difference is a step of
``elements`` only for positive values: bits of negative floats fall as their values rise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from services.common.errors import CorruptDataError
from services.common.weights.elements import Bits, unzigzag, zigzag
from services.common.weights.planes import (
    PlaneReader,
    pack_columns,
    pack_plane,
    pack_positions,
    true_positions,
    unpack_columns,
    unpack_positions,
)

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
