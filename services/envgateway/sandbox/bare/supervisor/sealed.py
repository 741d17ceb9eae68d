"""Input of a child: a sealed file in memory, which no process can change."""

from __future__ import annotations

import fcntl
import os

_F_ADD_SEALS, _SEAL_ALL = 1033, 0xF  # seal, shrink, grow, write


def sealed(data: bytes) -> int:
    """A read-only file in memory, at its start: the reader may seek, and no process has to feed the file."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_ALL)
    return fd
