"""HTTP client with one request at a time per connection; says which failures mean that the server never saw the
request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from services.common.errors import InfrastructureError

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
