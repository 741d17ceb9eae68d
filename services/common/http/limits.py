"""Limits of one address at an HTTP server: connections, and time to send a request.

All of loopback is one address: its limit is above the sum of the agents and judges of a machine.

The size of a body is the application's ``client_max_size``, that of headers aiohttp's own 8 KiB a line. aiohttp waits
for ever for a client that has connected and sends no request, or its headers byte by byte; ``SlowClients`` does not.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from typing import Any

import structlog
from aiohttp import web

from services.common.http.origin import Handler
from services.common.net.hosts import peer_of_host
from services.common.rpc.limits import HANDSHAKE_S, MOST_CONNECTIONS

log = structlog.get_logger()

# Of one address, those included that wait between two requests: an agent loop for each rollout has one.
CONNECTIONS = 8192
BODY_S = 120.0  # for a body to come; the largest is some hundred MiB
LOOK_S = 1.0


def body_in_time() -> Any:
    """A middleware: 408 for a body that does not arrive. Innermost, so that refused requests do not wait for a body."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.can_read_body:
            try:
                async with asyncio.timeout(BODY_S):
                    await request.read()  # aiohttp keeps it for the handler
            except TimeoutError:
                raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None
        return await handler(request)

    return middleware


def most_connections() -> int:
    """How many connections one address may hold: never more than half of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)


class SlowClients:
    """Hangs up on connections that do not make their first request in time, and on those that are too many."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self._since: dict[Any, float] = {}  # silent connections, first seen when
        self._spoken: set[Any] = set()
        self._asking: Counter[Any] = Counter()  # requests that run, by connection
        self._most = most_connections()

    def heard(self) -> Any:
        """A middleware that records clients with a complete request, and clients that wait for an answer. Outermost."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._spoken.add(connection)
            self._asking[connection] += 1
            try:
                return await handler(request)
            finally:
                self._asking[connection] -= 1
                if not self._asking[connection]:
                    del self._asking[connection]

        return middleware

    async def watch(self) -> None:
        """Look once in ``LOOK_S``. Ends by cancellation."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())

    def _connections(self) -> list[Any]:
        server = self._runner.server
        return list(server.connections) if server is not None else []

    def look(self, now: float) -> None:
        connections = self._connections()
        self._spoken.intersection_update(connections)
        silent = [each for each in connections if each not in self._spoken]
        self._since = {each: self._since.get(each, now) for each in silent}
        too_many = len(connections) - MOST_CONNECTIONS
        for number, each in enumerate(silent):
            silent_s = now - self._since[each]
            if silent_s > HANDSHAKE_S or number < too_many:
                _hang_up(each, why="silent")
        for each in self._over_the_limit_of_a_peer(connections):
            _hang_up(each, why="too_many")

    def _over_the_limit_of_a_peer(self, connections: list[Any]) -> list[Any]:
        """The connections of an address beyond its limit: first those without any request, then idle ones.

        One with a request that runs is left.
        """
        if len(connections) <= self._most:
            return []
        peers = {each: _peer(each) for each in connections}
        over = {peer: count - self._most for peer, count in Counter(peers.values()).items() if count > self._most}
        found = []
        for each in sorted(connections, key=self._spoken.__contains__):
            if over.get(peers[each], 0) > 0 and each not in self._asking:
                over[peers[each]] -= 1
                found.append(each)
        return found


def _peer(connection: Any) -> str:
    address = connection.transport.get_extra_info("peername") if connection.transport is not None else None
    return peer_of_host(str(address[0])) if address else ""


def _hang_up(connection: Any, why: str) -> None:
    log.debug("http.hung_up", why=why)
    connection.force_close()
    if connection.transport is not None:
        connection.transport.abort()
