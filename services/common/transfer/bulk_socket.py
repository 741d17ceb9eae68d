"""The bulk socket (ZeroMQ) of both ends: frames, CURVE keys, and waits on an asyncio event loop.

    receiver (DEALER)                                sender (ROUTER)
    [ticket, GET, offset, size]  ------------------>
                                 <------------------ [DATA, offset] [up to 1 MiB]   until the range is complete
    [ticket, BYE]                ------------------>                                ends the lease
                                 <------------------ [ERROR, 0] [REASON: message]

A GET is a credit: the sender only sends requested ranges, so a slow receiver bounds its own queue. A receiver keeps at most
``WINDOW`` requests open. Only fixed layouts of little-endian integers are decoded.

Waits take no thread and no queue of futures. ZeroMQ's descriptor signals an event without its kind, and only once: so check
the socket's own events before a wait, and again after every send.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from services.common.errors import InfrastructureError, InvalidRequestError

WINDOW = 8  # open GETs of one receiver
TICKET_BYTES = 32
KEY_BYTES = 32  # of CURVE, as they travel
HANDSHAKE_BYTES = 1024  # ZeroMQ's limit on messages also holds for those of the handshake, some 500 bytes each
OVERHEAD_BYTES = 64  # of an encrypted frame

Socket = zmq.Socket[bytes]

_REQUEST = struct.Struct(f"<{TICKET_BYTES}sBQI")
_ANSWER = struct.Struct("<BQ")

REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size


class Operation(enum.IntEnum):
    GET = 1
    BYE = 2


class Kind(enum.IntEnum):
    DATA = 1
    ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRequest:
    """One credit: ``size_bytes`` from ``offset``."""

    ticket: bytes
    operation: Operation
    offset: int = 0
    size_bytes: int = 0

    def encode(self) -> bytes:
        return _REQUEST.pack(self.ticket, self.operation, self.offset, self.size_bytes)

    @classmethod
    def decode(cls, data: bytes) -> BulkRequest:
        """Raises ``InvalidRequestError`` for anything that ``encode`` does not make."""
        try:
            ticket, operation, offset, size = _REQUEST.unpack(data)
            return cls(ticket=ticket, operation=Operation(operation), offset=offset, size_bytes=size)
        except (struct.error, ValueError):
            raise InvalidRequestError(f"{len(data)} bytes that are no request for bulk data") from None


def encode_answer(kind: Kind, offset: int) -> bytes:
    """The first frame of an answer."""
    return _ANSWER.pack(kind, offset)


def decode_answer(data: bytes | bytearray) -> tuple[Kind, int]:
    """Kind and offset. Raises ``InvalidRequestError`` for anything that ``encode_answer`` does not make."""
    try:
        kind, offset = _ANSWER.unpack(data)
        return Kind(kind), offset
    except (struct.error, ValueError):
        raise InvalidRequestError(f"{len(data)} bytes that are no answer of a bulk socket") from None


def new_keys() -> tuple[bytes, bytes]:
    """A public and a secret key. Raises ``InfrastructureError`` where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise InfrastructureError(
            "this ZeroMQ knows no CURVE, which a run with keys needs: install the wheel of pyzmq, or leave bulk out of "
            "policies.<name>.weights.transports"
        )
    public, secret = zmq.curve_keypair()  # as text, in Z85
    return z85.decode(public), z85.decode(secret)


def speak_to(socket: Socket, server_key: bytes) -> None:
    """Make a client's socket accept only the holder of this key, with a new key pair of its own."""
    public, secret = new_keys()
    socket.curve_serverkey = server_key
    socket.curve_publickey = public
    socket.curve_secretkey = secret


def descriptor(socket: Socket) -> int:
    """The file descriptor that becomes readable on an event."""
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
