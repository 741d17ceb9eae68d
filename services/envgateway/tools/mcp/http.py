"""A server over streamable HTTP: the package's transport, on a client that bounds an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from services.envgateway.tools.mcp.stdio import MAX_MESSAGE_BYTES

_CONNECT_S = 10.0
_READ_S = 60.0  # above the longest call; the caller's own limit ends a call that hangs


@asynccontextmanager
async def http_streams(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """The streams of messages for ``mcp.Client``."""
    transport = _Bounded(httpx2.AsyncHTTPTransport())
    timeout = httpx2.Timeout(_CONNECT_S, read=_READ_S)
    async with httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=transport) as client:
        async with streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams:
            yield streams


class _Bounded(httpx2.AsyncBaseTransport):  # type: ignore[misc]
    """Refuses the rest of an answer to a POST above ``MAX_MESSAGE_BYTES``: the package reads it whole."""

    def __init__(self, inner: httpx2.AsyncHTTPTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if request.method == "POST":
            response.stream = _BoundedStream(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):  # type: ignore[misc]
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for part in self._inner:
            seen += len(part)
            if seen > MAX_MESSAGE_BYTES:
                raise httpx2.ReadError(f"an answer of more than {MAX_MESSAGE_BYTES >> 20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
