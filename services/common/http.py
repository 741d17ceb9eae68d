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

import asyncio
import errno
import logging
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import orjson
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.common.aio import TaskOwner
from services.common.errors import AccessError, ConfigError, InvalidRequestError, PermissionDeniedError, RollmillError
from services.common.net.hosts import peer_of_host
from services.common.records import encodable
from services.common.rpc.interceptors import HANDSHAKE_S, MOST_CONNECTIONS
from services.common.security import identity
from services.common.security.identity import Identity, caller, check_bind, permit, server_context
from services.common.telemetry.logs import Repeats

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
    target = request.raw_path
    if request.method in ("OPTIONS", "TRACE", "CONNECT"):
        raise _refused("method", 405, f"{request.method} is not served: pages get no permission here")
    if not target.startswith("/") or target.startswith("//"):
        raise _refused("target", 400, f"the target {_shown(target)} is no path: ask for /PATH, not through a proxy")
    if "websocket" in request.headers.get("Upgrade", "").lower() or "Sec-WebSocket-Key" in request.headers:
        raise _refused("upgrade", 400, "there are no WebSockets here: send plain requests")
    given = request.headers.getall("Host", [])
    if len(given) != 1:
        raise _refused("host_count", 400, f"the request has {len(given)} Host headers: send one")
    if hosts is not None and not is_served(given[0], hosts):
        raise _refused(
            "host",
            421,
            f"Host is {_shown(given[0])}, and a process without keys answers to loopback's names alone (127.0.0.1, localhost, "
            f"[::1]): ask for one of these, or name the host in {HOSTS_VARIABLE} where the process is started",
        )
    if (origin := request.headers.get("Origin")) is not None:
        raise _denied("origin", f"the request has the Origin {_shown(origin)}, as pages in browsers send it")
    for site in request.headers.getall("Sec-Fetch-Site", []):
        if site.strip().lower() not in ("none", "same-origin"):
            raise _denied("site", f"Sec-Fetch-Site is {_shown(site)}: a page of another site asks")
    if request.method in _READING:
        return
    types = request.headers.getall("Content-Type", [])
    if "Content-Encoding" in request.headers:
        raise _refused("encoding", 415, "the body has a Content-Encoding: send it as it is")
    if request.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        raise _refused("encoding", 415, "the body has a Transfer-Encoding other than chunked: send it as it is")
    if not request.can_read_body and not any(_OF_PAGES.match(each) for each in types):
        return  # clients name types of their own for no body at all
    if len(types) != 1 or not _JSON.fullmatch(types[0].strip()):
        told = ", ".join(map(_shown, types)) or "missing"
        raise _refused("type", 415, f"Content-Type is {told}: send JSON, with `Content-Type: application/json`")


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


# --- Authenticates and authorises HTTP requests by group of routes, before a request's body is read.


Shown = Callable[[web.Request], str | None]


def authorization(request: web.Request) -> str | None:
    """The header of a client: ``Authorization: Bearer TOKEN``."""
    return request.headers.get("Authorization")


def plainly(request: web.BaseRequest, error: RollmillError, status: int) -> web.StreamResponse:
    """A refusal as ``{"detail": ...}``, as the judge and the task server write theirs."""
    return json_answer({"detail": error.message}, status)


def authenticated(who: Identity, group: str, refuse: Refuse, shown: Shown, scheme: str = "Bearer") -> Any:
    """A middleware: 401 for unknown callers, 403 for callers whose role may not use this group of routes
    (``permissions.HTTP``). ``scheme`` is what the answer 401 asks for."""
    from services.common.security.gatekeeper import Gatekeeper  # and cryptography: for those with keys only

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


# --- Limits of one address at an HTTP server: connections, and time to send a request.


# Of one address, those included that wait between two requests: an agent loop for each rollout has one.
CONNECTIONS = 8192
BODY_S = 120.0  # for a body to come; the largest is some hundred MiB
LOOK_S = 1.0


def body_in_time() -> Any:
    """A middleware: 408 for a body that does not arrive. Innermost, so that refused requests do not wait for a body."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.can_read_body:
            try:
                async with asyncio.timeout(BODY_S):
                    await request.read()  # aiohttp keeps it for the handler
            except TimeoutError:
                raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None
        return await handler(request)

    return middleware


def most_connections() -> int:
    """How many connections one address may hold: never more than half of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)


