"""glibc's allocator, told that this process handles megabyte buffers all day.

By default every chunk of 1 MiB is mapped, faulted in page by page and unmapped again, which halves the speed of gRPC
streams. Meant for processes that do little else: a publisher, not a replica.
"""

from __future__ import annotations

import ctypes

import structlog

log = structlog.get_logger()

# mallopt parameters and values: keep what was freed, serve large blocks from the heap, one arena.
_SETTINGS = {-1: 1 << 30, -3: 256 << 20, -8: 1}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX


def keep_freed_memory() -> bool:
    """Apply the settings; False where the C library has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.info("allocator.unchanged", reason="no mallopt in this C library")
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in _SETTINGS.items())
