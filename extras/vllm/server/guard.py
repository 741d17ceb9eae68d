"""Requires the server's key on every route but ``/health``: vLLM's own check leaves out the routes that control the engine.

Middleware for vLLM's HTTP server, loaded by its name. Other users of the machine reach the port on loopback.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "ROLLMILL_SERVER_KEY"  # the variable in which the launcher gives the key
OPEN_PATH = "/health"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyRequired:
    """Answers 401 without ``Authorization: Bearer KEY``; refuses websockets."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or scope.get("path") == OPEN_PATH or (kind == "http" and self._knows(scope)):
            await self._app(scope, receive, send)
        elif kind == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"the key of this server is missing"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)
