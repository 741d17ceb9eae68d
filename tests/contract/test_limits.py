"""The resources that one peer may take from a server, over real gRPC and over raw sockets with invalid bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks._hostile import MODULES, all_rpcs
from services.common.errors import CapacityError, InvalidRequestError
from services.common.net.hosts import peer_of_grpc
from services.common.pb import environment_pb2, pool_pb2, pool_pb2_grpc, status_pb2, status_pb2_grpc
from services.common.rpc import limits
from services.common.rpc.client.channel import DEADLINES, channel, translated_errors
from services.common.rpc.interceptors import num_fields
from services.common.rpc.limits import LIMITS, MOST_BYTES, Limit, Rates, limit_of
from services.common.rpc.server import Server
from services.orchestrator.rpc.servicer_pool import PoolServicer
from tests.contract.conftest import Served
from tests.contract.run_servicer import RunServicer, make_server
from tests.waiting import WAIT_S

ASK = status_pb2.GetStatusRequest()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def every_method() -> list[str]:
    modules = (*MODULES, health_pb2, reflection_pb2)
    services: list[ServiceDescriptor] = [s for m in modules for s in m.DESCRIPTOR.services_by_name.values()]
    return [method.name for service in services for method in service.methods]


def test_every_rpc_has_limits_and_no_limit_is_of_an_rpc_that_is_gone() -> None:
    assert set(LIMITS) == set(every_method()) - {"List"}  # health's list of services: the default does
    assert set(DEADLINES) == {rpc.name for rpc in all_rpcs()}


def test_methods_are_known_by_their_paths_too() -> None:
    assert limit_of("/rollmill.v1.PoolService/ReportReplica") is LIMITS["ReportReplica"]
    assert limit_of("/somebody.Else/Thing") is limits.DEFAULT


def test_no_limit_is_near_what_a_healthy_run_does() -> None:
    """A report each 2 s from each of a hundred replicas behind one address; thousands of rewards a second."""
    assert LIMITS["ReportReplica"].calls_per_s >= 5 * 100 / 2
    assert LIMITS["ComputeReward"].calls_per_s >= 10_000 and LIMITS["ComputeReward"].concurrent >= 4096
    assert LIMITS["StreamTrajectories"].request_bytes == MOST_BYTES


def test_a_burst_passes_then_the_rate_holds_and_a_pause_restores_the_burst() -> None:
    now = 0.0
    rates, limit = Rates(clock=lambda: now), Limit(calls_per_s=10.0, burst=5)

    def num_passed(attempts: int) -> int:
        passed = 0
        for _ in range(attempts):
            with contextlib.suppress(CapacityError), rates.call("a", "Method", limit):
                passed += 1
        return passed

    assert num_passed(7) == 5
    with pytest.raises(CapacityError) as caught, rates.call("a", "Method", limit):
        pass
    assert caught.value.metadata == {"limit": "Method.calls_per_s"}
    assert caught.value.retry_after_s == pytest.approx(0.1)
    now += 0.1
    assert num_passed(2) == 1
    now += 60.0
    assert num_passed(100) == 5


def test_peers_and_methods_do_not_share_a_limit() -> None:
    rates, limit = Rates(clock=lambda: 0.0), Limit(calls_per_s=1.0, burst=1)
    for peer, method in (("a", "One"), ("a", "Two"), ("b", "One")):
        with rates.call(peer, method, limit):
            pass
    with pytest.raises(CapacityError), rates.call("a", "One", limit):
        pass


def test_the_table_of_peers_is_bounded() -> None:
    rates = Rates(most_buckets=100)
    for number in range(10_000):
        with rates.call(f"peer {number}", "Method", limits.DEFAULT):
            pass
    assert len(rates) == 100 and rates.num_running == 0


def test_calls_that_run_at_once_are_bounded_and_are_counted_down() -> None:
    rates, limit = Rates(), Limit(concurrent=2)
    with rates.call("a", "Method", limit), contextlib.ExitStack() as second:
        second.enter_context(rates.call("a", "Method", limit))
        with pytest.raises(CapacityError, match="2 calls"), rates.call("a", "Method", limit):
            pass
        second.close()
        with rates.call("a", "Method", limit):
            assert rates.num_running == 2
    assert rates.num_running == 0


async def test_who_calls_too_often_is_told_which_limit_and_when_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "GetStatus", Limit(calls_per_s=1.0, burst=3))
    stub = status_pb2_grpc.StatusServiceStub(served.connection)
    for _ in range(3):
        await stub.GetStatus(ASK, timeout=WAIT_S)
    with pytest.raises(CapacityError) as caught, translated_errors("the server"):
        await asyncio.gather(*(stub.GetStatus(ASK, timeout=WAIT_S) for _ in range(20)))  # however slow the machine
    assert caught.value.metadata["limit"] == "GetStatus.calls_per_s" and caught.value.retry_after_s
    with pytest.raises(grpc.aio.AioRpcError, match="more often"):
        await answers(served.server)  # another connection of the same address


@pytest.mark.parametrize(
    ("connection", "peer"),
    [
        ("ipv4:127.0.0.1:51000", "loopback"),
        ("ipv4:127.77.0.9:1", "loopback"),
        ("ipv6:%5B::1%5D:51000", "loopback"),
        ("ipv6:[::1]:51000", "loopback"),
        ("ipv6:%5B::ffff:127.0.0.1%5D:9", "loopback"),
        ("ipv4:10.0.0.7:51000", "10.0.0.7"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:9", "10.0.0.7"),
        ("ipv6:%5Bfd00::1:2:3:4%5D:1", "fd00::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("unix:", "unix"),
        ("unix:@hidden", "unix"),
        ("ipv4:nonsense:1", "nonsense"),
    ],
)
def test_a_peer_is_an_address_and_never_a_connection(connection: str, peer: str) -> None:
    assert peer_of_grpc(connection) == peer
    assert peer_of_grpc(connection.rpartition(":")[0] + ":9") == peer or peer == "unix"


async def test_reports_of_a_stream_have_the_rate_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is one call: its messages are counted by themselves."""
    monkeypatch.setitem(LIMITS, "ReportReplica", Limit(calls_per_s=0.001, burst=3))
    unused: Any = None
    servicer = PoolServicer(
        "run", replicas=unused, gateway=unused, pool=unused, ledgers={}, control=unused, ingest=unused, metrics=unused
    )
    noted: list[str] = []

    def note(report: pool_pb2.ReportReplicaRequest) -> pool_pb2.ReportReplicaResponse:
        noted.append(report.replica_id)
        return pool_pb2.ReportReplicaResponse()

    monkeypatch.setattr(servicer, "_note_report", note)
    server = Server(service="orchestrator", instance_id="test", host="127.0.0.1", port=0)
    server.add(pool_pb2_grpc.add_PoolServiceServicer_to_server, servicer, "rollmill.v1.PoolService")
    await server.start()
    try:
        async with asyncio.timeout(WAIT_S), channel(server.address) as connection:
            stream = pool_pb2_grpc.PoolServiceStub(connection).StreamReports()
            for number in range(4):
                report = pool_pb2.ReportReplicaRequest(replica_id=str(number))
                await stream.write(pool_pb2.StreamReportsRequest(report=report))
                if number < 3:
                    assert await stream.read()
            with pytest.raises(CapacityError) as refused, translated_errors("orchestrator"):
                await stream.read()
    finally:
        await server.stop(grace_s=0.0)
    assert noted == ["0", "1", "2"] and refused.value.metadata["limit"] == "ReportReplica.calls_per_s"


