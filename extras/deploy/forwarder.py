"""Forwards connections from this machine to a port of the pod's loopback: ``python -m extras.deploy.forwarder
PORT``.

Without keys services bind loopback, and a published port arrives at the pod's other address. This process listens
there, at the same port, and passes bytes on. The forwarder takes connections from the gateway of the pod's network, the
source of the host's connections, and from the pod itself; connections of other machines and other containers are
refused (ADR 19). The bytes are not read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import struct
import sys
from pathlib import Path

import structlog

from services.cli.plan import address_of_node_0
from services.common.errors import RollmillError
from services.common.system.machine import LOOPBACK
from services.common.telemetry.logs import configure

log = structlog.get_logger()

ROUTES = Path("/proc/net/route")
MAX_CONNECTIONS = 64
CONNECT_S = 5.0
_CHUNK_BYTES = 64 * 1024


def gateways(routes: str) -> set[str]:
    """Addresses of the default gateways in the text of ``/proc/net/route``.

    >>> sorted(gateways("Iface Destination Gateway Flags\\neth0 00000000 0100590A 0003\\neth0 0000590A 00000000 0001\\n"))
    ['10.89.0.1']
    """
    rows = [line.split() for line in routes.splitlines()[1:]]
    found = [row[2] for row in rows if len(row) > 2 and row[1] == "00000000" and row[2] != "00000000"]
    return {socket.inet_ntoa(struct.pack("=I", int(address, 16))) for address in found}


async def listen(host: str, port: int, target: tuple[str, int], callers: set[str]) -> asyncio.Server:
    """Passes connections on to ``target``: those of ``callers``, at most ``MAX_CONNECTIONS`` at once. Raises ``OSError`` for
    an address that is taken or not here."""
    busy, told = asyncio.Semaphore(MAX_CONNECTIONS), set[str]()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = writer.get_extra_info("peername")[0]
        try:
            if caller not in callers or busy.locked():
                if caller not in told and len(told) < MAX_CONNECTIONS:
                    told.add(caller)
                    log.warning("forwarder.refused", caller=caller, too_many=caller in callers)
                return
            async with busy:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                async with asyncio.timeout(CONNECT_S):
                    there, out = await asyncio.open_connection(*target, limit=_CHUNK_BYTES)
                try:
                    # No deadline: `rollmill watch` stays connected as long as the run lasts.
                    await asyncio.gather(_pass(reader, out), _pass(there, writer))
                finally:
                    out.close()
        except (OSError, TimeoutError):  # the orchestrator is not up yet: the caller comes again
            return
        finally:
            writer.close()

    return await asyncio.start_server(accept, host, port, limit=_CHUNK_BYTES)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side has said all; then the other hears that, and may still answer."""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _serve(here: str, port: int, callers: set[str]) -> None:
    server = await listen(here, port, (LOOPBACK, port), callers)
    log.info("forwarder.listening", address=f"{here}:{port}", callers=sorted(callers))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with server:
        await stop.wait()  # no deadline: it serves until it is told to stop


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m extras.deploy.forwarder", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("port", type=int, help="the port, on the pod's loopback and on its other address")
    port = parser.parse_args().port
    configure("forwarder")
    try:
        here = address_of_node_0({})
        asyncio.run(_serve(here, port, {here, *gateways(ROUTES.read_text())}))
    except (OSError, RollmillError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
