"""In a run with keys the bulk plane is encrypted, with a key that only authorised receivers get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import zmq

from services.cli.keys import Keyring
from services.common.errors import PermissionDeniedError
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.client import channel, translated_errors
from services.common.security import identity
from services.common.security.keys import Peer, Role
from services.common.telemetry.logs import LogEvent
from services.common.transfer.bulk import KEY_BYTES, REQUEST, new_keys
from services.common.weights.snapshot import PayloadRequest
from services.common.wire import write
from tests.integration.weights.transfer_world import POLICY, RUN, MemorySource, Sender, fetched, sending
from tests.keys import as_role, make_keys
from tests.waiting import WAIT_S

SIZE = 3_000_000


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return make_keys(tmp_path / "keys", RUN)


@asynccontextmanager
async def publishing(keys: Keyring, source: MemorySource) -> AsyncIterator[Sender]:
    with identity.used(as_role(keys, Role.PUBLISHER)):
        async with sending(source) as sender:
            with identity.used(as_role(keys, Role.INFERENCE)):
                yield sender


async def manifest(sender: Sender, role: Role, keys: Keyring) -> weights_pb2.GetManifestResponse:
    request = write(
        PayloadRequest(run_id=RUN, policy=POLICY, version=1, transports=("bulk",)), weights_pb2.GetManifestRequest()
    )
    with identity.used(as_role(keys, role)):
        async with channel(sender.address, Peer.WEIGHTS) as connection:
            with translated_errors("publisher"):
                return await weights_pb2_grpc.WeightServiceStub(connection).GetManifest(request, timeout=WAIT_S)


async def test_a_peer_without_permission_gets_neither_ticket_nor_key(keys: Keyring) -> None:
    async with publishing(keys, MemorySource(SIZE)) as sender:
        answer = await manifest(sender, Role.INFERENCE, keys)
        assert len(answer.bulk.server_key) == KEY_BYTES
        for role in (Role.VIEWER, Role.AGENT, Role.TRAINER):
            with pytest.raises(PermissionDeniedError):
                await manifest(sender, role, keys)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "another key"])
async def test_a_ticket_without_the_right_key_brings_nothing(keys: Keyring, encrypted: bool) -> None:
    async with publishing(keys, MemorySource(SIZE)) as sender:
        answer = await manifest(sender, Role.INFERENCE, keys)
        with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
            thief.linger = 0
            if encrypted:
                thief.curve_publickey, thief.curve_secretkey = new_keys()
                thief.curve_serverkey = new_keys()[0]
            thief.connect(answer.bulk.endpoint)
            thief.send(REQUEST.pack(answer.bulk.ticket, 0, 1000))
            assert not await asyncio.to_thread(thief.poll, 1000)
        assert sender.bulk.num_transfers == 0


async def test_a_key_that_is_not_the_sockets_costs_the_bulk_plane_and_not_the_version(keys: Keyring) -> None:
    source = MemorySource(SIZE)
    async with publishing(keys, source) as sender:
        sender.bulk.public_key = new_keys()[0]
        with structlog.testing.capture_logs() as logs:
            got = await fetched(sender.address, source.version, transports=["bulk"])
    assert got.transport == "grpc" and got.data == source.data.data
    assert [each["transport"] for each in logs if each["event"] == LogEvent.TRANSPORT_FAILED] == ["bulk"]


async def test_over_tls_a_bulk_socket_without_a_key_is_not_gone_to(keys: Keyring) -> None:
    source = MemorySource(SIZE)
    async with publishing(keys, source) as sender:
        sender.bulk.public_key = b""
        got = await fetched(sender.address, source.version, transports=["bulk"])
    assert got.transport == "grpc"


async def test_a_replica_fetches_over_the_encrypted_bulk_plane_where_its_source_is(keys: Keyring) -> None:
    source = MemorySource(SIZE)
    async with publishing(keys, source) as sender:
        sender.bulk.endpoint = sender.bulk.endpoint.replace("127.0.0.1", "0.0.0.0")
        got = await fetched(sender.address, source.version, transports=["bulk"])
    assert got.transport == "bulk" and got.data == source.data.data