def test_two_hundred_replicas_of_one_machine_report_within_the_limits() -> None:
    """Without keys they are one peer: the calls of each in a minute pass, and so does their simultaneous start."""
    now = 0.0
    rates = Rates(clock=lambda: now)
    replicas, settled = (
        200,
        {"ReportReplica": 0.5, "GetStatus": 1.0, "Check": 0.1, "GetManifest": 0.5, "FetchWeights": 0.5},
    )
    for method in ("JoinPool", "GetRun", "StreamTrajectories", *settled):
        for _ in range(replicas):
            with rates.call("loopback", method, limit_of(method)):
                pass
    for second in range(60):
        now = float(second + 1)
        for method, calls_per_s in settled.items():
            for _ in range(int(replicas * calls_per_s)):
                with rates.call("loopback", method, limit_of(method)):
                    pass


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x0a\xff", "cannot be parsed"),
        (b"\x0a\x02\xff\xfe", "cannot be parsed"),  # no UTF-8
        (b"\x9b\x06" * 30_000, "cannot be parsed"),  # groups in groups
        (b"\x0a\x80\x80\x04" + b"x" * 65_536, "65540 bytes; at most 65536"),
    ],
)
async def test_a_message_that_is_none_or_too_large_is_the_callers_mistake(
    served: Served, data: bytes, told: str
) -> None:
    call = served.connection.unary_unary("/rollmill.v1.RunService/DrainReplica")
    with pytest.raises(InvalidRequestError, match=told), translated_errors("the server"):
        await call(data, timeout=WAIT_S)


