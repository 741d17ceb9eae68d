"""The bulk plane: payloads over ZeroMQ on TCP, for bearers of tickets. Frames of both ends, and the sending end.

    receiver (DEALER)                                sender (ROUTER)
    [ticket, GET, offset, size]  ------------------>
                                 <------------------ [DATA, offset] [up to 1 MiB]   until the range is complete
    [ticket, BYE]                ------------------>                                ends the lease
                                 <------------------ [ERROR, 0] [REASON: message]

A GET is a credit: the server only sends requested ranges, and one receiver has at most ``WINDOW`` open requests, so a slow
receiver holds a bounded number of frames, which are views of the payload, not copies. ZeroMQ's own I/O thread moves the
bytes; this module runs on the event loop, woken by the socket's descriptor, and spends some ten microseconds per MiB.
The answer to a wrong ticket or a garbage frame is an error; other receivers are unaffected.

Waits take no thread and no queue of futures. ZeroMQ's descriptor signals an event without its kind, and only once: so check
the socket's own events before a wait, and again after every send. Only fixed layouts of little-endian integers are decoded.

In a run with keys the socket uses CURVE, with a key pair of this process. The control channel hands out the public key with
the ticket: a peer without a ticket has no key either, and fails the handshake. Without keys the socket binds loopback only,
in plain text.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import secrets
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import zmq
from zmq.utils import z85

from services.common.aio import deadline
from services.common.errors import (
    ConfigError,
    DeadlineError,
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


class PayloadReader(Protocol):
    """The bytes of one payload, leased until ``close``. Used from one event loop."""

    @property
    def size_bytes(self) -> int: ...

    async def read(self, offset: int, size: int) -> memoryview:
        """At least 1 and at most ``size`` bytes from ``offset`` (< ``size_bytes``), valid until ``close``.

        Waits where these bytes have not been received yet.

        Raises:
            DeadlineError: the bytes did not arrive in time.
            NotFoundError: the bytes will never arrive.
        """
        ...

    def close(self) -> None:
        """End the lease. Views given out must not be used any more."""
        ...


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


class MemoryReader:
    """A payload that is whole in memory (a mapped file, or bytes), and the function that ends its lease."""

    def __init__(self, data: memoryview, release: Callable[[], None] = lambda: None) -> None:
        self._data = data
        self._release: Callable[[], None] | None = release

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    async def read(self, offset: int, size: int) -> memoryview:
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Closing twice does no harm."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


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
        self.num_bytes_by_transport: Counter[str] = Counter()

    @property
    def chunk_bytes(self) -> int:
        """How much to send at once."""
        if not self._bytes_per_s:
            return CHUNK_BYTES
        return max(_SMALLEST_CHUNK, min(CHUNK_BYTES, int(self._bytes_per_s * _CHUNK_S)))

    async def take(self, num_bytes: int, transport: str) -> None:
        """Wait for the turn of these bytes, and count them. No deadline: the rate bounds the wait, the receiver has one."""
        if self._bytes_per_s:
            begin = max(self._free_at, time.monotonic() - _BURST_S)
            self._free_at = begin + num_bytes / self._bytes_per_s
            if (delay := self._free_at - time.monotonic()) > 0:
                await asyncio.sleep(delay)
        self.num_bytes_sent += num_bytes
        self.num_bytes_by_transport[transport] += num_bytes


log = structlog.get_logger()

# -- frames, keys and waits of both ends ----------------------------------------------------------------------------------

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


# -- the sending end ------------------------------------------------------------------------------------------------------

BULK_FROM_BYTES = 4 << 20  # below it, opening another connection takes longer than it saves

TICKET_S = 60.0  # lifetime of a ticket without use
MOST_TICKETS = 4096  # the oldest unused goes first

_HIGH_WATER = 2 * WINDOW  # frames per receiver inside ZeroMQ, also for receivers that exceed WINDOW
_FULL_S = 0.002  # retry interval when the queue is full
_DRAIN_AT_ONCE = 64  # requests read before others get their turn on the event loop


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


@dataclass(slots=True)
class _Session:
    """One receiver with one ticket. A task serves its requests in order."""

    peer: bytes
    ticket: bytes
    reader: PayloadReader
    requests: asyncio.Queue[BulkRequest] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None


class BulkServer:
    """``start``, hand out ``tickets`` and ``public_key``, ``stop``. Owns its socket and its sessions.

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
        self._context: zmq.Context[Socket] | None = None
        self._socket: Socket | None = None
        self._sessions: dict[tuple[bytes, bytes], _Session] = {}

    async def start(self) -> None:
        """Bind a free port. Raises ``OSError`` (``zmq.ZMQError``) when that fails."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_mandatory = True  # a receiver that left is an error, not silence
        socket.maxmsgsize = REQUEST_BYTES  # a peer that sends more is disconnected by ZeroMQ
        socket.sndhwm = _HIGH_WATER
        socket.ipv6 = ":" in self._host
        if self._secret_key:
            socket.curve_server = True
            socket.curve_secretkey = self._secret_key
            socket.maxmsgsize = HANDSHAKE_BYTES
        port = socket.bind_to_random_port(f"tcp://{bracketed(self._host)}")
        self._socket = socket
        self.endpoint = f"tcp://{address(self._host, port)}"
        asyncio.get_running_loop().add_reader(descriptor(socket), self._drain)
        log.info("bulk.listening", endpoint=self.endpoint)

    async def stop(self) -> None:
        """End every session and close. Stopping twice does no harm."""
        if self._socket is None or self._context is None:
            return
        asyncio.get_running_loop().remove_reader(descriptor(self._socket))
        tasks = [session.task for session in self._sessions.values() if session.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        socket, self._socket = self._socket, None
        socket.close(linger=0)
        self._context.term()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def _drain(self) -> None:
        """Read the pending requests. The descriptor signals once, so this is also called after every send."""
        for _ in range(_DRAIN_AT_ONCE):
            if self._socket is None or not has_input(self._socket):
                return
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                if len(frames) != 1:
                    raise InvalidRequestError(f"{len(frames)} frames where one is a request")
                self._take(peer, BulkRequest.decode(frames[0]))
            except RollmillError as error:
                self.num_refused += 1
                if (untold := self._repeats.tell(error.reason)) is not None:
                    log.info("bulk.refused", reason=error.reason, error=error.message, **untold)
                self._answer_error(peer, error)
        asyncio.get_running_loop().call_soon(self._drain)

    def _take(self, peer: bytes, request: BulkRequest) -> None:
        session = self._sessions.get((peer, request.ticket))
        if request.operation is Operation.BYE:  # the ticket stays: the receiver may fetch another range, now or later
            if session is not None and session.task is not None:
                session.task.cancel()
            return
        ticket = self.tickets.use(request.ticket)
        if session is None:
            session = _Session(peer=peer, ticket=request.ticket, reader=ticket.source.open(ticket.payload_id))
            self._sessions[peer, request.ticket] = session
            task = asyncio.get_running_loop().create_task(self._serve(session), name="bulk.session")
            # Not a ``finally`` of the task: a task that is cancelled before its first step never runs that block.
            task.add_done_callback(lambda ended: self._end(session, ended))
            session.task = task
        if request.offset + request.size_bytes > session.reader.size_bytes:
            raise OffsetOutOfRangeError(
                f"bytes {request.offset} to {request.offset + request.size_bytes} of a payload of "
                f"{session.reader.size_bytes} bytes"
            )
        if not 0 < request.size_bytes <= CHUNK_BYTES or session.requests.qsize() >= WINDOW:
            raise InvalidRequestError(f"too many open requests: at most {WINDOW}, each of up to {CHUNK_BYTES} bytes")
        session.requests.put_nowait(request)

    async def _serve(self, session: _Session) -> None:
        try:
            while True:
                async with deadline(self._idle_s, "the next request of a bulk receiver"):
                    request = await session.requests.get()
                await self._send(session, request)
        except DeadlineError as error:
            log.info("bulk.session_idle", error=error.message)
            self._answer_error(session.peer, error)
        except RollmillError as error:
            log.warning("bulk.session_failed", reason=error.reason, error=error.message)
            self._answer_error(session.peer, error)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            log.info("bulk.receiver_left")

    def _end(self, session: _Session, task: asyncio.Task[None]) -> None:
        del self._sessions[session.peer, session.ticket]
        session.reader.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bulk.session_crashed", exc_info=error)

    async def _send(self, session: _Session, request: BulkRequest) -> None:
        offset, end = request.offset, request.offset + request.size_bytes
        while offset < end:
            data = await session.reader.read(offset, min(end - offset, self._budget.chunk_bytes))
            await self._budget.take(len(data), "bulk")
            async with deadline(self._idle_s, "room for the next frame of a bulk receiver"):
                # Polled: ZeroMQ does not signal when one of many receivers has room.
                while not self._put(session.peer, encode_answer(Kind.DATA, offset), data):  # noqa: ASYNC110
                    await asyncio.sleep(_FULL_S)
            offset += len(data)
            self._drain()

    def _put(self, peer: bytes, head: bytes, data: memoryview | bytes) -> bool:
        """Hand a message to ZeroMQ; False when this receiver's queue is full."""
        assert self._socket is not None, "sessions end before the socket"
        try:
            self._socket.send_multipart([peer, head, data], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _answer_error(self, peer: bytes, error: RollmillError) -> None:
        try:
            self._put(peer, encode_answer(Kind.ERROR, 0), f"{error.reason}: {error.message}".encode())
        except zmq.ZMQError as failure:
            if failure.errno != errno.EHOSTUNREACH:
                raise
            log.debug("bulk.receiver_left")
