"""Frames of an interactive run, in both directions: a length and as many bytes."""

from __future__ import annotations

import struct

from services.envgateway.sandbox.connection import SubmittedRun

_FRAME = struct.Struct("!I")


class Frames:
    """The output of an interactive run, cut into frames."""

    def __init__(self, run: SubmittedRun, largest: int) -> None:
        self._run = run
        self._largest = largest
        self._buffer = bytearray()
        self._ended = False

    async def next(self) -> bytes | None:
        """The next frame; None at the end of the output, or when the output is not a frame."""
        while True:
            if len(self._buffer) >= _FRAME.size:
                size = _FRAME.unpack_from(self._buffer)[0]
                if size > self._largest:
                    return None
                if len(self._buffer) >= _FRAME.size + size:
                    frame = bytes(self._buffer[_FRAME.size : _FRAME.size + size])
                    del self._buffer[: _FRAME.size + size]
                    return frame
            if self._ended:
                return None
            message = await self._run.messages.get()
            self._ended = message is None
            self._buffer += message.data if message is not None else b""


def framed(data: bytes) -> bytes:
    return _FRAME.pack(len(data)) + data