async def test_an_answer_that_is_too_large_is_told_in_words(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "GetStatus", Limit(response_bytes=10))
    with pytest.raises(InvalidRequestError, match="at most 10 are sent"), translated_errors("the server"):
        await status_pb2_grpc.StatusServiceStub(served.connection).GetStatus(ASK, timeout=WAIT_S)


async def test_what_no_method_takes_is_refused_before_it_is_read(served: Served) -> None:
    call = served.connection.unary_unary("/rollmill.v1.RunService/DrainReplica")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"x" * (MOST_BYTES + 1), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=WAIT_S, metadata=(("x-run-id", "x" * 60_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_requests_of_a_message_are_counted_before_any_is_parsed() -> None:
    def message(number: int) -> bytes:
        request = environment_pb2.ComputeRewardRequest(reward="math", task_json=b"\n\x00" * 300, completion="x" * 200)
        return environment_pb2.ComputeRewardsRequest(requests=[request] * number).SerializeToString()

    assert [num_fields(message(number), 256) for number in (0, 1, 256, 257, 9999)] == [0, 1, 256, 257, 257]
    assert num_fields(b"\x0a\x00" * 1_900_000, 256) == 257
    assert num_fields(b"\x10\xff\xff\xff\x7f" + b"\x0a\x00" * 1_000_000, 256) == 257  # behind another field
    assert num_fields(b"\x0b" + b"\x0a\x00" * 1_000_000, 256) == 257  # in a group
    assert num_fields(b"\x0a\xff", 256) == 1  # cut: for the parser to refuse
    assert num_fields(b"\x0a" + b"\xff" * 3_900_000, 256) == 1  # a number of any length: read at most ten bytes of it


# -- connections that do not speak ---------------------------------------------------------------------------------------


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """A server that waits half a second for a handshake, and holds few connections."""
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 150)
    server = make_server(RunServicer())
    await server.start()
    yield server
    await server.stop(grace_s=1.0)


async def connect(server: Server, first: bytes = b"") -> socket.socket:
    found = socket.socket()
    found.setblocking(False)
    await asyncio.get_running_loop().sock_connect(found, ("127.0.0.1", server.port))
    if first:
        await asyncio.get_running_loop().sock_sendall(found, first)
    return found


async def ended(found: socket.socket) -> bool:
    """Whether the server hangs up, within a generous time."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            while await asyncio.get_running_loop().sock_recv(found, 4096):
                pass
    return True


async def answers(server: Server) -> bool:
    async with grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as connection:
        await status_pb2_grpc.StatusServiceStub(connection).GetStatus(ASK, timeout=WAIT_S)
    return True


@pytest.mark.parametrize(
    "first", [b"", PREFACE[:10], PREFACE, PREFACE + EMPTY_SETTINGS, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
async def test_who_connects_and_does_not_speak_is_hung_up_on_and_disturbs_nobody(hasty: Server, first: bytes) -> None:
    silent = await connect(hasty, first)
    assert await answers(hasty)
    assert await ended(silent)
    silent.close()


async def test_half_a_frame_holds_nobody_up(hasty: Server) -> None:
    # A header frame that promises 16,000 bytes and brings four.
    half = await connect(hasty, PREFACE + SETTINGS + b"\x00\x3e\x80\x01\x04\x00\x00\x00\x01" + b"\x00" * 4)
    assert await answers(hasty)
    half.close()


def descriptors() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


async def test_two_hundred_idle_connections_leave_room_and_are_closed(hasty: Server) -> None:
    before = descriptors()
    idle = [await connect(hasty) for _ in range(200)]
    try:
        held = descriptors() - before - len(idle)  # by the server, which is in this process
        assert held <= 160, "more connections are held than the limit"
        assert all([await ended(one) for one in idle])
        assert await answers(hasty)
    finally:
        for one in idle:
            one.close()
