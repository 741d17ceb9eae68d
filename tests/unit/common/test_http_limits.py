"""HTTP clients that send no request, or send byte by byte; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from services.common import http
from services.common.errors import ConfigError
from services.common.http import Listener, json_answer
from tests.waiting import WAIT_S, until

JSON = {"Content-Type": "application/json"}
HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    monkeypatch.setattr(http, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(http, "BODY_S", 0.5)
    monkeypatch.setattr(http, "LOOK_S", 0.1)

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
        aiohttp.ClientSession(headers=JSON) as session,
        session.post(f"http://127.0.0.1:{listener.port}/echo", data=body) as answer,
    ):
        return answer.status, answer


async def said(listener: Listener, data: bytes) -> bytes:
    """The answer to these bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(data)
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
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
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    await closed(writer)  # the server would hang up later: it lingers for a client that still sends


async def test_idle_connections_do_not_keep_others_out(listener: Listener) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(200)]
    assert (await ask(listener))[0] == 200
    for reader, writer in idle:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                assert await reader.read() == b""
        await closed(writer)


async def test_a_body_that_is_too_large_is_refused(listener: Listener) -> None:
    assert (await ask(listener, b"x" * 2000))[0] == 413


async def test_connections_of_an_address_are_bounded_and_those_with_a_request_stay(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(http, "BODY_S", 30.0)
    opened = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(10)]
    for reader, writer in opened:
        writer.write(HEAD + b"Content-Length: 1\r\n\r\n1")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    busy_reader, busy_writer = opened[0]
    await busy_reader.readuntil(b"}")
    busy_writer.write(HEAD + b"Content-Length: 2\r\n\r\n1")
    await until(lambda: listener._slow_clients._asking, "the request runs")
    listener._slow_clients._most = 5  # from here on: each of the ten has had its answer
    await until(lambda: len(listener._slow_clients._connections()) <= 5)
    busy_writer.write(b"2")
    assert (await busy_reader.readline()).startswith(b"HTTP/1.1 200"), "a request that runs is answered"
    assert (await ask(listener))[0] == 200
    for _, writer in opened:
        await closed(writer)


def test_the_bound_leaves_half_of_the_files_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1024, 512), (1 << 20, http.CONNECTIONS), (resource.RLIM_INFINITY, http.CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert http.most_connections() == most


async def test_a_taken_port_is_told_with_the_setting_of_another(listener: Listener) -> None:
    second = Listener(
        web.Application(),
        "127.0.0.1",
        listener.port,
        name="page",
        setting="--port",
        group="judge",
        leaving_cancels=True,
    )
    with pytest.raises(ConfigError, match=r"the port is in use; .* write another in --port \(0 takes a free one\)$"):
        await second.start()
    await second.stop()
