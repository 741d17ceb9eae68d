"""Routes of Code Judge over aiohttp: single runs are interactive, and so are batches of one, as rollouts send their
tool calls; larger batches are not.

    GET  /ping, /status
    POST /run, /judge, each also /batch and /long-batch

A client that leaves takes its jobs with it. A running long batch sends a space at intervals, which JSON allows before a
value, so that no proxy between client and gateway closes the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import orjson
from aiohttp import web

from services.common.aio import ended
from services.common.config.processes.envgateway import HttpConfig
from services.common.http.listener import Listener
from services.common.http.origin import json_answer
from services.common.telemetry.gateway_queue import Lane
from services.common.text.encodable import encodable
from services.envgateway.http.schema import (
    BatchSubmission,
    UnreadableBodyError,
    batch_answer,
    read_batch,
    read_submission,
)
from services.envgateway.http.submissions import Submissions
from services.envgateway.queue.local import JobQueue, on_behalf_of

CLIENT_HEADER = "X-Client-Id"
_KEEP_ALIVE_S = 10.0
_LONG_BATCH_WAIT_S = 3600.0  # of one run, for a slot
_LARGE_BODY = 1 << 20  # bytes from which reading JSON leaves the event loop

Read = TypeVar("Read")


class HttpServer:
    """``start`` serves, ``stop`` ends. Raises ``ConfigError`` for a bind without keys, and for a taken port."""

    def __init__(self, config: HttpConfig, host: str, queue: JobQueue, submissions: Submissions) -> None:
        assert config.port is not None
        self._config = config
        self._queue = queue
        self._submissions = submissions
        application = web.Application(client_max_size=config.body_bytes)
        application.add_routes([web.get("/ping", self._ping), web.get("/status", self._status)])
        for name, with_output in (("run", True), ("judge", False)):
            application.add_routes(
                [
                    web.post(f"/{name}", self._single(with_output)),
                    web.post(f"/{name}/batch", self._batch(with_output)),
                    web.post(f"/{name}/long-batch", self._long_batch(with_output)),
                ]
            )
        self._listener = Listener(
            application, host, config.port,
            name="the HTTP interface", setting="envgateway.http.port", group="judge", leaving_cancels=True,
            reuse_port=config.reuse_port,
        )  # fmt: skip

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that is served."""
        return self._listener.routes

    async def start(self) -> int:
        """Returns the port."""
        return await self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    async def _ping(self, request: web.Request) -> web.Response:
        return json_answer("pong")

    async def _status(self, request: web.Request) -> web.Response:
        return json_answer({"queue": self._queue.num_waiting, "num_workers": self._queue.num_slots})

    def _single(self, with_output: bool) -> _Handler:
        async def handle(request: web.Request) -> web.Response:
            submission = await _read(request, read_submission)
            outcome = await self._submissions.run(submission, Lane.INTERACTIVE, self._config.queue_wait_s)
            return json_answer(outcome.shown(with_output))

        return _for_client(handle)

    def _batch(self, with_output: bool) -> _Handler:
        async def handle(request: web.Request) -> web.Response:
            batch = await _read(request, read_batch)
            outcomes = await self._submissions.run_all(batch.submissions, _lane(batch), self._config.queue_wait_s)
            return json_answer(batch_answer(batch.sub_id, [outcome.shown(with_output) for outcome in outcomes]))

        return _for_client(handle)

    def _long_batch(self, with_output: bool) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            batch = await _read(request, read_batch)
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            running = asyncio.ensure_future(
                self._submissions.run_all(batch.submissions, _lane(batch), _LONG_BATCH_WAIT_S)
            )
            try:
                while not (await asyncio.wait([running], timeout=_KEEP_ALIVE_S))[0]:
                    await response.write(b" ")
            finally:
                await ended(running)
            outcomes = [outcome.shown(with_output) for outcome in running.result()]
            await response.write_eof(orjson.dumps(encodable(batch_answer(batch.sub_id, outcomes))))
            return response

        return _for_client(handle)


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _for_client(handle: _Handler) -> _Handler:
    """Run the call for this client, or answer a body that cannot be read."""

    async def wrapped(request: web.Request) -> web.StreamResponse:
        with on_behalf_of(request.headers.get(CLIENT_HEADER) or f"http {request.remote}"):
            try:
                return await handle(request)
            except UnreadableBodyError as error:
                return json_answer({"detail": error.details}, status=422)

    return wrapped


def _lane(batch: BatchSubmission) -> Lane:
    return Lane.BATCH if len(batch.submissions) > 1 else Lane.INTERACTIVE


async def _read(request: web.Request, reader: Callable[[bytes], Read]) -> Read:
    body = await request.read()
    return await asyncio.to_thread(reader, body) if len(body) > _LARGE_BODY else reader(body)
