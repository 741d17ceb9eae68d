"""ZeroMQ sockets on an asyncio event loop, without a thread and without a queue of futures.

ZeroMQ's descriptor only says that *something* happened, and says it once: whoever waits must look at the socket's own
events first, and again after every send.
"""

from __future__ import annotations

import asyncio

import zmq

Socket = zmq.Socket[bytes]


def descriptor(socket: Socket) -> int:
    """The file descriptor that becomes readable when there is news."""
    number = socket.get(zmq.FD)
    assert isinstance(number, int)
    return number


def has_input(socket: Socket) -> bool:
    """Whether a message can be received without waiting."""
    events = socket.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


async def readable(*sockets: Socket) -> None:
    """Return when one of the sockets has input. The caller bounds the wait."""
    if any(map(has_input, sockets)):
        return
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    for socket in sockets:
        loop.add_reader(descriptor(socket), news.set)
    try:
        while True:
            news.clear()
            if any(map(has_input, sockets)):
                return
            await news.wait()
    finally:
        for socket in sockets:
            loop.remove_reader(descriptor(socket))
