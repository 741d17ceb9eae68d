"""Divides a sequence into parts of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_buckets(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Neighbours in lists of at most ``most`` together; a larger item has a list of its own. No list is empty.

    >>> list(in_buckets([1, 2, 9, 1, 1], lambda size: size, 3))
    [[1, 2], [9], [1, 1]]
    """
    bucket: list[T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if bucket and held + size > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size
    if bucket:
        yield bucket
