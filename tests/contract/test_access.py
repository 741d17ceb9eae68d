"""Over TLS, only callers with a certificate or token of the run are accepted, and only for the calls of their role."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from services.cli.keys import Keyring
from services.common.errors import (
    AccessError,
    ConfigError,
    InfrastructureError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from services.common.pb import run_pb2, run_pb2_grpc, training_pb2, training_pb2_grpc
from services.common.rpc.client import channel, channel_options, translated_errors
from services.common.rpc.server import Server
from services.common.security import identity, tokens
from services.common.security import identity as handshake
from services.common.security.identity import Identity, caller
from services.common.security.keys import Holder, Peer, Role
from tests.contract.run_servicer import RunServicer, get_run, make_server, remaining, watch
from tests.keys import as_role, make_keys
from tests.waiting import WAIT_S

MODES = pytest.mark.parametrize("certificates", [False, True], ids=["tokens", "certificates"])


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return make_keys(tmp_path / "keys")


@asynccontextmanager
async def serving(who: Identity | None, **settings: object) -> AsyncIterator[tuple[RunServicer, Server]]:
    servicer = RunServicer()
    with identity.used(who):
        server = make_server(servicer, **settings)
    await server.start()
    try:
        yield servicer, server
    finally:
        await server.stop(grace_s=0.2)


def dial(address: str, who: Identity | None, peer: Peer = Peer.ORCHESTRATOR) -> grpc.aio.Channel:
    with identity.used(who):
        return channel(address, peer)


@MODES
async def test_the_right_role_makes_calls_of_every_kind(tmp_path: Path, certificates: bool) -> None:
    keys = make_keys(tmp_path / "keys", client_certificates=certificates)
    async with serving(as_role(keys, Role.ORCHESTRATOR), run_id="r1") as (servicer, server):
        servicer.release.set()
        async with dial(server.address, as_role(keys, Role.TRAINER)) as connection:
            assert (await get_run(connection)).run_id == "r1"
            assert await remaining(watch(connection)) == [0, 1, 2]


@MODES
async def test_a_wrong_role_is_refused_with_what_would_be_allowed(tmp_path: Path, certificates: bool) -> None:
    keys = make_keys(tmp_path / "keys", client_certificates=certificates)
    async with serving(as_role(keys, Role.ORCHESTRATOR)) as (servicer, server):
        async with dial(server.address, as_role(keys, Role.INFERENCE)) as connection:
            stub = run_pb2_grpc.RunServiceStub(connection)
            with pytest.raises(PermissionDeniedError, match=r"inference may not call .*StopRun: allowed to operator"):
                with translated_errors("orchestrator"):
                    await stub.StopRun(run_pb2.StopRunRequest(), timeout=WAIT_S)
            with pytest.raises(PermissionDeniedError), translated_errors("orchestrator"):
                await remaining(watch(connection))
        assert servicer.num_calls == 0


async def test_without_a_token_nothing_of_a_call_is_read(keys: Keyring) -> None:
    who = as_role(keys, Role.ORCHESTRATOR)
    async with serving(who) as (servicer, server):
        credentials = grpc.ssl_channel_credentials(who.bundle.ca)
        async with grpc.aio.secure_channel(server.address, credentials) as connection:
            garbage = connection.unary_unary("/rollmill.v1.RunService/GetRun")
            with pytest.raises(UnauthenticatedError, match="neither a certificate nor a token"):
                with translated_errors("orchestrator"):
                    await garbage(b"\xff" * 1000, timeout=WAIT_S)
            unknown = connection.unary_unary("/rollmill.v1.Nothing/Known")
            with pytest.raises(UnauthenticatedError), translated_errors("orchestrator"):
                await unknown(b"", timeout=WAIT_S)
        assert servicer.num_calls == 0


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("Basic dXNlcjpwYXNz", "malformed"),
        ("Bearer", "malformed"),
        ("Bearer not.a.token", "malformed"),
        ("Bearer " + "x" * 5000, "malformed"),
    ],
)
async def test_a_header_that_is_no_token_is_refused_and_not_repeated(keys: Keyring, header: str, why: str) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        await ask_with(as_role(keys, Role.ORCHESTRATOR), header)
    assert caught.value.metadata["why"] == why
    assert header.removeprefix("Bearer ")[:40] not in caught.value.message or len(header) < 10


async def ask_with(who: Identity, header: str) -> run_pb2.GetRunResponse:
    """One call with this ``authorization`` to a server of this identity."""
    async with serving(who) as (_, server):
        credentials = grpc.ssl_channel_credentials(who.bundle.ca)
        async with grpc.aio.secure_channel(server.address, credentials) as connection:
            with translated_errors("orchestrator"):
                return await get_run(connection, metadata=(("authorization", header),))


@pytest.mark.parametrize("left_s", [-0.1, 0.3], ids=["in its first write", "while it waits"])
async def test_a_stream_ends_when_its_token_does_and_may_come_again(keys: Keyring, left_s: float) -> None:
    who = as_role(keys, Role.ORCHESTRATOR)
    token = keys.token(Role.TRAINER, 1)
    ends_at = tokens.read(token).ends_at
    who.clock = lambda: ends_at - left_s
    async with serving(who) as (servicer, server):
        credentials = grpc.ssl_channel_credentials(who.bundle.ca)
        async with grpc.aio.secure_channel(server.address, credentials) as connection:
            bearer = (("authorization", f"Bearer {token}"),)
            call = training_pb2_grpc.TrainingServiceStub(connection).PullBatch(
                training_pb2.PullBatchRequest(), metadata=bearer
            )
            with pytest.raises(InfrastructureError, match="token of this call has expired"):
                with translated_errors("orchestrator"):
                    await asyncio.wait_for(remaining(call), WAIT_S)
        await asyncio.wait_for(servicer.ended.wait(), WAIT_S)


@MODES
async def test_renewed_keys_are_taken_up_by_both_sides_without_a_restart(tmp_path: Path, certificates: bool) -> None:
    keys = make_keys(tmp_path / "keys", client_certificates=certificates)
    server_side, client_side = as_role(keys, Role.ORCHESTRATOR), as_role(keys, Role.TRAINER)
    async with serving(server_side) as (servicer, server), dial(server.address, client_side) as connection:
        running = watch(connection)
        await running.read()
        token = client_side.bundle.token
        keys.renew(days=60)
        for each in (server_side, client_side):
            each.refresh()
        assert client_side.bundle.token != token
        # The old certificate would be refused now, the new one is not.
        late = time.time() + 31 * 86400
        server_side.clock = lambda: late
        assert (await get_run(connection)).run_id == "r1"
        server_side.clock = time.time
        servicer.release.set()
        assert await remaining(running) == [1, 2]


REFUSALS: dict[str, Callable[[Path], tuple[Identity | None, Identity | None, Peer, str]]] = {
    "another authority": lambda path: (
        as_role(make_keys(path / "other"), Role.ORCHESTRATOR),
        as_role(make_keys(path / "keys"), Role.OPERATOR),
        Peer.ORCHESTRATOR,
        "this run's authority did not sign",
    ),
    "expired": lambda path: (
        as_role(make_keys(path / "keys", age_days=31), Role.ORCHESTRATOR),
        as_role(Keyring(path / "keys"), Role.OPERATOR),
        Peer.ORCHESTRATOR,
        "certificate at .* of role orchestrator expired .*the clock here says",
    ),
    "not yet valid": lambda path: (
        as_role(make_keys(path / "keys", age_days=-1), Role.ORCHESTRATOR),
        as_role(Keyring(path / "keys"), Role.OPERATOR),
        Peer.ORCHESTRATOR,
        "valid only from .*, 86.* s before",
    ),
    "another role answers": lambda path: (
        as_role(make_keys(path / "keys"), Role.INFERENCE),
        as_role(Keyring(path / "keys"), Role.OPERATOR),
        Peer.ORCHESTRATOR,
        "is inference, not orchestrator",
    ),
    "plain server": lambda path: (
        None,
        as_role(make_keys(path / "keys"), Role.OPERATOR),
        Peer.ORCHESTRATOR,
        "speaks no TLS, and this process has keys",
    ),
    "plain client": lambda path: (
        as_role(make_keys(path / "keys"), Role.ORCHESTRATOR),
        None,
        Peer.ORCHESTRATOR,
        "speaks TLS, and this process has no keys",
    ),
    "no certificate of this run shown": lambda path: (
        as_role(make_keys(path / "keys", client_certificates=True), Role.ORCHESTRATOR),
        stranger(path),
        Peer.ORCHESTRATOR,
        "refuses the certificate of role operator",
    ),
    "own certificate expired": lambda path: (
        as_role(make_keys(path / "keys", client_certificates=True), Role.ORCHESTRATOR),
        grown_old(path),
        Peer.ORCHESTRATOR,
        "the certificate of role operator in .* expired at .*--renew",
    ),
}


def stranger(path: Path) -> Identity:
    """Trusts the run's authority, but has a certificate of another."""
    other = make_keys(path / "other", client_certificates=True)
    (other.folder / "operator" / "ca.pem").write_bytes((path / "keys" / "ca.pem").read_bytes())
    return as_role(other, Role.OPERATOR)


