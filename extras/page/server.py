"""The HTTP server of the page: its files, and the contents of a run's directory, as JSON. Every route is a GET and reads.

GET /                    the page          GET /api/runs                      the list of runs
GET /assets/NAME         its files         GET /api/runs/N/SUBJECT            of one run
GET /api/curves?runs=    curves            GET /api/runs/N/rollouts/NUMBER    one conversation
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from rich.console import Console

from extras.page.index import number_of
from extras.page.reader import RunReader, guarded
from services.cli.console import say
from services.cli.inspect.plot import curves
from services.cli.inspect.run_state import Row, check_run_directory
from services.cli.keys import keys_there
from services.common.config.loading import load_resolved
from services.common.errors import ConfigError, InvalidRequestError, NotFoundError, RollmillError
from services.common.http import Handler, Listener, authorization
from services.common.net.hosts import is_loopback
from services.common.security import identity
from services.common.security.identity import Identity
from services.common.security.keys import VARIABLE, Role

ASSETS = Path(__file__).parent / "assets"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: it runs its own files alone, so text of a run can never run."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

Json = dict[str, Any]


class PageServer:
    """``start`` listens and begins to read the runs, ``stop`` ends both."""

    def __init__(self, run_dirs: Sequence[Path], host: str, port: int) -> None:
        """Raises ``ConfigError`` for a host other than loopback without keys."""
        self.readers = [RunReader(run_dir) for run_dir in run_dirs]
        self._drawn: tuple[dict[Path, list[Row]], Json] = ({}, {})  # the newest curves, and the rows that they are of
        application = web.Application(middlewares=[_told])
        application.router.add_get("/", self._page)
        application.router.add_get("/assets/{name}", self._asset)
        application.router.add_get("/api/runs", self._runs)
        application.router.add_get("/api/curves", self._curves)
        application.router.add_get("/api/runs/{run}/rollouts/{number}", self._conversation)
        application.router.add_get("/api/runs/{run}/{subject}", self._subject)
        self._subjects: Mapping[str, Callable[[RunReader, web.Request], Json]] = {
            "state": lambda reader, request: reader.overview(),
            "fates": lambda reader, request: {"fates": reader.fates, "problems": reader.problems},
            "events": lambda reader, request: {"events": reader.events, "problems": reader.problems},
            "weights": lambda reader, request: reader.weights(),
            "facets": lambda reader, request: reader.facets(),
            "rollouts": lambda reader, request: reader.rollouts(request.query),
        }
        self._listener = Listener(
            application, host, port, name="the page", setting="--port", group="page", leaving_cancels=False,
            shown=password, scheme='Basic realm="rollmill: the token of a viewer is the password"',
        )  # fmt: skip

    @property
    def is_secure(self) -> bool:
        return self._listener.is_secure

    async def start(self) -> int:
        """Returns the port."""
        port = await self._listener.start()
        for reader in self.readers:
            reader.start()
        return port

    async def stop(self) -> None:
        await self._listener.stop()
        await asyncio.gather(*(asyncio.to_thread(reader.close) for reader in self.readers))

    # --- routes ------------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        return _file("index.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return _file(request.match_info["name"])

    async def _runs(self, request: web.Request) -> web.Response:
        return _json(
            {"runs": [{"run": n, "name": r.run_dir.name, "path": str(r.run_dir)} for n, r in enumerate(self.readers)]}
        )

    async def _curves(self, request: web.Request) -> web.Response:
        chosen = {r.run_dir: r for r in map(self._reader, request.query.get("runs", "0").split(","))}
        for reader in chosen.values():
            reader.asked()
        return await _answer("the metrics", lambda: self._curves_of(chosen))

    def _curves_of(self, chosen: Mapping[Path, RunReader]) -> Json:
        """Computed once until a run has new rows, which make a new list."""
        rows = {run_dir: reader.rows() for run_dir, reader in chosen.items()}
        before, found = self._drawn
        if list(rows) != list(before) or any(rows[run_dir] is not before[run_dir] for run_dir in rows):
            found = curves(rows)
            self._drawn = rows, found
        return found

    async def _subject(self, request: web.Request) -> web.Response:
        reader = self._reader(request.match_info["run"])
        subject = request.match_info["subject"]
        if subject not in self._subjects:
            raise NotFoundError(f"there is no {subject!r}: ask for {', '.join(self._subjects)}")
        reader.asked()
        return await _answer(f"the {subject} of {reader.run_dir}", lambda: self._subjects[subject](reader, request))

    async def _conversation(self, request: web.Request) -> web.Response:
        reader = self._reader(request.match_info["run"])
        number = number_of(request.match_info["number"], "the number of the rollout", int)
        return await _answer(f"rollout {number} of {reader.run_dir}", lambda: reader.conversation(number))

    def _reader(self, text: str) -> RunReader:
        number = number_of(text, "the run", int)
        if not 0 <= number < len(self.readers):
            raise NotFoundError(f"there is no run {number}: this page has {len(self.readers)}")
        return self.readers[number]


async def _answer(what: str, ask: Callable[[], Json]) -> web.Response:
    return await asyncio.to_thread(lambda: _json(guarded(what, ask)))


def _json(value: Json) -> web.Response:
    return web.Response(body=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), content_type="application/json")


def _file(name: str) -> web.Response:
    path = ASSETS / name
    if name not in os.listdir(ASSETS) or path.suffix not in _TYPES:
        raise NotFoundError(f"there is no file {name!r}")
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8", headers=headers)


_STATUS = {NotFoundError: 404, ConfigError: 409, InvalidRequestError: 400}


@web.middleware
async def _told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of the project as ``{"detail": ...}``."""
    try:
        return await handler(request)
    except RollmillError as error:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
        body = orjson.dumps({"detail": error.message})
        return web.Response(body=body, status=status, content_type="application/json")


DEFAULT_PORT = 8420
SWITCH_S = 0.001  # between threads: a question does not wait while a journal is read


def check_runs(runs: Sequence[Path]) -> list[Path]:
    """The directories, each once. Raises ``ConfigError`` for one that holds no run."""
    for run in runs:
        check_run_directory(run)
    return list(dict.fromkeys(run.resolve() for run in runs))


def keys_to_serve(run: Path, host: str) -> Identity | None:
    """The keys of a page that others than this machine can reach; None on loopback.

    Raises ``ConfigError`` without keys: such a page would show the run to everyone.
    """
    if is_loopback(host):
        return None
    keys = keys_there(load_resolved(run), run)
    if keys is None:
        raise ConfigError(
            f"the page may not listen on {host} without keys, because anyone could read the run: start it on loopback and "
            f"forward the port (ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} HOST), or make keys with `rollmill keys` and "
            f"set {VARIABLE} to their directory"
        )
    return identity.load(keys, Role.ORCHESTRATOR)


def show(runs: Sequence[Path], host: str, port: int, console: Console) -> None:
    """Serve the page of these runs until Ctrl-C or SIGTERM."""
    found = check_runs(runs)
    who = keys_to_serve(found[0], host)
    sys.setswitchinterval(SWITCH_S)
    with identity.used(who):
        server = PageServer(found, host, port)
    asyncio.run(_serve(server, host, console))


async def _serve(server: PageServer, host: str, console: Console) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    port = await server.start()
    name = f"[{host}]" if ":" in host else host
    try:
        say(console, f"page: {'https' if server.is_secure else 'http'}://{name}:{port}/  (Ctrl-C ends it)")
        if server.is_secure:
            say(console, "  log in with any name, and as password the token of the run's viewer (keys/viewer/token)")
        await ended.wait()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await server.stop()


_BASIC = "Basic "


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
