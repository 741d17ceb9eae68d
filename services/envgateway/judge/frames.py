"""Frames of an interactive run, in both directions: a length and as many bytes."""

from __future__ import annotations

from services.envgateway.sandbox.bare.harness.calls import FRAME, framed
from services.envgateway.sandbox.connection import SubmittedRun


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
            if len(self._buffer) >= FRAME.size:
                size = FRAME.unpack_from(self._buffer)[0]
                if size > self._largest:
                    return None
                if len(self._buffer) >= FRAME.size + size:
                    frame = bytes(self._buffer[FRAME.size : FRAME.size + size])
                    del self._buffer[: FRAME.size + size]
                    return frame
            if self._ended:
                return None
            message = await self._run.messages.get()
            self._ended = message is None
            self._buffer += message.data if message is not None else b""


def one_frame(data: bytes) -> bytes | None:
    """The content of data that are one whole frame."""
    content = data[FRAME.size :]
    return content if framed(content) == data else None
