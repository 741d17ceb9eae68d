"""Tells glibc to keep freed memory: a training step frees and takes the same megabytes again and again.

By default every large tensor is a fresh mapping that the kernel zeroes page by page, about a tenth of the CPU time of a
small model's step. Elsewhere than on glibc nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_HEAP_BLOCK = 32 * 1024 * 1024  # the most that glibc accepts
_KEPT = 1024 * 1024 * 1024


def keep_freed_memory() -> None:
    """Serve blocks of up to 32 MiB from the heap, and give the heap back to the kernel only above 1 GiB."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
