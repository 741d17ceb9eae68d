"""Requests that a page in a browser can cause, or that can be read in two ways, as bytes; and the callers to refuse.

An attempt is refused by a status of the listener's checks. Each is sent with everything else that a right caller shows,
so that the fault alone can be the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

REFUSALS = (400, 403, 405, 415, 421)
_CALL_S = 5.0
_BODY = b'{"type": "python", "solution": "print(1)", "name": "household_toy", "index": 1, "messages": []}'
_FOREIGN = (
    "evil.test",
    "127.0.0.1.evil.test",
    "0.0.0.0",
    "127.1",
    "[::ffff:127.0.0.1]",
    "localhost.",
    "localhost@evil.test",
)
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; ``name`` is its fault, empty for one without."""

    name: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    def encode(self, token: str | None) -> bytes:
        shown = (("Authorization", f"Bearer {token}"),) if token is not None else ()
        size = (("Content-Length", str(len(self.body))),) if self.method == "POST" else ()
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*self.headers, *shown, *size))
        return f"{self.method} {self.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + self.body


def faulty(method: str, path: str, host: str, *, any_host: bool) -> Iterator[Request]:
    """Every fault at a route; ``any_host``: the server has keys, and serves any Host."""
    body = _BODY if method == "POST" else b""
    own = _JSON if body else {}

    def made(name: str, added: dict[str, str], target: str = path, verb: str = method, given: bytes = body) -> Request:
        headers = {"Host": host, **own, **added}
        return Request(name=name, method=verb, target=target, headers=tuple(headers.items()), body=given)

    if not any_host:
        for foreign in _FOREIGN:
            yield made("foreign host", {"Host": foreign})
        yield made("rebinding", {"Host": "evil.test", "Origin": "http://evil.test", "Sec-Fetch-Site": "same-origin"})
    for origin in ("http://evil.test", "null", f"http://{host}", "https://localhost", ""):
        yield made("origin", {"Origin": origin})
    for site in ("cross-site", "same-site"):
        yield made("another site", {"Sec-Fetch-Site": site})
    yield made("two hosts", {"Host": f"{host}\r\nHost: evil.test"})
    for target in (f"http://{host}{path}", f"//evil.test{path}"):
        yield made("target", {}, target=target)
    yield made(
        "preflight", {"Origin": "http://evil.test", "Access-Control-Request-Method": method}, verb="OPTIONS", given=b""
    )
    yield made("options", {}, verb="OPTIONS", given=b"")
    yield made("websocket", {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "eA=="})
    if body:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"):
            yield made("type", {"Content-Type": kind})
        yield made("type", {"Content-Type": "application/json\r\nContent-Type: text/plain"})
        yield made("encoding", {"Content-Encoding": "gzip"})


def faultless(method: str, path: str, host: str) -> Request:
    """The same without a fault; its body may still be invalid for the route."""
    headers = {"Host": host, **(_JSON if method == "POST" else {})}
    return Request(
        name="", method=method, target=path, headers=tuple(headers.items()), body=b"{}" if method == "POST" else b""
    )


async def send(address: str, request: Request, context: ssl.SSLContext | None, token: str | None) -> tuple[bool, str]:
    """(refused, answer)."""
    host, _, port = address.rpartition(":")
    name = host if context is not None else None
    async with asyncio.timeout(_CALL_S):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
        try:
            writer.write(request.encode(token))
            status = int((await reader.readline()).split()[1])
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
    return status in REFUSALS, f"status {status}"
