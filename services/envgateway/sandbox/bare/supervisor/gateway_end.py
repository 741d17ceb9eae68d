"""The supervisor's end of the gateway's channel: requests in, answers out as fast as the gateway reads them."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from .. import wire

_READ_BYTES = 1 << 16  # at once: a buffer below the size from which each is a mapping of its own


class GatewayEnd:
    """Registered with the supervisor's epoll."""

    def __init__(self, epoll: select.epoll, channel: socket.socket) -> None:
        self._epoll = epoll
        self._channel = channel
        self._frames = wire.FrameReader()
        self.unsent = bytearray()
        self._waits_to_send = False
        self.fd = channel.fileno()
        epoll.register(channel, select.EPOLLIN)

    def receive(self) -> Iterator[tuple[dict[str, Any], list[bytes]]] | None:
        """The requests that have come; None when the gateway has closed its end."""
        try:
            data = self._channel.recv(_READ_BYTES)
        except ConnectionResetError:
            return None
        return self._frames.feed(data) if data else None

    def send(self, head: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.unsent += wire.encode(head, blobs)
        if head["id"]:  # the probe's run has none: no gateway asked
            self.flush()

    def flush(self) -> None:
        try:
            sent = self._channel.send(self.unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):  # the gateway has gone: the next read says so
            sent = len(self.unsent)
        del self.unsent[:sent]
        if bool(self.unsent) is not self._waits_to_send:
            self._waits_to_send = bool(self.unsent)
            self._epoll.modify(self._channel, select.EPOLLIN | (select.EPOLLOUT if self.unsent else 0))
