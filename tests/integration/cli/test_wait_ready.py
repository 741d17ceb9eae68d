"""Obstacles between a starting process and the orchestrator: each is reported precisely, or waited for."""

from __future__ import annotations

import asyncio
import errno
import io
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from services.cli.keys import Keyring
from services.cli.run.launch import wait_for_orchestrator
from services.common.errors import ConfigError, DeadlineError, UnauthenticatedError
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.identity import Identity
from services.common.security.keys import Role
from tests.keys import as_role, make_keys

Case = Callable[[Path], tuple[Identity | None, Identity | None, str]]


@asynccontextmanager
async def orchestrator(who: Identity | None, *, ready: bool = True) -> AsyncIterator[str]:
    with identity.used(who):
        server = Server(service="orchestrator", instance_id="o", host="127.0.0.1", port=0)
    await server.start()
    if ready:
        server.set_ready()
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0.1)


async def wait_at(place: str, who: Identity | None, *, wait_s: float = 1.0) -> str:
    """The messages meanwhile."""
    said = io.StringIO()
    with identity.used(who):
        await asyncio.to_thread(wait_for_orchestrator, place, Console(file=said, width=300), wait_s)
    return said.getvalue()


def of_another_run(path: Path) -> tuple[Identity | None, Identity | None, str]:
    here, there = make_keys(path / "here"), make_keys(path / "there", "r2")
    return as_role(here, Role.ORCHESTRATOR), as_role(there, Role.INFERENCE), "that this run's authority did not sign"


def with_an_expired_token(path: Path) -> tuple[Identity | None, Identity | None, str]:
    """The orchestrator's keys were renewed, the copy on this node was not."""
    keys = make_keys(path)
    Keyring(path, clock=lambda: time.time() - 31 * 86400).renew(days=30)
    late = as_role(keys, Role.INFERENCE)
    Keyring(path).renew()
    return as_role(keys, Role.ORCHESTRATOR), late, "the token of role inference expired at .* make new keys"


@pytest.mark.parametrize(
    "case",
    [
        of_another_run,
        with_an_expired_token,
    ],
)
async def test_keys_that_do_not_fit_are_told_at_once(tmp_path: Path, case: Case) -> None:
    there, here, message = case(tmp_path)
    async with orchestrator(there) as place:
        with pytest.raises(UnauthenticatedError, match=message):
            await wait_at(place, here, wait_s=30.0)


async def test_one_that_is_not_ready_or_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async with orchestrator(None, ready=False) as place:
        with pytest.raises(DeadlineError, match="but no orchestrator that is ready"):
            await wait_at(place, None)
    with pytest.raises(DeadlineError, match=rf"did not answer within 1 s \(no process listens at {place} yet\)"):
        await wait_at(place, None)


async def test_one_that_accepts_and_says_nothing_is_named() -> None:
    """Half-open: the peer's machine is there, the process behind the socket does not read."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=f"a server answers at {place}, but no orchestrator that is ready"):
            await wait_at(place, None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), r"no answer from 192\.0\.2\.1 at port 1"),  # as behind a firewall that drops
        (OSError(errno.EHOSTUNREACH, "No route to host"), r"192\.0\.2\.1 cannot be reached: No route to host"),
    ],
)
async def test_a_machine_that_never_answers_is_told_within_the_time(
    monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    monkeypatch.setattr("services.cli.run.launch.socket.create_connection", Mock(side_effect=error))
    with pytest.raises(DeadlineError, match=rf"within 0\.5 s \({said}\): is it running .* let the port through"):
        await wait_at("192.0.2.1:1", None, wait_s=0.5)


async def test_a_name_that_nobody_knows_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"cannot resolve the name nobody\.invalid"):
        await wait_at("nobody.invalid:50050", None)
