"""Authenticates and authorises HTTP requests by group of routes, before a request's body is read."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web

from services.common.errors import AccessError, PermissionDeniedError, RollmillError
from services.common.http.origin import Handler, Refuse, json_answer
from services.common.security.caller import caller
from services.common.security.identity import Identity
from services.common.telemetry.logs import Repeats

log = structlog.get_logger()

_BASIC = "Basic "
Shown = Callable[[web.Request], str | None]


def authorization(request: web.Request) -> str | None:
    """The header of a client: ``Authorization: Bearer TOKEN``."""
    return request.headers.get("Authorization")


def plainly(request: web.BaseRequest, error: RollmillError, status: int) -> web.StreamResponse:
    """A refusal as ``{"detail": ...}``, as the judge and the task server write theirs."""
    return json_answer({"detail": error.message}, status)


def password(request: web.Request) -> str | None:
    """The token of a person at a browser, which asks for a name and a password and sends ``Authorization: Basic``; the
    password is the token, and the name is not looked at. Else the header of a client."""
    given = authorization(request)
    if given is None or given[: len(_BASIC)].lower() != _BASIC.lower():
        return given
    try:
        name_and_token = base64.b64decode(given[len(_BASIC) :].strip(), validate=True).decode()
    except ValueError:
        return given  # malformed, which the gatekeeper tells
    return f"Bearer {name_and_token.partition(':')[2]}"


def authenticated(who: Identity, group: str, refuse: Refuse, shown: Shown, scheme: str = "Bearer") -> Any:
    """A middleware: 401 for unknown callers, 403 for callers whose role may not use this group of routes
    (``permissions.HTTP``). ``scheme`` is what the answer 401 asks for."""
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
            answer = refuse(request, error, status)
            if status == 401:
                answer.headers["WWW-Authenticate"] = scheme
            return answer
        caller.set(found)  # each connection has a task of its own, and one request at a time
        return await handler(request)

    return middleware


def _certificate(request: web.Request) -> bytes | None:
    connection = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    return connection.getpeercert(binary_form=True) if connection is not None else None
