"""What one client may take from an HTTP server: requests a second and at once, and time to say what it wants.

The size of a body is the application's ``client_max_size``, that of headers aiohttp's own 8 KiB a line. aiohttp waits for ever
for a client that has connected and sends nothing, or its headers byte by byte; ``Patience`` does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web

from services.common.errors import CapacityError
from services.common.http.answers import json_answer
from services.common.rpc.limits import HANDSHAKE_S, MOST_CONNECTIONS, Limit
from services.common.rpc.rates import Rates
from services.common.security.caller import caller

log = structlog.get_logger()

# Of one client: an agent loop or a judge's batches.
REQUESTS = Limit(calls_per_s=5_000.0, burst=10_000, concurrent=4096)
BODY_S = 120.0  # for a body to come; the largest is some hundred MiB
LOOK_S = 1.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def rate_limited() -> Any:
    """A middleware: 429 with ``Retry-After`` for who asks too often, or too much at once. Comes after authentication."""
    rates = Rates()

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        known = caller.get()
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        client = f"{known.name}@{request.remote}" if known is not None else str(peer)
        try:
            with rates.call(client, "requests", REQUESTS):
                return await handler(request)
        except CapacityError as error:
            if error.metadata.get("limit", "").partition(".")[0] != "requests":
                raise  # the application's own
            answer = json_answer({"detail": error.message}, 429)
            answer.headers["Retry-After"] = str(max(1, round(error.retry_after_s or 1)))
            return answer

    return middleware


def body_in_time() -> Any:
    """A middleware: 408 for a body that does not come. Innermost: whoever is refused is not waited for."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.can_read_body:
            try:
                async with asyncio.timeout(BODY_S):
                    await request.read()  # aiohttp keeps it for the handler
            except TimeoutError:
                raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None
        return await handler(request)

    return middleware


class Patience:
    """Hangs up on connections that do not make their first request in time, and on those that are too many."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self._since: dict[Any, float] = {}  # silent connections, first seen when
        self._spoken: set[Any] = set()

    def heard(self) -> Any:
        """A middleware that notes who has made a request. Outermost."""

        @web.middleware
        async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
            self._spoken.add(request.protocol)
            return await handler(request)

        return middleware

    async def watch(self) -> None:
        """Look once in ``LOOK_S``. Ends by cancellation."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        server = self._runner.server
        connections = list(server.connections) if server is not None else []
        self._spoken.intersection_update(connections)
        silent = [each for each in connections if each not in self._spoken]
        self._since = {each: self._since.get(each, now) for each in silent}
        too_many = len(connections) - MOST_CONNECTIONS
        for number, each in enumerate(silent):
            silent_s = now - self._since[each]
            if silent_s > HANDSHAKE_S or number < too_many:
                log.debug("http.hung_up", silent_s=round(silent_s, 1))
                each.force_close()
                if each.transport is not None:
                    each.transport.abort()
