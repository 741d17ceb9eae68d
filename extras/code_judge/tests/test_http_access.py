"""The HTTP interface in a run with keys: every route is open to allowed callers only, over TLS, and keys may be
renewed."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from extras.code_judge.settings import HttpConfig
from services.cli.keys import Keyring
from services.common.config.envgateway import EnvGatewayConfig, ScorerConfig
from services.common.errors import ConfigError
from services.common.security import identity
from services.common.security.identity import Identity
from services.common.security.keys import Role
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG
from tests.keys import as_role, client_context, make_keys

GATEWAY = EnvGatewayConfig(port=0, sandbox=CONFIG, math=ScorerConfig(num_workers=1), http=HttpConfig(port=0))
PROGRAM = {"type": "python", "solution": "print(1)"}


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def who(keys: Keyring) -> Identity:
    return as_role(keys, Role.ENVGATEWAY)


@pytest.fixture
async def url(who: Identity) -> AsyncIterator[str]:
    pool = SandboxPool.start_before_threads(CONFIG)
    with identity.used(who):
        gateway = Gateway(GATEWAY, pool)
    await gateway.start()
    assert gateway.http is not None
    yield f"https://127.0.0.1:{gateway.http.port}"
    await gateway.stop()


async def ask(url: str, path: str, context: ssl.SSLContext, token: str | None = None) -> tuple[int, object]:
    """Status and body of an answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(ssl=context)) as http:
        call = http.post(path, json=PROGRAM) if path == "/run" else http.request(*route(path))
        async with call as answer:
            return answer.status, await answer.json()


def shown(url: str) -> str:
    """The certificate that answers, PEM."""
    return ssl.get_server_certificate(("127.0.0.1", int(url.rpartition(":")[2])))


def route(path: str) -> tuple[str, str]:
    return ("GET" if path in ("/ping", "/status", "/nothing") else "POST"), path


def trusting(keys: Keyring) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(keys.folder / "ca.pem"))


async def test_a_token_or_a_certificate_allows_running_a_program(url: str, keys: Keyring) -> None:
    for role in (Role.CLIENT, Role.OPERATOR):
        status, answer = await ask(url, "/run", trusting(keys), keys.token(role, 1))
        assert (status, answer["stdout"]) == (200, "1\n")  # type: ignore[index]
    status, _ = await ask(url, "/run", client_context(as_role(keys, Role.CLIENT)))
    assert status == 200


ROUTES = ["/ping", "/status", "/nothing"] + [
    f"/{a}{b}" for a in ("run", "judge") for b in ("", "/batch", "/long-batch")
]


async def test_every_route_refuses_other_callers(url: str, keys: Keyring, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other", "r2")
    old = Keyring(keys.folder, clock=lambda: time.time() - 10 * 86400)
    cases = {
        None: 401,
        "nonsense": 401,
        other.token(Role.CLIENT, 1): 401,
        old.token(Role.CLIENT, 1): 401,
        keys.token(Role.AGENT, 1): 403,
        keys.token(Role.VIEWER, 1): 403,
        keys.token(Role.TRAINER, 1): 403,
    }
    for path in ROUTES:
        for token, expected in cases.items():
            status, answer = await ask(url, path, trusting(keys), token)
            assert status == expected, path
            assert isinstance(answer, dict) and answer["detail"]
            assert token is None or token[-20:] not in str(answer)


async def test_an_unknown_caller_cannot_fill_the_log(url: str, keys: Keyring) -> None:
    with capture_logs() as logs:
        for _ in range(50):
            assert (await ask(url, "/run", trusting(keys)))[0] == 401
    told = [each for each in logs if each["event"] == "http.refused"]
    assert 1 <= len(told) < 25  # one a second, however slow the machine


async def test_a_renewed_certificate_is_shown_at_the_next_handshake(url: str, keys: Keyring, who: Identity) -> None:
    before = await asyncio.to_thread(shown, url)
    keys.renew()
    who.refresh()
    assert await asyncio.to_thread(shown, url) == (keys.folder / "envgateway" / "cert.pem").read_text() != before
    status, _ = await ask(url, "/ping", trusting(keys), keys.token(Role.CLIENT, 1))
    assert status == 200


async def test_a_certificate_of_another_run_ends_the_handshake(url: str, keys: Keyring, tmp_path: Path) -> None:
    stranger = client_context(as_role(make_keys(tmp_path / "other"), Role.CLIENT))
    stranger.load_verify_locations(cafile=str(keys.folder / "ca.pem"))
    with pytest.raises(aiohttp.ClientError):
        await ask(url, "/ping", stranger)


async def test_without_keys_no_http_leaves_loopback() -> None:
    pool = SandboxPool.start_before_threads(CONFIG)
    try:
        with pytest.raises(ConfigError, match="without keys"):
            Gateway(GATEWAY.model_copy(update={"host": "0.0.0.0"}), pool)
    finally:
        await pool.close()
