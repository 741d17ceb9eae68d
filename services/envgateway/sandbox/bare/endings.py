"""Reads a status from the end of a program's first process, by its exit status and the harness's notes.

The supervisor decides which limit a running program has passed.
"""

from __future__ import annotations

import os
import signal
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
