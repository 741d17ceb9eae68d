"""HTTP client with one request at a time per connection; says which failures mean that the server never saw the
request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import structlog

from services.common.aio import backoff
from services.common.errors import InfrastructureError
from services.envgateway.envs.base import EpisodeLostError

log = structlog.get_logger()


_SHOWN_CHARS = 300


class UnansweredError(Exception):
    """The request was sent, and no answer came: the server may have carried out the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON; None for plain text."""
        try:
            return orjson.loads(self.text)
        except orjson.JSONDecodeError:
            return None

    @property
    def detail(self) -> str:
        """The error's text: FastAPI's ``detail``, the detail of the server behind a pool, or the body."""
        body = self.json
        while isinstance(body, dict):
            inner = next((body[key] for key in ("upstream_detail", "detail", "message") if key in body), None)
            if inner is None:
                break
            body = inner
        return (body if isinstance(body, str) else self.text).strip()[:_SHOWN_CHARS]


class HttpConnection:
    """HTTP client of one server. Each connection serves one request: these servers close idle ones without notice, and
    a request that meets the closing of its connection may or may not have been carried out."""

    def __init__(self, url: str, connections: int) -> None:
        self.url = url.rstrip("/")
        self._places = asyncio.Semaphore(connections)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float, **query: str) -> Reply:
        return await self._request("GET", path, timeout_s, params=query)

    async def post(self, path: str, timeout_s: float, body: object = None) -> Reply:
        return await self._request("POST", path, timeout_s, json=body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, path: str, **query: str) -> Reply:
        """Send a read-only request. Raises ``InfrastructureError`` when no answer comes."""
        try:
            return await self.get(path, _QUESTION_S, **query)
        except UnansweredError as error:
            raise InfrastructureError(str(error)) from error

    async def start(self, path: str, timeout_s: float, body: object) -> Reply:
        """Raises ``InfrastructureError``. The server collects a session whose start we did not hear of."""
        try:
            return await self.post(path, timeout_s, body)
        except UnansweredError as error:
            raise InfrastructureError(f"{error}: if it began, the server collects it") from error

    async def take_turn(self, path: str, timeout_s: float, body: object, is_busy: Callable[[Reply], bool]) -> Reply:
        """Ask until the server takes the turn, within the time of one.

        Raises:
            InfrastructureError: the server did not take the turn; the caller may repeat the turn.
            EpisodeLostError: the server may have taken the turn, but does not answer.
        """
        until = time.monotonic() + timeout_s
        left_s = timeout_s
        for pause_s in backoff(first_s=0.2, longest_s=2.0):
            try:
                reply = await self.post(path, left_s, body)
            except UnansweredError as error:
                raise EpisodeLostError(f"{error}: the turn may have been taken") from error
            if not is_busy(reply):
                return reply
            left_s = until - time.monotonic() - pause_s
            if left_s < _LEAST_S:
                break
            await asyncio.sleep(pause_s)
        raise InfrastructureError(f"{self.url} was busy with this session for {timeout_s:g} s")

    async def cancel(self, path: str, body: object) -> None:
        """End a session early. Failures are logged: the server collects sessions that remain."""
        try:
            reply = await self.post(path, _CANCEL_S, body)
        except (UnansweredError, InfrastructureError) as error:
            log.warning("agentbench.cancel_failed", error=str(error))
            return
        if reply.status != 200:
            log.info("agentbench.not_cancelled", status=reply.status, detail=reply.detail)

    async def _request(self, method: str, path: str, timeout_s: float, **content: Any) -> Reply:
        """Raises ``UnansweredError``, and ``InfrastructureError`` when the server cannot have seen the request."""
        what = f"{method} {self.url}/{path}"
        sent = False
        try:
            async with asyncio.timeout(timeout_s), self._places:
                sent = True
                async with self._opened().request(method, f"{self.url}/{path}", **content) as response:
                    return Reply(response.status, await response.text(errors="replace"))
        except TimeoutError:
            if not sent:
                raise InfrastructureError(f"{what}: no connection came free within {timeout_s:g} s") from None
            raise UnansweredError(f"{what}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise InfrastructureError(f"{what}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnansweredError(f"{what}: {type(error).__name__}: {error}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session


_QUESTION_S = 10.0  # requests that start no session
_LEAST_S = 0.1  # with less, a server could take the turn and its answer come too late
_CANCEL_S = 4.5  # less than the gateway waits for an environment to close
