"""The bulk plane: payloads over ZeroMQ on TCP, for bearers of tickets. Frames of both ends, and the sending end.

    receiver (DEALER)                   sender (ROUTER)
    [ticket, start, end]  ------------>
                          <------------ [offset] [up to 1 MiB]   until the range is complete
                          <------------ [] [REASON: message]     instead of the rest

ZeroMQ's own I/O thread moves the bytes. One receiver has one transfer at a time, and at most ``WINDOW`` frames, which are
views of the payload and no copies, wait for it: a slow receiver holds little memory, and does not hold up others. Its range
ends when it closes its socket. The answer to a wrong ticket or a garbage frame is an error. Only fixed layouts of
little-endian integers are decoded.

In a run with keys the socket uses CURVE, with a key pair of this process. The control channel hands out the public key with
the ticket: a peer without a ticket has no key either, and fails the handshake. Without keys the socket binds loopback only,
in plain text.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import struct
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
import zmq
import zmq.asyncio
from zmq.utils import z85

from services.common.aio import deadline
from services.common.errors import (
    ConfigError,
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    RollmillError,
)
from services.common.net.hosts import address, bracketed, is_loopback
from services.common.telemetry.logs import Repeats
from services.common.weights.snapshot import Payload, PayloadRequest

# --- The interface of holders of weights (a publisher's store, or a relay) to the server side of ``WeightService``, and the
# send rate that all transports of one sender share. A payload's name is global: the same bytes here and at every relay.


class PayloadReader(ABC):
    """The bytes of one payload, leased until ``close``, which calls ``release``. Used from one event loop."""

    def __init__(self, size_bytes: int, release: Callable[[], None] = lambda: None) -> None:
        self.size_bytes = size_bytes
        self._release: Callable[[], None] | None = release

    @abstractmethod
    async def read(self, offset: int, size: int) -> memoryview:
        """At least 1 and at most ``size`` bytes from ``offset`` (< ``size_bytes``), valid until ``close``.

        Waits where these bytes have not been received yet.

        Raises:
            DeadlineError: the bytes did not arrive in time.
            NotFoundError: the bytes will never arrive.
        """

    def close(self) -> None:
        """End the lease. Views given out must not be used any more. Closing twice does no harm."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


class PayloadSource(Protocol):
    """The weights of one policy, at one holder."""

    def payload(self, request: PayloadRequest) -> Payload:
        """The payload to fetch for a version. Called in a thread, which may wait for a delta.

        Raises:
            PayloadNotReadyError: the delta is not coded within the request's ``wait_s``.
            VersionUnavailableError: a version of another run, or an unknown one.
        """
        ...

    def open(self, payload_id: str) -> PayloadReader:
        """Lease a payload. ``NotFoundError`` when the payload was dropped: the receiver asks for the manifest again."""
        ...


class MemoryReader(PayloadReader):
    """A payload that is in memory: a mapped file, or bytes."""

    def __init__(self, data: memoryview, release: Callable[[], None] = lambda: None) -> None:
        super().__init__(len(data), release)
        self._data = data

    async def read(self, offset: int, size: int) -> memoryview:
        return self._data[offset : offset + size]


CHUNK_BYTES = 1 << 20  # the fastest size for gRPC and ZeroMQ; larger gRPC messages are slower

_BURST_S = 0.1  # of unused rate that may be caught up
_CHUNK_S = 0.05  # duration of a chunk of a slow sender: short turns, so that no receiver detects a stall
_SMALLEST_CHUNK = 16 << 10


