"""Frames between the gateway and the supervisor: a JSON head and raw byte strings.

    u32 head length | u32 blob bytes | head: {"kind": ..., "blobs": [length, ...], ...} | blobs

Both ends are ours and come from the same tree, so the format carries no version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PREFIX = struct.Struct("!II")


_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: ``json.dumps`` makes another at each call


def _dumps(head: dict[str, Any]) -> bytes:
    return _encode(head).encode()


def encode(
    head: dict[str, Any], blobs: Sequence[bytes] = (), dumps: Callable[[dict[str, Any]], bytes] = _dumps
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