class SlowClients:
    """Hangs up on connections that do not make their first request in time, and on those that are too many."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self._since: dict[Any, float] = {}  # silent connections, first seen when
        self._spoken: set[Any] = set()
        self._asking: Counter[Any] = Counter()  # requests that run, by connection
        self._most = most_connections()

    def heard(self) -> Any:
        """A middleware that records clients with a complete request, and clients that wait for an answer. Outermost."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._spoken.add(connection)
            self._asking[connection] += 1
            try:
                return await handler(request)
            finally:
                self._asking[connection] -= 1
                if not self._asking[connection]:
                    del self._asking[connection]

        return middleware

    async def watch(self) -> None:
        """Look once in ``LOOK_S``. Ends by cancellation."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())

    def _connections(self) -> list[Any]:
        server = self._runner.server
        return list(server.connections) if server is not None else []

    def look(self, now: float) -> None:
        connections = self._connections()
        self._spoken.intersection_update(connections)
        silent = [each for each in connections if each not in self._spoken]
        self._since = {each: self._since.get(each, now) for each in silent}
        too_many = len(connections) - MOST_CONNECTIONS
        for number, each in enumerate(silent):
            silent_s = now - self._since[each]
            if silent_s > HANDSHAKE_S or number < too_many:
                _hang_up(each, why="silent")
        for each in self._over_the_limit_of_a_peer(connections):
            _hang_up(each, why="too_many")

    def _over_the_limit_of_a_peer(self, connections: list[Any]) -> list[Any]:
        """The connections of an address beyond its limit: first those without any request, then idle ones.

        One with a request that runs is left.
        """
        if len(connections) <= self._most:
            return []
        peers = {each: _peer(each) for each in connections}
        over = {peer: count - self._most for peer, count in Counter(peers.values()).items() if count > self._most}
        found = []
        for each in sorted(connections, key=self._spoken.__contains__):
            if over.get(peers[each], 0) > 0 and each not in self._asking:
                over[peers[each]] -= 1
                found.append(each)
        return found


def _peer(connection: Any) -> str:
    address = connection.transport.get_extra_info("peername") if connection.transport is not None else None
    return peer_of_host(str(address[0])) if address else ""


def _hang_up(connection: Any, why: str) -> None:
    log.debug("http.hung_up", why=why)
    connection.force_close()
    if connection.transport is not None:
        connection.transport.abort()


# --- Listens for HTTP on one port: with keys over TLS for authorised roles, without keys on loopback only.


_STOP_S = 5.0


class Listener:
    """``start`` serves an application, ``stop`` ends. Raises ``ConfigError`` for another bind than loopback without keys,
    and for a ``ROLLMILL_HTTP_HOSTS`` that cannot be read."""

    def __init__(
        self,
        application: web.Application,
        host: str,
        port: int,
        *,
        name: str,
        setting: str,
        group: str,
        leaving_cancels: bool,
        reuse_port: bool = False,
        refuse: Refuse = plainly,
        shown: Shown = authorization,
        scheme: str = "Bearer",
    ) -> None:
        """``name`` and ``setting`` are for errors: the name of the server, and the port's path in the recipe.
        ``leaving_cancels`` ends the handler of a client that has left. ``reuse_port`` lets several processes share the
        port.

        ``group`` is the entry of the table of permissions for the routes, ``shown`` finds the token in a request, and
        ``refuse`` writes the refusal as the routes write theirs. ``scheme`` is what an answer 401 asks for."""
        self._identity = identity.current()
        check_bind(name, host, self._identity)
        if self._identity is not None:
            application.middlewares.insert(0, authenticated(self._identity, group, refuse, shown, scheme))
        application.middlewares.insert(0, for_programs(self._identity is not None, allowed_hosts(), refuse))
        application.on_response_prepare.append(closed_to_pages)
        application.middlewares.append(body_in_time())
        self._runner = web.AppRunner(
            application,
            handler_cancellation=leaving_cancels,
            access_log=None,
            shutdown_timeout=_STOP_S,
            auto_decompress=False,  # a body with an encoding is refused; none is unpacked
            logger=_library_log(),
        )
        self._slow_clients = SlowClients(self._runner)
        application.middlewares.insert(0, self._slow_clients.heard())
        self._tasks = TaskOwner()
        self._host = host
        self._reuse_port = reuse_port
        self._name = name
        self._setting = setting
        self.port = port

    @property
    def is_secure(self) -> bool:
        """Whether the scheme is https."""
        return self._identity is not None

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that is served."""
        found = self._runner.app.router.resources()
        return [(route.method, resource.canonical) for resource in found for route in resource]

    async def start(self) -> int:
        """Returns the port. Raises ``ConfigError`` for one that is taken."""
        await self._runner.setup()
        context = None if self._identity is None else server_context(self._identity)
        site = web.TCPSite(
            self._runner, self._host, self.port, reuse_port=self._reuse_port or None, ssl_context=context
        )
        try:
            await site.start()
        except OSError as error:
            why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(
                f"{self._name} cannot listen on {self._host}:{self.port}: {why}; stop the process that holds the port, or write "
                f"another in {self._setting} (0 takes a free one)"
            ) from None
        self.port = self._runner.addresses[0][1]
        self._tasks.start(self._slow_clients.watch(), f"silent clients of {self._name}")
        log.info("http.listening", name=self._name, address=f"{self._host}:{self.port}", tls=self.is_secure)
        return self.port

    async def stop(self) -> None:
        await self._tasks.close()
        await self._runner.cleanup()


class _Malformed(logging.Filter):
    """Logs bytes that are no HTTP in one line per second: aiohttp would log each with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        if (untold := self._repeats.tell(type(error).__name__)) is not None:
            log.info("http.malformed", reason=type(error).__name__, **untold)
        return False


def _library_log() -> logging.Logger:
    """The log of aiohttp for errors: bugs with their tracebacks, malformed bytes in a line."""
    found = logging.Logger("aiohttp.server", logging.WARNING)
    found.parent = logging.getLogger()
    found.addFilter(_Malformed())
    return found
