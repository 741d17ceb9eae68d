"""``rollmill page``: serves the page until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services.cli.console import say
from services.cli.inspect.run_state import check_run_directory
from services.cli.keys import keys_there
from services.common.config.reading.loading import load_resolved
from services.common.errors import ConfigError
from services.common.installing import install
from services.common.net.hosts import is_loopback
from services.common.security import identity
from services.common.security.bundle import VARIABLE
from services.common.security.identity import Identity
from services.common.security.roles import Role

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
    try:
        from services.cli.page.server import PageServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the page needs the package {error.name}, which is not installed here: {install('page')}"
        ) from None
    who = keys_to_serve(found[0], host)
    sys.setswitchinterval(SWITCH_S)
    with identity.used(who):
        server = PageServer(found, host, port)
    asyncio.run(_serve(server, host, console))


async def _serve(server: object, host: str, console: Console) -> None:
    from services.cli.page.server import PageServer

    assert isinstance(server, PageServer)
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
