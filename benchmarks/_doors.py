"""Attempts to get in, one per (door, visitor), and whether the door held. Knows the forms of a refusal, but no service.

A door is an RPC, an HTTP route or the bulk socket; a visitor is a set of credentials. An attempt is *refused* only by a
refusal: UNAUTHENTICATED or PERMISSION_DENIED, 401 or 403 of the access check, a handshake or a connection that fails. A
time-out, or any other answer, means that the visitor was in.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import zmq
import zmq.asyncio

from services.common.transfer.bulk import TICKET_BYTES, BulkRequest, Kind, Operation, decode_answer, speak_to

REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)
_CALL_S = 3.0
_STREAM_S = 1.0  # of one that is let in and has nothing to say
_BULK_S = 1.0

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Tally:
    """The outcomes of the attempts."""

    tried: Counter[str] = field(default_factory=Counter)  # by visitor
    refused: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)  # attempts that should have been refused
    kept_out: list[str] = field(default_factory=list)  # the right role, refused
    admitted: int = 0
    expected: int = 0

    def intruder(self, visitor: str, door: str, told: str, refused: bool) -> None:
        self.tried[visitor] += 1
        self.refused[visitor] += refused
        if not refused:
            self.let_in.append(f"{visitor} at {door}: {told}")

    def guest(self, door: str, told: str, refused: bool) -> None:
        self.expected += 1
        self.admitted += not refused
        if refused:
            self.kept_out.append(f"{door}: {told}")


@dataclass(frozen=True, slots=True)
class Door:
    """One RPC."""

    path: str
    streams_in: bool
    streams_out: bool


async def knock(
    channel: grpc.aio.Channel, door: Door, metadata: Metadata = (), patience: float = 1.0
) -> tuple[bool, str]:
    """Call with an empty message: (refused, answer). ``patience``: times the usual deadline."""
    deadline = patience * (_STREAM_S if door.streams_in or door.streams_out else _CALL_S)
    try:
        if door.streams_out:
            if door.streams_in:  # nothing is written: a refusal in the middle of it would be told as another error
                answers: Any = channel.stream_stream(door.path)(timeout=deadline, metadata=metadata)
            else:
                answers = channel.unary_stream(door.path)(b"", timeout=deadline, metadata=metadata)
            await answers.read()
            answers.cancel()
        else:
            await channel.unary_unary(door.path)(b"", timeout=deadline, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code() in REFUSALS, f"{error.code().name} {error.details()}"
    return False, "an answer"


async def visit(url: str, method: str, context: ssl.SSLContext | None, token: str | None) -> tuple[bool, str]:
    """One HTTP request with an empty body."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    connector = aiohttp.TCPConnector(ssl=context if context is not None else False)
    timeout = aiohttp.ClientTimeout(total=_CALL_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, url, headers=headers) as answer,
        ):
            # Routes have 401s of their own; the access check says what it wants to see.
            refused = answer.status == 403 or (answer.status == 401 and "WWW-Authenticate" in answer.headers)
            return refused, f"status {answer.status}"
    except (aiohttp.ClientSSLError, aiohttp.ClientConnectionError) as error:
        return True, f"{type(error).__name__}: {error}"


async def ask_bulk(endpoint: str, server_key: bytes | None, ticket: bytes | None) -> tuple[bool, str]:
    """One request for bytes over ZeroMQ. Silence is a refusal here: CURVE does not answer unknown keys."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        if server_key is not None:
            speak_to(socket, server_key)
        socket.connect(endpoint)
        request = BulkRequest(ticket=ticket or bytes(TICKET_BYTES), operation=Operation.GET, size_bytes=1024)
        await socket.send(request.encode())
        if not await socket.poll(int(_BULK_S * 1000)):
            return True, "silence"
        head, *_ = await socket.recv_multipart()
        kind, _ = decode_answer(head)
        return kind is Kind.ERROR, kind.name
    finally:
        socket.close(0)
        context.term()


def summary(tally: Tally, shown: int = 20) -> dict[str, object]:
    """For the report: counts and failures."""
    return {
        "tried": tally.tried.total(),
        "refused": tally.refused.total(),
        "tried_by_visitor": dict(tally.tried),
        "admitted": tally.admitted,
        "admitted_expected": tally.expected,
        "let_in": _few(tally.let_in, shown),
        "kept_out": _few(tally.kept_out, shown),
    }


def _few(lines: Sequence[str], most: int) -> Iterable[str]:
    return list(lines[:most])
