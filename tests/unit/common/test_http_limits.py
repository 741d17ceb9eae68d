"""HTTP clients that ask too often, send nothing, or send it byte by byte; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from services.common.http import limits
from services.common.http.answers import json_answer
from services.common.http.listener import Listener
from services.common.rpc.limits import Limit

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    monkeypatch.setattr(limits, "LOOK_S", 0.1)

    async def echo(request: web.Request) -> web.Response:
        return json_answer({"size": len(await request.read())})

    application = web.Application(client_max_size=1000)
    application.add_routes([web.post("/echo", echo)])
    found = Listener(application, "127.0.0.1", 0, name="echo", setting="echo.port", group="judge", leaving_cancels=True)
    await found.start()
    yield found
    await found.stop()


async def ask(listener: Listener, body: bytes = b"four") -> tuple[int, aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{listener.port}/echo", data=body) as answer,
    ):
        return answer.status, answer


async def said(listener: Listener, data: bytes) -> bytes:
    """What is answered to these bytes until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(data)
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            answer = await reader.read()
    await closed(writer)
    return answer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_who_sends_nothing_or_half_a_header_is_hung_up_on(listener: Listener) -> None:
    for data in (b"", b"PO", HEAD):
        assert await said(listener, data) == b""
    assert (await ask(listener))[0] == 200


async def test_a_body_that_does_not_come_is_not_waited_for(listener: Listener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(HEAD + b"Content-Length: 100\r\nConnection: close\r\n\r\nhalf")
    async with asyncio.timeout(20):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    await closed(writer)  # the server would hang up later: it lingers for a client that still sends


async def test_idle_connections_do_not_keep_others_out(listener: Listener) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(200)]
    assert (await ask(listener))[0] == 200
    for reader, writer in idle:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                assert await reader.read() == b""
        await closed(writer)


async def test_a_body_that_is_too_large_is_refused(listener: Listener) -> None:
    assert (await ask(listener, b"x" * 2000))[0] == 413


async def test_who_asks_too_often_is_told_when_to_come_back(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUESTS", Limit(calls_per_s=0.1, burst=2))
    async with aiohttp.ClientSession() as session:  # one connection: nobody vouches for its client

        async def status() -> tuple[int, str]:
            async with session.post(f"http://127.0.0.1:{listener.port}/echo", data=b"1") as answer:
                return answer.status, answer.headers.get("Retry-After", "")

        found = [await status() for _ in range(3)]
    assert [code for code, _ in found] == [200, 200, 429]
    assert int(found[-1][1]) >= 1
