"""Messages between the supervisor and its fork servers, over a seqpacket socket with descriptors.

supervisor → fork server   Start with descriptors (see ``FDS``), Interrupt, or Kill
fork server → supervisor   Started with the child's pid, then Ended, exactly one of each per Start; Interrupted per Interrupt
"""

from __future__ import annotations

import struct
from typing import NamedTuple

START, INTERRUPT, KILL = b"S", b"I", b"K"
STARTED, INTERRUPTED, ENDED = b"s", b"i", b"e"

PLAIN, SHELL = "plain", "shell"  # profiles that the supervisor and the fork servers treat apart
BOUND_AT_START = "LD_BIND_NOW"  # in a fork server's environment

# Use of the source by a child.
PROGRAM, ECHO, CALL, TESTS, COMPILE, BINARY, CELLS = b"P", b"N", b"C", b"T", b"K", b"X", b"J"
JUDGED = b"G"  # a program with the names of ``prelude``
MODES = {"program": PROGRAM, "echo": ECHO, "call": CALL, "tests": TESTS, "compile": COMPILE, "binary": BINARY,
         "cells": CELLS, "judged": JUDGED}  # fmt: skip

# program text, stdin, stdout, stderr, note (a socket), ask, answer; at tier 2 also the slot's pid namespace
SOURCE_FD, STDIN_FD, STDOUT_FD, STDERR_FD, NOTE_FD, ASK_FD, ANSWER_FD, NAMESPACE_FD = range(8)
MAX_FDS = 8

READY_NOTE, FAILED_NOTE = b"R", b"E"
OUT_OF_MEMORY_NOTE, NO_COMPILE_NOTE = b"M", b"C"
FAILED_EXIT = 120


class Start(NamedTuple):
    """One run, as sent to a fork server."""

    kind: bytes
    run: int
    mode: bytes
    slot: int
    uid: int
    cpu_s: float
    memory_bytes: int
    processes: int
    file_bytes: int
    open_files: int
    disk_bytes: int
    num_files: int
    mark: int
    source_bytes: int


START_STRUCT = struct.Struct("!cQciIdQIQIQIQQ")
ENDED_STRUCT = struct.Struct("!cQiidQ")  # kind, run, pid, wait status, cpu_s, peak resident bytes


def order(kind: bytes, run: int) -> bytes:
    """INTERRUPT or KILL for a run's process."""
    return START_STRUCT.pack(*Start(kind, run, PROGRAM, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0))
