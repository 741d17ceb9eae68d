"""One output stream of a program, read up to a cap."""

from __future__ import annotations

import fcntl
import os

_READ_BYTES = 1 << 16  # at once: a buffer below the size from which each is a mapping of its own
_MOST_DISCARDED = 1 << 20  # in one look
_USUAL_PIPE, _LARGEST_PIPE = 1 << 16, 1 << 20


class CappedPipe:
    """The read end of a pipe. ``truncated`` says that more than ``cap`` bytes came."""

    def __init__(self, fd: int | None, cap: int) -> None:
        """``fd`` does not block; it is closed at the end of the stream or by ``close``. None for a stream that is empty."""
        self.fd = fd if fd is not None else -1
        self.data = bytearray()
        self.truncated = False
        self.open = fd is not None
        self._cap = self._whole_cap = cap
        if fd is not None and cap > _USUAL_PIPE:
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, min(cap, _LARGEST_PIPE))
            except OSError:  # a smaller pipe is only slower
                pass

    def drain(self) -> None:
        """Read the available output. Data past the cap is dropped, and one read shows the overflow."""
        while self.open and not self.truncated and (chunk := self._read()):
            room = self._cap - len(self.data)
            self.data += chunk[:room]
            self.truncated = len(chunk) > room

    def discard(self) -> None:
        """Past the cap: read and drop output, so that the writer can stop."""
        left = _MOST_DISCARDED
        while self.open and left > 0 and (chunk := self._read()):
            left -= len(chunk)

    def _read(self) -> bytes:
        """One part of the output; empty while none is there, and at the end, which closes the pipe."""
        try:
            chunk = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not chunk:
            self.close()
        return chunk

    def take(self) -> bytes:
        """Output since the last call; all output counts towards the cap."""
        data = bytes(self.data)
        self.data.clear()
        self._cap -= len(data)
        return data

    def renew(self) -> None:
        """Free the whole cap again. Output that was not taken stays, unless the cap was exceeded already."""
        if self.truncated:
            self.data.clear()
        self._cap = self._whole_cap
        self.truncated = False

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.fd)
