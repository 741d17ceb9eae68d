"""The endpoint in a run with keys: https, for agents of this run alone, with unmodified public clients."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from services.cli.keys import Keyring
from services.common.security import identity
from services.common.security.keys import VARIABLE, Role
from services.inference.endpoint.server import CA_VARIABLE, EndpointServer
from tests.integration.inference.endpoint_peers import anthropic_of, client_of, play_tools, serving, session_of
from tests.integration.inference.test_external_agent import CALL, HERE, play
from tests.keys import as_role, client_context, make_keys
from tests.unit.inference.fakes import served_policy

AGENT = """
import os, sys, openai
assert "ROLLMILL_KEYS" not in os.environ
sys.stdin.readline()
client = openai.OpenAI(max_retries=0)
answer = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "go"}])
print('{"reward": %d}' % (answer.choices[0].message.content == "42"))
"""


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return make_keys(tmp_path / "keys")


@pytest.fixture
async def server(keys: Keyring, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EndpointServer]:
    monkeypatch.setenv(VARIABLE, str(keys.folder))
    monkeypatch.setenv(CA_VARIABLE, ssl.get_default_verify_paths().cafile or "")  # restored after the test
    with identity.used(as_role(keys, Role.INFERENCE)):
        async with serving() as server:
            yield server


async def test_openais_client_speaks_https_with_what_it_is_given_as_key_or_header(server: EndpointServer) -> None:
    assert server.base_url.startswith("https://127.0.0.1:")
    policy = await served_policy([CALL, "It is 42."])
    session = session_of(policy)
    with server.opened(session) as credential:
        async with client_of(server, credential) as client:  # in the header X-Rollmill-Session
            await play_tools(client, 2)
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=credential, max_retries=0) as client:
            assert [each.id async for each in client.models.list()]


@pytest.mark.parametrize("agent", ["generous", "blocking"])
async def test_an_agent_in_this_process_needs_to_know_nothing_of_it(server: EndpointServer, agent: str) -> None:
    outcome = await play(server, {"agent": f"{HERE}:{agent}"}, ["42"])
    assert outcome.reward > 0


async def test_an_agent_that_is_a_program_trusts_the_run_and_is_not_told_where_keys_are(server: EndpointServer) -> None:
    outcome = await play(server, {"command": [sys.executable, "-c", AGENT]}, ["42"])
    assert outcome.reward == 1.0


async def refused(server: EndpointServer, headers: dict[str, str], context: ssl.SSLContext) -> tuple[int, str]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
        async with http.get(f"{server.base_url}/models", headers=headers) as answer:
            error = (await answer.json())["error"]
            assert error["message"] and error["type"] == "invalid_request_error"
            return answer.status, error["code"]


def trusting(keys: Keyring) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(keys.folder / "ca.pem"))


async def test_who_is_no_agent_of_this_run_is_refused_as_openai_would(
    server: EndpointServer, keys: Keyring, tmp_path: Path
) -> None:
    policy = await served_policy(["hello"])
    other = make_keys(tmp_path / "other", "r2")
    old = Keyring(keys.folder, clock=lambda: 1_700_000_000.0)
    with server.opened(session_of(policy)) as credential:
        session = credential.rpartition("~")[2]
        cases = {
            "nothing": ({}, 401),
            "the session alone": ({"Authorization": f"Bearer {session}"}, 401),
            "the session alone, as a header": ({"X-Rollmill-Session": session}, 401),
            "a wrong role": ({"Authorization": f"Bearer {keys.token(Role.INFERENCE, 1)}~{session}"}, 403),
            "another run": ({"Authorization": f"Bearer {other.token(Role.AGENT, 1)}~{session}"}, 401),
            "expired": ({"Authorization": f"Bearer {old.token(Role.AGENT, 1)}~{session}"}, 401),
            "no session": ({"Authorization": f"Bearer {keys.token(Role.AGENT, 1)}"}, 401),
            "a session that is over": ({"Authorization": f"Bearer {keys.token(Role.AGENT, 1)}~other"}, 401),
        }
        for name, (headers, status) in cases.items():
            found, code = await refused(server, headers, trusting(keys))
            assert found == status, name
            assert code == ("unknown_session" if "session" in name and "alone" not in name else
                            "permission_denied" if status == 403 else "unauthenticated"), name  # fmt: skip


@pytest.mark.needs("anthropic")
async def test_anthropics_client_speaks_https_with_its_session_as_the_key_and_is_refused_in_its_shape(
    server: EndpointServer, keys: Keyring
) -> None:
    import anthropic

    ask: dict[str, Any] = {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
    with server.opened(session_of(await served_policy(["42"]))) as credential:
        async with anthropic_of(server, credential) as client:
            assert (await client.messages.create(**ask)).content[0].text == "42"
        session = credential.rpartition("~")[2]
        wrong = {
            session: (401, "authentication_error"),
            f"x~{session}": (401, "authentication_error"),
            f"{keys.token(Role.INFERENCE, 1)}~{session}": (403, "permission_error"),
        }
        for key, (status, kind) in wrong.items():
            async with anthropic_of(server, key) as client:
                with pytest.raises(anthropic.APIStatusError) as refused:
                    await client.messages.create(**ask)
            body: Any = refused.value.body
            assert (refused.value.status_code, body["error"]["type"]) == (status, kind)


async def test_a_certificate_does_as_well_as_a_token(server: EndpointServer, keys: Keyring) -> None:
    policy = await served_policy(["hello"])
    with server.opened(session_of(policy)) as credential:
        headers = {"X-Rollmill-Session": credential.rpartition("~")[2]}
        context = client_context(as_role(keys, Role.AGENT))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            async with http.get(f"{server.base_url}/models", headers=headers) as answer:
                assert answer.status == 200
        status, _ = await refused(server, headers, client_context(as_role(keys, Role.VIEWER)))
        assert status == 403


async def test_plain_http_gets_no_answer(server: EndpointServer) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"{server.base_url.replace('https', 'http')}/models")


async def test_trust_is_added_to_what_was_trusted(server: EndpointServer, keys: Keyring) -> None:
    trusted = Path(os.environ[CA_VARIABLE]).read_bytes()
    assert (keys.folder / "ca.pem").read_bytes() in trusted
    assert trusted.count(b"BEGIN CERTIFICATE") > 1 or not ssl.get_default_verify_paths().cafile
