"""Reads a verdict from the end of a program's first process; and the record of a case that a host writes for the
gateway.

The same rules for a run that the supervisor watched to its end and for a case that its host watched: the watcher
decides which limit a running program has passed; the rest follows from the exit status and the notes.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from typing import NamedTuple

from . import messages
from .statuses import RunStatus


class Ending(NamedTuple):
    """How a process ended, and why."""

    status: RunStatus
    detail: str
    exit_code: int | None
    signal: int | None


def ending(wait_status: int, notes: bytes, cpu_s: float, cpu_limit_s: float) -> Ending:
    """The ending of a process that was not stopped. ``notes``: the harness's notes behind the ready note."""
    killed_by = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
    exit_code = os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else None
    status, detail = RunStatus.RUNTIME_ERROR, ""
    if messages.NO_COMPILE_NOTE in notes and exit_code != 0:
        status = RunStatus.COMPILE_ERROR
    elif messages.OUT_OF_MEMORY_NOTE in notes:
        status = RunStatus.MEMORY_LIMIT
    elif killed_by is None and exit_code == 0:
        status = RunStatus.OK
    elif killed_by in (signal.SIGXCPU, signal.SIGKILL) and cpu_s >= cpu_limit_s:
        status, detail = RunStatus.TIME_LIMIT, "CPU time"
    return Ending(status, detail, exit_code, killed_by)


# number of the case, why the host stopped it, whether output is cut, wait status, wall_s, cpu_s, peak resident bytes, and the
# lengths of stdout, stderr, answer and notes, which follow
_RECORD = struct.Struct("!IBBiddQIIII")
NOT_STOPPED, OUT_OF_TIME, TOO_MUCH_OUTPUT, ANSWER_TOO_LARGE = range(4)
_STOPPED = {
    OUT_OF_TIME: (RunStatus.TIME_LIMIT, "wall time"),
    TOO_MUCH_OUTPUT: (RunStatus.OUTPUT_LIMIT, ""),
    ANSWER_TOO_LARGE: (RunStatus.OUTPUT_LIMIT, "the answer is too large"),
}


class CaseRecord(NamedTuple):
    """One case that left no trace.

    >>> record = CaseRecord(3, NOT_STOPPED, False, 256, 0.5, 0.25, 1024, b"out", b"", b"", b"M")
    >>> list(records(record.packed())) == [record], record.ending(5.0).status
    (True, <RunStatus.MEMORY_LIMIT: 'MEMORY_LIMIT'>)
    """

    number: int
    stopped: int
    truncated: bool
    wait_status: int
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    stdout: bytes
    stderr: bytes
    answer: bytes
    notes: bytes

    def packed(self) -> bytes:
        parts = self[7:]
        return b"".join([_RECORD.pack(*self[:7], *map(len, parts)), *parts])

    def ending(self, cpu_limit_s: float) -> Ending:
        """The ending that the supervisor would have reported."""
        told = ending(self.wait_status, self.notes, self.cpu_s, cpu_limit_s)
        if self.stopped == NOT_STOPPED:
            return told
        status, detail = _STOPPED[self.stopped]
        return told._replace(status=status, detail=detail)


def records(data: bytes, cut: bool = False) -> Iterator[CaseRecord]:
    """The records of one frame; of ``cut`` data the complete ones. Raises ``ValueError`` for data that no host writes."""
    position = 0
    while position < len(data):
        if len(data) - position < _RECORD.size:
            if cut:
                return
            raise ValueError(f"a record of {len(data) - position} bytes is too short")
        head = _RECORD.unpack_from(data, position)
        position += _RECORD.size
        parts = []
        for length in head[7:]:
            parts.append(data[position : position + length])
            position += length
        if cut and position > len(data):
            return
        if position > len(data) or head[1] not in (NOT_STOPPED, *_STOPPED):
            raise ValueError("no host writes such a record")
        yield CaseRecord(head[0], head[1], bool(head[2]), *head[3:7], *parts)
