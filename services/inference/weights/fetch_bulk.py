"""Payload bytes over the bulk plane: a ZeroMQ DEALER with a ticket, on the event loop. ``bulk_frames`` has the protocol."""

from __future__ import annotations

import asyncio

import zmq

from services.common.aio import deadline
from services.common.errors import CorruptDataError, InfrastructureError, InvalidRequestError, NotFoundError
from services.common.rpc.channel import DEADLINES
from services.common.transfer.bulk_curve import OVERHEAD_BYTES, speak_to
from services.common.transfer.bulk_frames import (
    ANSWER_BYTES,
    WINDOW,
    BulkRequest,
    Kind,
    Operation,
    decode_answer,
)
from services.common.transfer.sending import CHUNK_BYTES
from services.common.transfer.zmq_loop import Socket, has_input, readable
from services.common.weights.manifest import Payload
from services.inference.weights.fetch_range import ByteRange

_DRAIN_AT_ONCE = WINDOW  # answers read before others get their turn on the event loop
_BYE_LINGER_MS = 1000  # the last word may take so long after the socket is closed
# Without the monitor a sender that died would be reconnected to, silently, until the deadline.
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class BulkTransport:
    """One source's bulk socket, for the payload that the ticket names."""

    name = "bulk"

    def __init__(self, endpoint: str, ticket: bytes, source: str, *, server_key: bytes = b"") -> None:
        """``server_key``: with whom to speak CURVE; empty, the socket is plain."""
        self._server_key = server_key
        self._endpoint = endpoint
        self._ticket = ticket
        self._source = source

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        if wanted.is_complete:
            return
        try:
            socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.maxmsgsize = CHUNK_BYTES  # a sender of more is disconnected by ZeroMQ
            socket.ipv6 = True
            if self._server_key:
                speak_to(socket, self._server_key)
                socket.maxmsgsize = CHUNK_BYTES + OVERHEAD_BYTES
            monitor: Socket = socket.get_monitor_socket(_LOST)
        except zmq.ZMQError as error:  # no descriptors are left
            raise InfrastructureError(f"no socket for bulk data from {self._source}: {error}") from None
        try:
            socket.connect(self._endpoint)
            await self._receive(socket, monitor, wanted)
        except zmq.ZMQError as error:
            raise InfrastructureError(f"bulk data from {self._source} at {self._endpoint}: {error}") from None
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(_BYE_LINGER_MS)

    async def _receive(self, socket: Socket, monitor: Socket, wanted: ByteRange) -> None:
        asked = wanted.offset
        while not wanted.is_complete:
            while asked < wanted.end and asked - wanted.offset < WINDOW * CHUNK_BYTES:
                size = min(CHUNK_BYTES, wanted.end - asked)
                self._say(socket, Operation.GET, asked, size)
                asked += size
            async with deadline(DEADLINES["FetchWeights"], f"the next bulk data from {self._source}"):
                await readable(socket, monitor)
            if not has_input(socket):
                raise InfrastructureError(f"the bulk connection to {self._source} at {self._endpoint} is lost")
            for _ in range(_DRAIN_AT_ONCE):
                if wanted.is_complete or not has_input(socket):
                    break
                self._take(socket, wanted)
            await asyncio.sleep(0)
        self._say(socket, Operation.BYE)

    def _say(self, socket: Socket, operation: Operation, offset: int = 0, size_bytes: int = 0) -> None:
        request = BulkRequest(ticket=self._ticket, operation=operation, offset=offset, size_bytes=size_bytes)
        socket.send(request.encode(), zmq.DONTWAIT)

    def _take(self, socket: Socket, wanted: ByteRange) -> None:
        """One answer: a head, then bytes that go straight where they belong."""
        head = bytearray(ANSWER_BYTES)
        size = socket.recv_into(head, flags=zmq.DONTWAIT)
        if size != ANSWER_BYTES or not socket.get(zmq.RCVMORE):
            raise CorruptDataError(f"{self._source}: a bulk answer begins with {size} bytes")
        try:
            kind, offset = decode_answer(head)
        except InvalidRequestError as error:
            raise CorruptDataError(f"{self._source}: {error.message}") from None
        if kind is Kind.ERROR:
            raise NotFoundError(f"{self._source}: {socket.recv(zmq.DONTWAIT).decode(errors='replace')}")
        num_bytes = socket.recv_into(wanted.room, flags=zmq.DONTWAIT)
        if socket.get(zmq.RCVMORE):
            raise CorruptDataError(f"{self._source}: a bulk answer of more than two frames")
        wanted.advance(offset, num_bytes)
