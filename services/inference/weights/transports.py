"""Brings the bytes of a payload over a connection from one source into a buffer: gRPC chunks, or the bulk plane.

A ``ByteRange`` is the partly received range. It outlives a stream and a transport, so that another one goes on where one
broke. ``fetch`` maps files, and chooses among the transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import structlog
import zmq

from services.common.aio import deadline
from services.common.errors import (
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
)
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.client.channel import DEADLINES, call_metadata, translated_errors
from services.common.transfer.bulk import (
    ANSWER_BYTES,
    OVERHEAD_BYTES,
    WINDOW,
    BulkRequest,
    Kind,
    Operation,
    Socket,
    decode_answer,
    has_input,
    readable,
    speak_to,
)
from services.common.transfer.source import CHUNK_BYTES
from services.common.weights.snapshot import ALIGNMENT, Payload

log = structlog.get_logger()

STREAM_ATTEMPTS = 4  # at the same offset, before the transfer counts as failed
_DRAIN_AT_ONCE = WINDOW  # answers read before others get their turn on the event loop
_BYE_LINGER_MS = 1000  # limit for sending the last message after the socket is closed
# Without the monitor ZeroMQ would silently try to reconnect to a dead sender until the deadline.
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ByteRange:
    """Bytes ``start`` to ``end`` of a payload and their buffer; ``offset`` is the next missing byte.

    >>> wanted = ByteRange(2, 4, memoryview(bytearray(2)))
    >>> wanted.put(2, b"x")
    >>> wanted.offset, wanted.is_complete
    (3, False)
    """

    def __init__(
        self, start: int, end: int, into: memoryview, on_received: Callable[[int], None] = lambda offset: None
    ) -> None:
        """``into`` has room for exactly this range; ``on_received`` is called with the offset after every piece."""
        if not 0 <= start <= end or len(into) != end - start:
            raise ValueError(f"{len(into)} bytes of room for bytes {start} to {end}")
        self.start, self.end, self.offset = start, end, start
        self._into = into
        self._on_received = on_received

    @property
    def is_complete(self) -> bool:
        return self.offset == self.end

    @property
    def room(self) -> memoryview:
        """The part that is still to be filled; write at its begin, then ``advance``."""
        return self._into[self.offset - self.start :]

    def advance(self, offset: int, num_bytes: int) -> None:
        """Count received bytes. ``CorruptDataError`` if they do not begin at the offset or exceed the range."""
        if offset != self.offset or num_bytes > self.end - offset:
            raise CorruptDataError(
                f"{num_bytes} bytes at {offset} came where bytes {self.offset} to {self.end} were due"
            )
        self.offset += num_bytes
        self._on_received(self.offset)
        if self.is_complete:
            self._on_received = _ignore  # no reference back: the payload's memory is freed without a garbage collection

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Copy received bytes into the range; raises as ``advance``."""
        room = self.room
        if offset == self.offset and len(data) <= len(room):
            room[: len(data)] = data
        self.advance(offset, len(data))


def _ignore(offset: int) -> None:
    """Nothing is left to be told."""


def receive_buffer(size_bytes: int) -> memoryview:
    """A buffer for a payload, aligned like its tensors. Not zeroed, in large pages if the kernel has them."""
    room = np.empty(size_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room.data[begin : begin + size_bytes]


class GrpcTransport:
    """``FetchWeights`` of one source, which every source serves. A broken stream is opened again at the offset."""

    def __init__(self, stub: weights_pb2_grpc.WeightServiceAsyncStub, source: str) -> None:
        self._stub = stub
        self._source = source

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        """Fill the range from its offset; received bytes stay in ``wanted`` after an error.

        Raises:
            InfrastructureError, DeadlineError, NotFoundError: the source does not send now.
            CorruptDataError: the received bytes cannot be the payload.
        """
        attempt, began_at = 1, wanted.offset
        while not wanted.is_complete:
            try:
                await self._stream(payload, wanted)
            except (InfrastructureError, DeadlineError) as error:
                log.warning(
                    "weights.stream_broke",
                    source=self._source,
                    offset=wanted.offset,
                    attempt=attempt,
                    error=error.message,
                )
                attempt = attempt + 1 if wanted.offset == began_at else 1
                began_at = wanted.offset
                if attempt > STREAM_ATTEMPTS:
                    raise
                continue
            if not wanted.is_complete:
                raise CorruptDataError(
                    f"{self._source}: payload {payload.payload_id} ended at {wanted.offset} of {wanted.end} bytes"
                )

    async def _stream(self, payload: Payload, wanted: ByteRange) -> None:
        request = weights_pb2.FetchWeightsRequest(payload_id=payload.payload_id, start_offset=wanted.offset)
        if wanted.end != payload.size_bytes:
            request.end_offset = wanted.end
        call = self._stub.FetchWeights(request, metadata=call_metadata())
        try:
            with translated_errors(f"weights at {self._source}", "FetchWeights"):
                while True:
                    async with deadline(DEADLINES["FetchWeights"], f"the next chunk of weights from {self._source}"):
                        response: Any = await call.read()  # a message, or the mark of the end
                    if response is grpc.aio.EOF:
                        return
                    wanted.put(response.offset, response.data)
        finally:
            call.cancel()


class BulkTransport:
    """One source's bulk socket: a ZeroMQ DEALER on the event loop, for the payload that the ticket names."""

    def __init__(self, endpoint: str, ticket: bytes, source: str, *, server_key: bytes = b"") -> None:
        """``server_key``: the server's public key for CURVE; empty, the socket is plain."""
        self._server_key = server_key
        self._endpoint = endpoint
        self._ticket = ticket
        self._source = source

    async def fetch(self, wanted: ByteRange) -> None:
        """Fill the range from its offset; raises as ``GrpcTransport.fetch``."""
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
                self._send(socket, Operation.GET, asked, size)
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
        self._send(socket, Operation.BYE)

    def _send(self, socket: Socket, operation: Operation, offset: int = 0, size_bytes: int = 0) -> None:
        request = BulkRequest(ticket=self._ticket, operation=operation, offset=offset, size_bytes=size_bytes)
        socket.send(request.encode(), zmq.DONTWAIT)

    def _take(self, socket: Socket, wanted: ByteRange) -> None:
        """Read one answer: a head, then bytes that are received directly into the range."""
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
