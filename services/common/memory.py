"""Tells glibc to keep freed memory: some processes free and take the same megabytes again and again.

By default a large block is a fresh mapping that the kernel zeroes page by page: about a tenth of the CPU time of a small
model's training step, and half the speed of a gRPC stream of 1 MiB chunks. Elsewhere than on glibc nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_HEAP_BLOCK = 32 * 1024 * 1024  # the most that every glibc accepts
_KEPT = 1024 * 1024 * 1024


def keep_freed_memory(*, one_arena: bool = False) -> bool:
    """Serve blocks of up to 32 MiB from the heap, and give the heap back to the kernel only above 1 GiB.

    ``one_arena`` keeps one heap for all threads: for a process whose threads pass buffers on (a weight publisher), so
    that what one frees another takes. False when the C library has no such settings, or refused one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_HEAP_BLOCK, _M_TRIM_THRESHOLD: _KEPT}
    if one_arena:
        settings[_M_ARENA_MAX] = 1
    answers = [mallopt(parameter, value) for parameter, value in settings.items()]
    return all(answer == 1 for answer in answers)
