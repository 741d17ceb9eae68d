"""Which host this is, for mapped files: two processes with the same identity see the same /dev/shm.

The kernel's boot id tells machines apart, the device of /dev/shm tells containers of one machine apart.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")


@functools.cache
def host_identity() -> str:
    """The same text in every process that sees this one's shared memory; empty where that cannot be known."""
    try:
        return f"{_BOOT_ID.read_text().strip()}:{os.stat(_SHARED_MEMORY).st_dev}"
    except OSError:
        return ""
