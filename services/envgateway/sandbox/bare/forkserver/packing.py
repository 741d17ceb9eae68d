"""Fills the holes in this process's memory, so that what is allocated from now on lies together.

A hole is free memory between objects. A child that allocates there copies the page around it, and the next object lies in
another page. Behind the last object each page is filled before the next one.
"""

from __future__ import annotations

import ctypes
from typing import Any

_POOL_BYTES, _POOL_HEAD_BYTES = 1 << 14, 48  # of the interpreter's allocator, for objects of one size
_BYTES_BYTES = 33  # of an empty ``bytes``
_SIZES_IN_POOLS = range(48, 513, 16)
_SIZES_IN_HEAP = (*range(1 << 16, 1 << 12, -1024), *range(1 << 12, 16, -16))
_CACHED_BYTES = 1032  # the C library keeps a freed piece of this size apart
_MOST_HOLES = 2000  # of one size

_filled: list[Any] = []  # for the process's life


def pack() -> None:
    """Takes some milliseconds, and hardly a page that was not in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim(0)
    large = [libc.malloc(_SIZES_IN_HEAP[0]) or 0 for _ in range(4)]  # of which one at least lies behind all others
    end = max(large)
    for address in large:
        libc.free(address)
    for size in _SIZES_IN_HEAP:
        for _ in range(_MOST_HOLES):
            address = libc.malloc(size)
            if address is None or address >= end:
                if size > _CACHED_BYTES:
                    libc.free(address)
                break
    for size in _SIZES_IN_POOLS:
        _fill_pools(size)


def _fill_pools(size: int) -> None:
    """Up to the first object of a new pool."""
    for _ in range(_MOST_HOLES):
        filling = bytes(size - _BYTES_BYTES)
        _filled.append(filling)
        if id(filling) % _POOL_BYTES == _POOL_HEAD_BYTES:
            return
