"""The two-way channel of an interactive run: what the gateway says goes in, what the harness answers comes out.

Bytes only; both directions are bounded: the gateway's by what it chooses to send, the program's by ``answer_bytes``.
"""

from __future__ import annotations

import os
import select
import struct

from .run import Run

_FRAME = struct.Struct("!I")


class Conversation:
    """Registered with the supervisor's epoll for as long as the run lasts."""

    def __init__(self, epoll: select.epoll, run: Run, ask_fd: int, first: bytes) -> None:
        self._epoll = epoll
        self.run = run
        self.ask_fd = ask_fd
        self.answer_fd = run.answer.fd
        self.heard = bytearray()
        self._unsent = bytearray()
        self._writing = False
        self._listening = True
        os.set_blocking(ask_fd, False)
        epoll.register(self.answer_fd, select.EPOLLIN)
        self.say(first)

    def say(self, data: bytes) -> None:
        """To the harness, as far as it reads; the rest when it does."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self.ask_fd, self._unsent[: 1 << 16])
            except BlockingIOError:
                break
            except BrokenPipeError:  # it reads no more; its end says the rest
                self._unsent.clear()
                break
            del self._unsent[:sent]
        if bool(self._unsent) != self._writing:
            self._writing = bool(self._unsent)
            if self._writing:
                self._epoll.register(self.ask_fd, select.EPOLLOUT)
            else:
                self._epoll.unregister(self.ask_fd)

    def hear(self) -> None:
        """Add to ``heard`` what has come from the harness."""
        self.run.answer.drain()
        if self._listening and (not self.run.answer.open or self.run.answer.truncated):
            self._stop_listening()
        if not self.run.answer.truncated:
            self.heard += self.run.answer.take()

    def is_whole_frame(self, largest: int) -> bool | None:
        """Whether what was heard is one frame; None while it may become one, False when it never will."""
        if len(self.heard) < _FRAME.size:
            return None
        size = _FRAME.size + _FRAME.unpack_from(self.heard)[0]
        if size > largest or len(self.heard) > size:
            return False
        return True if len(self.heard) == size else None

    def take(self) -> bytes:
        """What was heard and not taken yet."""
        data = bytes(self.heard)
        self.heard.clear()
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
