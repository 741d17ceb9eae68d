"""The forwarder: bytes of this machine arrive and are answered; connections of others are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.cli.deploy.forwarder import MAX_CONNECTIONS, gateways, listen
from services.common.system.machine import LOOPBACK, free_ports
from tests.waiting import WAIT_S

HERE = "127.0.0.9"  # stands for the pod's other address


@asynccontextmanager
async def forwarded(callers: set[str], *, answering: bool = True) -> AsyncIterator[int]:
    """A port at ``HERE`` that leads to an echo at the same port of loopback, which ends when its caller has said all."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    (port,) = free_ports(1, [LOOPBACK, HERE])
    target = await asyncio.start_server(echo, LOOPBACK, port) if answering else None
    server = await listen(HERE, port, (LOOPBACK, port), callers)
    try:
        yield port
    finally:
        server.close()
        if target is not None:
            target.close()


async def said_back(port: int, text: bytes, source: str) -> bytes:
    reader, writer = await asyncio.open_connection(HERE, port, local_addr=(source, 0))
    try:
        writer.write(text)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), WAIT_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_bytes_of_a_caller_from_this_machine_arrive_and_are_answered() -> None:
    text = bytes(range(256)) * 4096  # more than one buffer
    async with forwarded({"127.0.0.2"}) as port:
        assert await said_back(port, text, "127.0.0.2") == text


async def test_a_caller_from_elsewhere_is_hung_up_on() -> None:
    async with forwarded({"127.0.0.2"}) as port:
        assert await said_back(port, b"hello", "127.0.0.3") == b""
        assert await said_back(port, b"hello", "127.0.0.2") == b"hello"


async def test_a_caller_is_hung_up_on_while_the_orchestrator_is_not_there() -> None:
    async with forwarded({"127.0.0.2"}, answering=False) as port:
        assert await said_back(port, b"hello", "127.0.0.2") == b""


async def test_there_are_only_so_many_connections_at_once_and_one_that_ends_makes_room() -> None:
    async with forwarded({LOOPBACK}) as port:
        held = [await asyncio.open_connection(HERE, port, local_addr=(LOOPBACK, 0)) for _ in range(MAX_CONNECTIONS)]
        await asyncio.wait_for(_until_refused(port), WAIT_S)
        for _, writer in held:
            writer.close()
        await asyncio.wait_for(_until_answered(port), WAIT_S)


async def _until_refused(port: int) -> None:
    while await said_back(port, b"hello", LOOPBACK):
        pass


async def _until_answered(port: int) -> None:
    while await said_back(port, b"hello", LOOPBACK) != b"hello":
        await asyncio.sleep(0.01)


def test_the_default_gateway_is_read_from_the_routes() -> None:
    routes = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010012AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t000012AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    )
    assert gateways(routes) == {"172.18.0.1"}
    assert gateways("Iface Destination Gateway Flags\n") == set()