def grown_old(path: Path) -> Identity:
    """An operator with expired keys of the same run."""
    shutil.copytree(path / "keys", path / "old")
    Keyring(path / "old", clock=lambda: time.time() - 20 * 86400).renew(days=10)
    return as_role(Keyring(path / "old"), Role.OPERATOR)


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_handshake_that_fails_is_explained(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_BETWEEN_S", 0.1)
    answers, calls, peer, message = REFUSALS[case](tmp_path)
    async with serving(answers) as (servicer, server):
        async with dial(server.address, calls, peer) as connection:
            with pytest.raises(grpc.aio.AioRpcError):
                await get_run(connection, timeout_s=0.3)
        found = await asyncio.to_thread(handshake.refusal, server.address, calls, peer)
        assert found is not None
        with pytest.raises(AccessError, match=message):
            raise found
        assert servicer.num_calls == 0


async def test_a_good_handshake_and_an_absent_peer_are_no_matter_of_keys(keys: Keyring) -> None:
    who = as_role(keys, Role.OPERATOR)
    async with serving(as_role(keys, Role.ORCHESTRATOR)) as (_, server):
        assert await asyncio.to_thread(handshake.refusal, server.address, who, Peer.ORCHESTRATOR) is None
    assert await asyncio.to_thread(handshake.refusal, "127.0.0.1:1", who, Peer.ORCHESTRATOR) is None
    async with serving(None) as (_, server):
        assert await asyncio.to_thread(handshake.refusal, server.address, None, Peer.ORCHESTRATOR) is None


@pytest.mark.parametrize("after_handshake", [False, True])
async def test_a_peer_that_ends_in_the_middle_of_a_handshake_refuses_nobody(
    tmp_path: Path, after_handshake: bool
) -> None:
    """As after a kill or a restart: callers should wait for the server, and not end because of its certificate."""
    keys = make_keys(tmp_path / "keys", client_certificates=True)
    who, answers = as_role(keys, Role.INFERENCE), as_role(keys, Role.ORCHESTRATOR)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(answers.folder / "cert.pem", answers.folder / "key.pem")
    asked = 0

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if not after_handshake:
            await reader.readexactly(1)  # it has begun
        server.close()  # nobody listens any more
        at_once = struct.pack("ii", 1, 0)  # as the kernel does for a process that dies with unread bytes
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.transport.abort()

    server = await asyncio.start_server(end, "127.0.0.1", 0, ssl=context if after_handshake else None)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await asyncio.to_thread(handshake.refusal, address, who, Peer.ORCHESTRATOR) is None
    assert asked == 1


@MODES
async def test_what_serves_a_call_may_know_who_makes_it(tmp_path: Path, certificates: bool) -> None:
    keys = make_keys(tmp_path / "keys", client_certificates=certificates)
    seen: list[Holder | None] = []

    class Curious(RunServicer):
        async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
            seen.append(caller.get())
            return await super().GetRun(request, context)

    with identity.used(as_role(keys, Role.ORCHESTRATOR)):
        server = make_server(Curious())
    await server.start()
    for role in (Role.VIEWER, Role.TRAINER):
        async with dial(server.address, as_role(keys, role)) as connection:
            await get_run(connection)
    await server.stop(grace_s=0.1)
    assert [each.role for each in seen if each] == [Role.VIEWER, Role.TRAINER]
    assert len({each.name for each in seen if each}) == 2
    assert {each.shown for each in seen if each} == {"certificate" if certificates else "token"}


async def test_reflection_and_health_are_for_members(keys: Keyring) -> None:
    async with serving(as_role(keys, Role.ORCHESTRATOR)) as (_, server):
        server.set_ready()

        async def health(role: Role) -> int:
            async with dial(server.address, as_role(keys, role), Peer.MEMBER) as connection:
                with translated_errors("orchestrator"):
                    answer = await health_pb2_grpc.HealthStub(connection).Check(
                        health_pb2.HealthCheckRequest(), timeout=5
                    )
            return int(answer.status)

        for role in (Role.ENVGATEWAY, Role.VIEWER, Role.PUBLISHER):
            assert await health(role) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(PermissionDeniedError):
            await health(Role.AGENT)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        for role, may in ((Role.VIEWER, True), (Role.INFERENCE, False)):
            async with dial(server.address, as_role(keys, role)) as connection:
                call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo(iter([asked]))
                if may:
                    names = [each.name async for answer in call for each in answer.list_services_response.service]
                    assert "rollmill.v1.RunService" in names
                else:
                    with pytest.raises(PermissionDeniedError), translated_errors("orchestrator"):
                        await call.read()


async def test_keys_of_another_run_do_not_serve_this_one(keys: Keyring) -> None:
    with identity.used(as_role(keys, Role.ORCHESTRATOR)), pytest.raises(ConfigError, match=r"keys of run 'r1'.*'r7'"):
        make_server(RunServicer(), run_id="r7")


async def test_with_keys_a_server_binds_other_than_loopback_and_without_it_does_not(keys: Keyring) -> None:
    with identity.used(as_role(keys, Role.ORCHESTRATOR)):
        server = Server(service="orchestrator", instance_id="test", host="0.0.0.0", port=0)
    port = await server.start()
    await server.stop(grace_s=0.1)
    assert port
    with pytest.raises(ConfigError, match="rollmill keys"):
        Server(service="orchestrator", instance_id="test", host="0.0.0.0", port=0)


async def test_no_secret_is_in_the_logs_of_refusals(keys: Keyring) -> None:
    token = Keyring(keys.folder, clock=lambda: time.time() - 10 * 86400).token(Role.OPERATOR, 1)
    with capture_logs() as logs, pytest.raises(UnauthenticatedError):
        await ask_with(as_role(keys, Role.ORCHESTRATOR), f"Bearer {token}")
    refused = [each for each in logs if each["event"] == "rpc.refused"]
    assert refused and token[-20:] not in str(logs)


async def test_admitted_and_refused_calls_at_once_each_get_their_own_answer(keys: Keyring) -> None:
    """One method, one connection: the cached handler of a method belongs to no caller."""
    who, other = as_role(keys, Role.ORCHESTRATOR), Keyring(keys.folder)
    other.run = "r2"
    said = {
        keys.token(Role.OPERATOR, 1): "r1",
        keys.token(Role.AGENT, 1): "role agent may not call",
        other.token(Role.OPERATOR, 1): "of another run",
        "nothing": "is no run token",
    }

    async def ask(connection: grpc.aio.Channel, token: str) -> str:
        try:
            with translated_errors("orchestrator"):
                return (await get_run(connection, metadata=(("authorization", f"Bearer {token}"),))).run_id
        except AccessError as error:
            return error.message

    credentials = grpc.ssl_channel_credentials(who.bundle.ca)
    async with serving(who) as (servicer, server), grpc.aio.secure_channel(server.address, credentials) as connection:
        tokens_shown = [*said] * 50
        answers = await asyncio.gather(*(ask(connection, token) for token in tokens_shown))
        assert servicer.num_calls == 50
    wrong = [
        (answer, said[token]) for token, answer in zip(tokens_shown, answers, strict=True) if said[token] not in answer
    ]
    assert wrong == []


async def test_a_stranger_who_names_many_methods_fills_no_log(keys: Keyring) -> None:
    who = as_role(keys, Role.ORCHESTRATOR)
    async with serving(who) as (_, server):
        credentials = grpc.ssl_channel_credentials(who.bundle.ca)
        options = channel_options(Peer.ORCHESTRATOR)
        async with grpc.aio.secure_channel(server.address, credentials, options) as connection:
            with capture_logs() as logs:
                for number in range(50):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await connection.unary_unary(f"/rollmill.v1.Nothing/Method{number}")(b"", timeout=WAIT_S)
    told = [each for each in logs if each["event"] == "rpc.refused"]
    assert 1 <= len(told) < 25  # one a second, however slow the machine
