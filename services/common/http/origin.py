"""Refuses requests that a web page may have made in a browser on this machine, and requests that can be read in two ways.

A page of any site can send requests to loopback from its visitor's browser. Without keys that would be enough to run
programs here. Four facts tell a page from a program:

    Host             names the page's own site where its name was bound anew to 127.0.0.1 (DNS rebinding)
    Origin           comes with every POST, fetch and WebSocket of a page; programs send none
    Sec-Fetch-Site   comes with everything else that a page loads from a loopback address (img, script, iframe)
    Content-Type     a page can send three types, and no type, without asking first; JSON is none of them

No answer gives a CORS header and OPTIONS is refused, so no page is ever permitted to ask. Checks come before
authentication and before anything is read of the body. With keys any Host is served: TLS and the token decide there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import orjson
import structlog
from aiohttp import web

from services.common.errors import ConfigError, InvalidRequestError, PermissionDeniedError, RollmillError
from services.common.telemetry.logs import Repeats
from services.common.text.encodable import encodable

log = structlog.get_logger()


HOSTS_VARIABLE = "ROLLMILL_HTTP_HOSTS"
"""Names, separated by commas, under which HTTP clients may ask a process without keys, beside loopback's own: such as
`host.docker.internal` for clients in containers that reach the host's loopback. Any page whose site has one of these
names is served like a program."""

ANSWER_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""Headers of every answer: a browser neither embeds nor runs nor stores the answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[web.BaseRequest, RollmillError, int], web.StreamResponse]

_JSON = re.compile(r'application/json\s*(;\s*charset="?utf-?8"?\s*)?', re.IGNORECASE)
_OF_PAGES = re.compile(r"\s*(text/plain|multipart/form-data|application/x-www-form-urlencoded)", re.IGNORECASE)
_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_SHOWN_CHARACTERS = 100
_READING = ("GET", "HEAD")


class RefusedRequestError(Exception):
    """Why a request is not served: an error to tell, the status, and a short name for logs."""

    def __init__(self, kind: str, status: int, error: RollmillError) -> None:
        super().__init__(error.message)
        self.kind, self.status, self.error = kind, status, error


def allowed_hosts(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The names of ``ROLLMILL_HTTP_HOSTS``, in lower case. Raises ``ConfigError`` for an invalid host name."""
    names = [name.strip().lower() for name in environment.get(HOSTS_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{HOSTS_VARIABLE} has {name!r}: write names of hosts, separated by commas, without scheme, port or *"
            )
    return frozenset(names)


def for_programs(callers_are_known: bool, hosts: frozenset[str], refuse: Refuse) -> Any:
    """A middleware: refuses pages, and requests whose target, host or body can be read in two ways.

    ``callers_are_known``: the server has keys, and any Host is served. ``hosts``: names of this server beside
    loopback's.
    """
    repeats = Repeats()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check(request, None if callers_are_known else hosts)
        except RefusedRequestError as refused:
            if (untold := repeats.tell(refused.kind)) is not None:
                log.info("http.refused", path=request.path, reason=refused.kind, error=refused.error.message, **untold)
            answer = refuse(request, refused.error, refused.status)
            answer.force_close()  # the next bytes of the connection may be the body that was not read
            return answer
        return await handler(request)

    return middleware


async def closed_to_pages(request: web.BaseRequest, answer: web.StreamResponse) -> None:
    """For ``on_response_prepare``: the headers that keep an answer from pages, streams and errors included."""
    for name, value in ANSWER_HEADERS.items():
        answer.headers.setdefault(name, value)


def check(request: web.Request, hosts: frozenset[str] | None) -> None:
    """Raises ``RefusedRequestError``; ``hosts`` None serves any Host."""
    _check_target(request)
    _check_host(request, hosts)
    _check_origin(request)
    if request.method not in _READING:
        _check_body(request)


def _check_target(request: web.Request) -> None:
    target = request.raw_path
    if request.method in ("OPTIONS", "TRACE", "CONNECT"):
        raise _refused("method", 405, f"{request.method} is not served: pages get no permission here")
    if not target.startswith("/") or target.startswith("//"):
        raise _refused("target", 400, f"the target {_shown(target)} is no path: ask for /PATH, not through a proxy")
    if "websocket" in request.headers.get("Upgrade", "").lower() or "Sec-WebSocket-Key" in request.headers:
        raise _refused("upgrade", 400, "there are no WebSockets here: send plain requests")


def _check_host(request: web.Request, hosts: frozenset[str] | None) -> None:
    given = request.headers.getall("Host", [])
    if len(given) != 1:
        raise _refused("host_count", 400, f"the request has {len(given)} Host headers: send one")
    if hosts is None or is_served(given[0], hosts):
        return
    raise _refused(
        "host",
        421,
        f"Host is {_shown(given[0])}, and a process without keys answers to loopback's names alone (127.0.0.1, localhost, "
        f"[::1]): ask for one of these, or name the host in {HOSTS_VARIABLE} where the process is started",
    )


def is_served(host: str, hosts: frozenset[str]) -> bool:
    """Whether a Host header, with or without a port, names loopback or one of ``hosts``."""
    parts = _HOST.fullmatch(host)
    if parts is None or int(parts["port"] or 0) > 65535:
        return False
    name = parts["host"].strip("[]").lower()
    try:
        address = ip_address(name)
    except ValueError:
        return not parts["host"].startswith("[") and (name == "localhost" or name in hosts)
    if isinstance(address, IPv4Address):
        return address.is_loopback or name in hosts
    return address == IPv6Address("::1") and parts["host"].startswith("[")


def _check_origin(request: web.Request) -> None:
    if (origin := request.headers.get("Origin")) is not None:
        raise _denied("origin", f"the request has the Origin {_shown(origin)}, as pages in browsers send it")
    for site in request.headers.getall("Sec-Fetch-Site", []):
        if site.strip().lower() not in ("none", "same-origin"):
            raise _denied("site", f"Sec-Fetch-Site is {_shown(site)}: a page of another site asks")


def _check_body(request: web.Request) -> None:
    types = request.headers.getall("Content-Type", [])
    if "Content-Encoding" in request.headers:
        raise _refused("encoding", 415, "the body has a Content-Encoding: send it as it is")
    if request.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        raise _refused("encoding", 415, "the body has a Transfer-Encoding other than chunked: send it as it is")
    if not request.can_read_body and not any(_OF_PAGES.match(each) for each in types):
        return  # clients name types of their own for no body at all
    if len(types) != 1 or not _JSON.fullmatch(types[0].strip()):
        given = ", ".join(map(_shown, types)) or "missing"
        raise _refused("type", 415, f"Content-Type is {given}: send JSON, with `Content-Type: application/json`")


def _denied(kind: str, why: str) -> RefusedRequestError:
    told = PermissionDeniedError(f"{why}; only programs may ask here, and no setting lets a page in")
    return RefusedRequestError(kind, 403, told)


def _refused(kind: str, status: int, message: str) -> RefusedRequestError:
    return RefusedRequestError(kind, status, InvalidRequestError(message))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")


def json_answer(value: object, status: int = 200) -> web.Response:
    """``value`` as JSON."""
    return web.Response(body=orjson.dumps(encodable(value)), status=status, content_type="application/json")
