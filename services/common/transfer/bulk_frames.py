"""What goes over a bulk socket (ZeroMQ): requests for ranges one way, frames of bytes the other.

    receiver (DEALER)                                sender (ROUTER)
    [ticket, GET, offset, size]  ------------------>
                                 <------------------ [DATA, offset] [up to 1 MiB]   until the range is complete
    [ticket, BYE]                ------------------>                                ends the lease
                                 <------------------ [ERROR, 0] [REASON: message]

A GET is a credit: nothing is sent that was not asked for, so a slow receiver bounds what waits for it. A receiver keeps
at most ``WINDOW`` of them open. Fixed layouts of little-endian integers; nothing else is ever decoded.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from services.common.errors import InvalidRequestError

WINDOW = 8  # open GETs of one receiver
TICKET_BYTES = 32

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