class SendBudget:
    """Lets at most ``bytes_per_s`` go out, in the order in which senders ask; 0 is no limit. One event loop."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()  # when everything granted so far has gone out
        self.num_bytes_sent = 0

    @property
    def chunk_bytes(self) -> int:
        """How much to send at once."""
        if not self._bytes_per_s:
            return CHUNK_BYTES
        return max(_SMALLEST_CHUNK, min(CHUNK_BYTES, int(self._bytes_per_s * _CHUNK_S)))

    async def take(self, num_bytes: int) -> None:
        """Wait for the turn of these bytes, and count them. No deadline: the rate bounds the wait, the receiver has one."""
        if self._bytes_per_s:
            begin = max(self._free_at, time.monotonic() - _BURST_S)
            self._free_at = begin + num_bytes / self._bytes_per_s
            if (delay := self._free_at - time.monotonic()) > 0:
                await asyncio.sleep(delay)
        self.num_bytes_sent += num_bytes


log = structlog.get_logger()

# -- frames and keys of both ends -----------------------------------------------------------------------------------------

WINDOW = 8  # frames of one receiver inside ZeroMQ, at each end
TICKET_BYTES = 32
KEY_BYTES = 32  # of CURVE, as they travel
HANDSHAKE_BYTES = 1024  # ZeroMQ's limit on messages also holds for those of the handshake, some 500 bytes each
OVERHEAD_BYTES = 64  # of an encrypted frame

REQUEST = struct.Struct(f"<{TICKET_BYTES}sQQ")  # ticket, and the range of the payload
OFFSET = struct.Struct("<Q")  # before each piece; an empty frame stands before an error


def new_keys() -> tuple[bytes, bytes]:
    """A public and a secret key. Raises ``InfrastructureError`` where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise InfrastructureError(
            "this ZeroMQ knows no CURVE, which a run with keys needs: install the wheel of pyzmq, or leave bulk out of "
            "policies.<name>.weights.transports"
        )
    public, secret = zmq.curve_keypair()  # as text, in Z85
    return z85.decode(public), z85.decode(secret)


def speak_to(socket: zmq.asyncio.Socket, server_key: bytes) -> None:
    """Make a client's socket accept only the holder of this key, with a new key pair of its own."""
    public, secret = new_keys()
    socket.curve_serverkey = server_key
    socket.curve_publickey = public
    socket.curve_secretkey = secret


# -- the sending end ------------------------------------------------------------------------------------------------------

BULK_FROM_BYTES = 4 << 20  # below it, opening another connection takes longer than it saves

TICKET_S = 60.0  # lifetime of a ticket without use
MOST_TICKETS = 4096  # the oldest unused goes first

_FULL_S = 0.002  # retry interval when a receiver's queue is full


@dataclass(slots=True)
class Ticket:
    """The payload that a bearer may read."""

    source: PayloadSource
    payload_id: str
    expires_at: float


