"""How far a math worker has come with its question: a few bytes of memory that worker and owner share.

The owner reads it when a worker is overdue or dead, to tell whose fault it is; writing it costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

IDLE, TRUTH, ANSWER = 0, 1, 2  # between questions; busy with the reference answer; busy with the policy's

_RECORD = struct.Struct("=Bd")


class Progress:
    """Worker and owner each map the same descriptor."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _RECORD.size)

    def begin(self) -> None:
        """In the worker: a question has come."""
        _RECORD.pack_into(self._memory, 0, TRUTH, time.process_time())

    def reach(self, stage: int) -> None:
        self._memory[0] = stage

    @property
    def stage(self) -> int:
        return int(self._memory[0])

    @property
    def cpu_before_s(self) -> float:
        """CPU time that the worker had used when its question came."""
        return float(_RECORD.unpack_from(self._memory)[1])

    def close(self) -> None:
        self._memory.close()


def make_shared() -> int:
    """A descriptor for both."""
    fd = os.memfd_create("math-worker", os.MFD_CLOEXEC)
    os.ftruncate(fd, _RECORD.size)
    return fd
