"""Messages of the sandbox's processes.

Between the gateway and the supervisor, frames of a JSON head and raw byte strings:

    u32 head length | u32 blob bytes | head: {"kind": ..., "blobs": [length, ...], ...} | blobs

Between the supervisor and its fork servers, over a seqpacket socket with descriptors:

    supervisor → fork server   Start with descriptors (see ``SOURCE_FD`` and below), Interrupt, or Kill
    fork server → supervisor   Started with the child's pid, then Ended, exactly one of each per Start; Interrupted per Interrupt

All ends are ours and come from the same tree, so the formats carry no version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

_PREFIX = struct.Struct("!II")


_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: ``json.dumps`` makes another at each call


def encode(
    head: dict[str, Any],
    blobs: Sequence[bytes] = (),
    dumps: Callable[[dict[str, Any]], bytes] = lambda head: _encode(head).encode(),
) -> bytes:
    """Encode a frame. ``dumps``: a faster JSON writer, at the end that has one."""
    head["blobs"] = [len(blob) for blob in blobs]
    encoded = dumps(head)
    return b"".join([_PREFIX.pack(len(encoded), sum(head["blobs"])), encoded, *blobs])


class FrameReader:
    """Cuts a byte stream into frames; bytes may arrive in any pieces."""

    def __init__(self, loads: Callable[[bytes], Any] = json.loads) -> None:
        self._buffer = bytearray()
        self._loads = loads

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            head_bytes, blob_bytes = _PREFIX.unpack_from(self._buffer)
            end = _PREFIX.size + head_bytes + blob_bytes
            if len(self._buffer) < end:
                return
            frame = bytes(memoryview(self._buffer)[_PREFIX.size : end])
            del self._buffer[:end]
            head: dict[str, Any] = self._loads(frame[:head_bytes])
            blobs = []
            position = head_bytes
            for length in head["blobs"]:
                blobs.append(frame[position : position + length])
                position += length
            yield head, blobs


# --- Between the supervisor and its fork servers.


START, INTERRUPT, KILL = b"S", b"I", b"K"
STARTED, INTERRUPTED, ENDED = b"s", b"i", b"e"

PLAIN, SHELL = "plain", "shell"  # profiles that the supervisor and the fork servers treat apart
BOUND_AT_START = "LD_BIND_NOW"  # in a fork server's environment

# Use of the source by a child.
PROGRAM, ECHO, CALL, TESTS, COMPILE, BINARY, CELLS = b"P", b"N", b"C", b"T", b"K", b"X", b"J"
JUDGED = b"G"  # a program that may use common names without an import
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
