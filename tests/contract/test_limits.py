"""The resources that one peer may take from a server, over real gRPC and over raw sockets with invalid bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from services.common.errors import InvalidRequestError
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc import interceptors
from services.common.rpc.client import translated_errors
from services.common.rpc.server import Server
from services.common.security.identity import MOST_BYTES
from tests.contract.conftest import Served
from tests.contract.run_servicer import RunServicer, make_server
from tests.waiting import WAIT_S

ASK = status_pb2.GetStatusRequest()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x0a\xff", "cannot be parsed"),
        (b"\x0a\x02\xff\xfe", "cannot be parsed"),  # no UTF-8
        (b"\x9b\x06" * 30_000, "cannot be parsed"),  # groups in groups
        (b"\x0a\x80\x80\x04" + b"x" * 65_536, "65540 bytes; at most 65536"),
    ],
)
async def test_a_message_that_is_none_or_too_large_is_the_callers_mistake(
    served: Served, data: bytes, told: str
) -> None:
    call = served.connection.unary_unary("/rollmill.v1.RunService/StopRun")
    with pytest.raises(InvalidRequestError, match=told), translated_errors("the server"):
        await call(data, timeout=WAIT_S)


async def test_an_answer_that_is_too_large_is_told_in_words(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "MOST_BYTES", 10)
    with pytest.raises(InvalidRequestError, match="at most 10 are sent"), translated_errors("the server"):
        await status_pb2_grpc.StatusServiceStub(served.connection).GetStatus(ASK, timeout=WAIT_S)


async def test_what_no_method_takes_is_refused_before_it_is_read(served: Served) -> None:
    call = served.connection.unary_unary("/rollmill.v1.RunService/StopRun")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"x" * (MOST_BYTES + 1), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=WAIT_S, metadata=(("x-run-id", "x" * 60_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- connections that do not speak ---------------------------------------------------------------------------------------


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """A server that waits half a second for a handshake, and holds few connections."""
    monkeypatch.setattr(interceptors, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(interceptors, "MOST_CONNECTIONS", 150)
    server = make_server(RunServicer())
    await server.start()
    yield server
    await server.stop(grace_s=1.0)


async def connect(server: Server, first: bytes = b"") -> socket.socket:
    found = socket.socket()
    found.setblocking(False)
    await asyncio.get_running_loop().sock_connect(found, ("127.0.0.1", server.port))
    if first:
        await asyncio.get_running_loop().sock_sendall(found, first)
    return found


async def ended(found: socket.socket) -> bool:
    """Whether the server hangs up, within a generous time."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            while await asyncio.get_running_loop().sock_recv(found, 4096):
                pass
    return True


async def answers(server: Server) -> bool:
    async with grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as connection:
        await status_pb2_grpc.StatusServiceStub(connection).GetStatus(ASK, timeout=WAIT_S)
    return True


@pytest.mark.parametrize(
    "first", [b"", PREFACE[:10], PREFACE, PREFACE + EMPTY_SETTINGS, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
async def test_who_connects_and_does_not_speak_is_hung_up_on_and_disturbs_nobody(hasty: Server, first: bytes) -> None:
    silent = await connect(hasty, first)
    assert await answers(hasty)
    assert await ended(silent)
    silent.close()


async def test_half_a_frame_holds_nobody_up(hasty: Server) -> None:
    # A header frame that promises 16,000 bytes and brings four.
    half = await connect(hasty, PREFACE + SETTINGS + b"\x00\x3e\x80\x01\x04\x00\x00\x00\x01" + b"\x00" * 4)
    assert await answers(hasty)
    half.close()


def descriptors() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


async def test_two_hundred_idle_connections_leave_room_and_are_closed(hasty: Server) -> None:
    before = descriptors()
    idle = [await connect(hasty) for _ in range(200)]
    try:
        held = descriptors() - before - len(idle)  # by the server, which is in this process
        assert held <= 160, "more connections are held than the limit"
        assert all([await ended(one) for one in idle])
        assert await answers(hasty)
    finally:
        for one in idle:
            one.close()
