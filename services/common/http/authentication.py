"""Lets in who is allowed to use a group of routes, before a request's body is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web

from services.common.errors import AccessError, MillraceError, PermissionDeniedError
from services.common.http.answers import json_answer
from services.common.http.origin import Handler, Refuse
from services.common.repeats import Repeats
from services.common.security.caller import caller
from services.common.security.identity import Identity

log = structlog.get_logger()

Shown = Callable[[web.Request], str | None]


def authorization(request: web.Request) -> str | None:
    """What a client shows: the header ``Authorization: Bearer TOKEN``."""
    return request.headers.get("Authorization")


def plainly(error: MillraceError, status: int) -> web.StreamResponse:
    """A refusal as ``{"detail": ...}``, as the judge and the task server write theirs."""
    return json_answer({"detail": error.message}, status)


def authenticated(who: Identity, group: str, refuse: Refuse, shown: Shown) -> Any:
    """A middleware: 401 for who is not known, 403 for who may not use this group of routes (``permissions.HTTP``)."""
    from services.common.security.gatekeeper import Gatekeeper, permit  # and cryptography: for those with keys only

    gatekeeper = Gatekeeper(who)
    repeats = Repeats()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            found = gatekeeper.identify(shown(request), _certificate(request))
            permit(found, f"http:{group}")
        except AccessError as error:
            status = 403 if isinstance(error, PermissionDeniedError) else 401
            if (untold := repeats.tell(error.reason)) is not None:
                log.info(
                    "http.refused", group=group, path=request.path, reason=error.reason, error=error.message, **untold
                )
            answer = refuse(error, status)
            if status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        caller.set(found)  # each connection has a task of its own, and one request at a time
        return await handler(request)

    return middleware


def _certificate(request: web.Request) -> bytes | None:
    connection = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    return connection.getpeercert(binary_form=True) if connection is not None else None
