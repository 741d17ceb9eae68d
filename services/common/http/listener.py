"""Listens for HTTP on one port: with keys over TLS for authorised roles, without keys on loopback only.

    connection -> SlowClients -> for_programs -> authenticated (keys) -> the application's own -> body_in_time

All HTTP servers of this project are ``Listener``s, so that each has the same checks.
"""

from __future__ import annotations

import errno
import logging

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.common.aio import TaskOwner
from services.common.errors import ConfigError
from services.common.http.authentication import Shown, authenticated, authorization, plainly
from services.common.http.limits import SlowClients, body_in_time
from services.common.http.origin import Refuse, allowed_hosts, closed_to_pages, for_programs
from services.common.security import identity
from services.common.security.identity import check_bind
from services.common.security.tls import server_context
from services.common.telemetry.logs import Repeats

log = structlog.get_logger()

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
