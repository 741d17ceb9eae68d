"""Progress of a math worker: a few bytes of memory that worker and owner share.

The owner reads them when a worker is overdue or dead, to find the cause; a write costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

IDLE, TRUTH, ANSWER = 0, 1, 2  # between questions; busy with the reference answer; busy with the policy's

_RECORD = struct.Struct("=BQd")


class Progress:
    """Worker and owner each map the same descriptor. Questions are numbered from 1, in the order they were asked."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _RECORD.size)

    def begin(self, question: int) -> None:
        """Begin a question; called in the worker."""
        _RECORD.pack_into(self._memory, 0, TRUTH, question, time.process_time())

    def reach(self, stage: int) -> None:
        self._memory[0] = stage

    def read(self) -> tuple[int, int, float]:
        """Stage, question, and the CPU time that the worker had used at the start of the question."""
        stage, question, cpu_s = _RECORD.unpack_from(self._memory)
        return int(stage), int(question), float(cpu_s)

    def close(self) -> None:
        self._memory.close()


def make_shared() -> int:
    """A descriptor for both."""
    fd = os.memfd_create("math-worker", os.MFD_CLOEXEC)
    os.ftruncate(fd, _RECORD.size)
    return fd
