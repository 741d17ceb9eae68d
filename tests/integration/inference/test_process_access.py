"""A replica with wrong keys ends at once and names the remedy, without retries."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli.keys import Keyring
from services.common.errors import RollmillError
from services.common.rpc.run_client import fetch_run
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.keys import VARIABLE, Role
from tests.contract.run_servicer import RunServicer, make_server
from tests.integration.inference.peers import end_of
from tests.keys import as_role, make_keys


@asynccontextmanager
async def orchestrator(keys: Keyring | None) -> AsyncIterator[Server]:
    with identity.used(None if keys is None else as_role(keys, Role.ORCHESTRATOR)):
        server = make_server(RunServicer())
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.1)


async def replica(address: str, keys: Path | None) -> tuple[int | None, str]:
    """Exit code and last output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.inference", "--orchestrator", address,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: str(keys or "")},
    )  # fmt: skip
    return await end_of(process)


async def join(address: str, keys: Path | None) -> None:
    identity.configure(Role.INFERENCE, environment={VARIABLE: str(keys or "")})
    await fetch_run(address)


def another_run(path: Path) -> Path:
    return make_keys(path / "other").folder


def expired(path: Path) -> Path:
    shutil.copytree(path / "keys", path / "old")
    Keyring(path / "old", clock=lambda: time.time() - 20 * 86400).renew(days=10)
    return path / "old"


def ahead(path: Path) -> Path:
    shutil.copytree(path / "keys", path / "early")
    Keyring(path / "early", clock=lambda: time.time() + 86400).renew()
    return path / "early"


def wrong_role(path: Path) -> Path:
    return path / "keys" / "viewer"


CASES: dict[str, tuple[bool, Callable[[Path], Path | None], str]] = {
    "another run": (True, another_run, "did not sign"),
    "expired": (True, expired, "of role inference expired at"),
    "a clock that is ahead": (True, ahead, "set the clocks of the two machines right"),
    "another role's keys": (True, wrong_role, "holds keys of role viewer, but this process is inference"),
    "no keys": (True, lambda path: None, "speaks TLS, and this process has no keys"),
    "an orchestrator without": (False, lambda path: path / "keys", "speaks no TLS, and this process has keys"),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_replica_that_may_not_join_says_why(tmp_path: Path, case: str) -> None:
    secure, made, message = CASES[case]
    keys = make_keys(tmp_path / "keys")
    own = made(tmp_path)
    async with orchestrator(keys if secure else None) as server:
        with identity.used(None), pytest.raises(RollmillError) as caught:
            await join(server.address, own)
    assert message in caught.value.message


async def test_a_replica_that_may_not_join_ends_at_once(tmp_path: Path) -> None:
    _, made, message = CASES["another run"]
    async with orchestrator(make_keys(tmp_path / "keys")) as server:
        code, words = await replica(server.address, made(tmp_path))
    assert code == 1
    assert message in words
    assert "Traceback" not in words
    assert "eyJ" not in words