class Tickets:
    """The valid tickets: random, each for one payload. Their bearers may read that payload over the bulk socket."""

    def __init__(self, lifetime_s: float = TICKET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._tickets: OrderedDict[bytes, Ticket] = OrderedDict()  # the one that expires first comes first

    def give(self, source: PayloadSource, payload_id: str) -> bytes:
        """A ticket for one payload."""
        self._drop_expired()
        while len(self._tickets) >= MOST_TICKETS:
            self._tickets.popitem(last=False)
        secret = secrets.token_bytes(TICKET_BYTES)
        self._tickets[secret] = Ticket(source, payload_id, self._clock() + self._lifetime_s)
        return secret

    def use(self, secret: bytes) -> Ticket:
        """The payload of the ticket; a use renews the ticket. Raises ``NotFoundError`` for a wrong or expired one."""
        self._drop_expired()
        ticket = self._tickets.get(secret)
        if ticket is None:
            raise NotFoundError("the ticket is unknown or has expired: ask for the manifest again")
        ticket.expires_at = self._clock() + self._lifetime_s
        self._tickets.move_to_end(secret)
        return ticket

    def __len__(self) -> int:
        return len(self._tickets)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._tickets and next(iter(self._tickets.values())).expires_at <= now:
            self._tickets.popitem(last=False)


class BulkServer:
    """``start``, hand out ``tickets`` and ``public_key``, ``stop``. Owns its socket and its transfers.

    Raises ``ConfigError`` for another bind than loopback that is not ``encrypted``.
    """

    def __init__(
        self,
        budget: SendBudget,
        *,
        host: str = "127.0.0.1",
        encrypted: bool = False,
        from_bytes: int = BULK_FROM_BYTES,
        idle_s: float = TICKET_S,
    ) -> None:
        if not encrypted and not is_loopback(host):
            raise ConfigError(f"the bulk plane may not bind {host} without keys: it would send weights in the clear")
        self.from_bytes = from_bytes
        self.tickets = Tickets(idle_s)
        self.endpoint = ""
        self.num_refused = 0
        self._repeats = Repeats()
        self.public_key, self._secret_key = new_keys() if encrypted else (b"", b"")
        self._budget = budget
        self._host = host
        self._idle_s = idle_s
        self._context: zmq.asyncio.Context | None = None
        self._listening: asyncio.Task[None] | None = None
        self._transfers: dict[bytes, asyncio.Task[None]] = {}  # by receiver

    async def start(self) -> None:
        """Bind a free port. Raises ``OSError`` (``zmq.ZMQError``) when that fails."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_mandatory = True  # a receiver that left is an error, not silence
        socket.maxmsgsize = REQUEST.size  # a peer that sends more is disconnected by ZeroMQ
        socket.sndhwm = WINDOW
        socket.ipv6 = ":" in self._host
        if self._secret_key:
            socket.curve_server = True
            socket.curve_secretkey = self._secret_key
            socket.maxmsgsize = HANDSHAKE_BYTES
        port = socket.bind_to_random_port(f"tcp://{bracketed(self._host)}")
        self.endpoint = f"tcp://{address(self._host, port)}"
        self._listening = asyncio.create_task(self._listen(socket), name="bulk.listen")
        log.info("bulk.listening", endpoint=self.endpoint)

    async def stop(self) -> None:
        """End every transfer and close. Stopping twice does no harm."""
        tasks = [task for task in (self._listening, *self._transfers.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            try:
                self._begin(socket, peer, frames)
            except RollmillError as error:
                self.num_refused += 1
                if (untold := self._repeats.tell(error.reason)) is not None:
                    log.info("bulk.refused", reason=error.reason, error=error.message, **untold)
                await self._answer_error(socket, peer, error)

    def _begin(self, socket: zmq.asyncio.Socket, peer: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1 or len(frames[0]) != REQUEST.size:
            raise InvalidRequestError(
                f"{len(frames)} frames of {sum(map(len, frames))} bytes: no request for bulk data"
            )
        if peer in self._transfers:
            raise InvalidRequestError("a connection has one transfer of bulk data at a time")
        secret, offset, end = REQUEST.unpack(frames[0])
        ticket = self.tickets.use(secret)
        reader = ticket.source.open(ticket.payload_id)
        if not offset < end <= reader.size_bytes:
            reader.close()
            raise OffsetOutOfRangeError(f"bytes {offset} to {end} of a payload of {reader.size_bytes} bytes")
        task = asyncio.create_task(self._send(socket, peer, reader, offset, end), name="bulk.transfer")
        self._transfers[peer] = task
        # Not a ``finally`` of the task: a task that is cancelled before its first step never runs that block.
        task.add_done_callback(partial(self._end, peer, reader))

    def _end(self, peer: bytes, reader: PayloadReader, task: asyncio.Task[None]) -> None:
        del self._transfers[peer]
        reader.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bulk.transfer_crashed", exc_info=error)

    async def _send(
        self, socket: zmq.asyncio.Socket, peer: bytes, reader: PayloadReader, offset: int, end: int
    ) -> None:
        try:
            while offset < end:
                data = await reader.read(offset, min(end - offset, self._budget.chunk_bytes))
                await self._budget.take(len(data))
                if not await self._put(socket, [peer, OFFSET.pack(offset), data]):
                    log.info("bulk.receiver_left")
                    return
                offset += len(data)
        except RollmillError as error:
            log.warning("bulk.transfer_failed", reason=error.reason, error=error.message)
            await self._answer_error(socket, peer, error)

    async def _put(self, socket: zmq.asyncio.Socket, frames: list[bytes | memoryview]) -> bool:
        """Hand a message to ZeroMQ when its receiver's queue has room; False when the receiver has left.

        Raises ``DeadlineError`` for a receiver that takes nothing for long.
        """
        async with deadline(self._idle_s, "room for the next frame of a bulk receiver"):
            while True:
                try:
                    await socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    return True
                except zmq.Again:  # polled: ZeroMQ does not signal when one of many receivers has room
                    await asyncio.sleep(_FULL_S)
                except zmq.ZMQError as error:
                    if error.errno != errno.EHOSTUNREACH:
                        raise
                    return False

    async def _answer_error(self, socket: zmq.asyncio.Socket, peer: bytes, error: RollmillError) -> None:
        """Without a wait: a receiver that has left, or takes nothing, gets no answer."""
        with suppress(zmq.ZMQError):
            await socket.send_multipart([peer, b"", f"{error.reason}: {error.message}".encode()], zmq.NOBLOCK)
