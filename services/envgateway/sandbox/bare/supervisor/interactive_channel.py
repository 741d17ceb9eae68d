"""The two-way channel of an interactive run: the gateway's messages go in, the harness's answers come out.

Bytes only; both directions are bounded: the gateway's by the gateway, the program's by ``answer_bytes``.
"""

from __future__ import annotations

import os
import select
import struct

from .run import Run

_FRAME = struct.Struct("!I")


class InteractiveChannel:
    """Registered with the supervisor's epoll for as long as the run lasts."""

    def __init__(self, epoll: select.epoll, run: Run, ask_fd: int) -> None:
        self._epoll = epoll
        self.run = run
        self.ask_fd = ask_fd
        self.answer_fd = run.answer.fd
        self.received = bytearray()
        self._unsent = bytearray()
        self._writing = False
        self._listening = True
        os.set_blocking(ask_fd, False)
        epoll.register(self.answer_fd, select.EPOLLIN)

    def write(self, data: bytes) -> None:
        """Write to the harness, as far as its pipe accepts; the rest when the pipe is writable."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self.ask_fd, self._unsent[: 1 << 16])
            except BlockingIOError:
                break
            except BrokenPipeError:  # the harness reads no more; its end gives the reason
                self._unsent.clear()
                break
            del self._unsent[:sent]
        if bool(self._unsent) != self._writing:
            self._writing = bool(self._unsent)
            if self._writing:
                self._epoll.register(self.ask_fd, select.EPOLLOUT)
            else:
                self._epoll.unregister(self.ask_fd)

    def read(self) -> None:
        """Add the harness's new output to ``received``."""
        self.run.answer.drain()
        if self._listening and (not self.run.answer.open or self.run.answer.truncated):
            self._stop_listening()
        if not self.run.answer.truncated:
            self.received += self.run.answer.take()

    def is_whole_frame(self, largest: int) -> bool | None:
        """Whether ``received`` is one frame; None while more data may complete one, False when no data can."""
        if len(self.received) < _FRAME.size:
            return None
        size = _FRAME.size + _FRAME.unpack_from(self.received)[0]
        if size > largest or len(self.received) > size:
            return False
        return True if len(self.received) == size else None

    def take(self) -> bytes:
        """Return and clear ``received``."""
        data = bytes(self.received)
        self.received.clear()
        return data

    def _stop_listening(self) -> None:
        self._listening = False
        if self.run.answer.open:
            self._epoll.unregister(self.answer_fd)  # a closed descriptor has left by itself

    def close(self) -> None:
        if self._writing:
            self._epoll.unregister(self.ask_fd)
        os.close(self.ask_fd)
        if self._listening:
            self._stop_listening()
