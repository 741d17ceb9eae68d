"""The server recipe: readiness, reflection, refusals, and the order of a stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.aio import deadline
from services.common.errors import ConfigError, InfrastructureError
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc import server as serving
from services.common.rpc.client import channel, translated_errors
from services.common.rpc.server import Server
from tests.contract.conftest import Served
from tests.contract.run_servicer import (
    SERVICE,
    STREAMING_SERVICE,
    RunServicer,
    make_server,
    number_of,
    remaining,
    watch,
)
from tests.waiting import WAIT_S

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


async def health(connection: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(connection).Check(request, timeout=WAIT_S)
    return int(response.status)


async def status(connection: grpc.aio.Channel) -> status_pb2.GetStatusResponse:
    return await status_pb2_grpc.StatusServiceStub(connection).GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)


@pytest.mark.parametrize("service", ["", SERVICE, "rollmill.v1.StatusService"])
async def test_health_is_serving_only_after_readiness(served: Served, service: str) -> None:
    assert await health(served.connection, service) == NOT_SERVING
    assert (await status(served.connection)).state == "starting"
    served.server.set_ready()
    assert await health(served.connection, service) == SERVING
    assert (await status(served.connection)).state == "ready"


async def test_reflection_lists_every_service_and_describes_its_calls(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.connection)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=WAIT_S)]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        SERVICE,
        STREAMING_SERVICE,
        "rollmill.v1.StatusService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert any(b"StopRun" in file for file in described.file_descriptor_response.file_descriptor_proto)


async def test_status_tells_who_it_is_and_its_gauges(served: Served) -> None:
    served.server.set_gauges(lambda: {"free_slots": 3.0}, lambda: {"waiting_for": "weights"})
    answer = await status(served.connection)
    assert (answer.service, answer.instance_id, answer.run_id) == ("orchestrator", "test", "r1")
    assert (dict(answer.gauges), dict(answer.labels)) == ({"free_slots": 3.0}, {"waiting_for": "weights"})
    assert answer.started_at.seconds > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.5", "example.org", ""])
def test_a_bind_that_is_not_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="without keys"):
        Server(service="inference", instance_id="a", host=host, port=0)


@pytest.mark.needs("IPv6 loopback")
async def test_ipv6_loopback_is_served() -> None:
    server = Server(service="orchestrator", instance_id="o", host="::1", port=0)
    await server.start()
    assert server.address.startswith("[::1]:")
    async with channel(server.address) as connection:
        assert (await status(connection)).instance_id == "o"
    await server.stop(grace_s=0.1)


async def test_a_port_in_use_is_told_with_the_setting_to_change(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PORT_PATIENCE_S", 0.0)
    second = make_server(RunServicer(), port=served.server.port, port_setting="inference.a.port")
    with pytest.raises(ConfigError) as caught:
        await second.start()
    assert str(served.server.port) in caught.value.message
    assert "the port is in use" in caught.value.message
    assert "inference.a.port" in caught.value.message
    await second.stop(grace_s=0.1)  # stopping what never started does no harm


async def test_a_port_that_a_predecessor_holds_a_moment_longer_is_waited_for() -> None:
    """As that of a process that was told to end while another is started in its place."""
    with socket.socket() as predecessor:
        predecessor.bind(("127.0.0.1", 0))
        predecessor.listen()
        second = make_server(RunServicer(), port=predecessor.getsockname()[1])
        starting = asyncio.create_task(second.start())
        await asyncio.sleep(0.5)
        assert not starting.done()
    async with asyncio.timeout(WAIT_S):
        assert await starting == second.port
    async with channel(second.address) as connection:
        assert (await status(connection)).instance_id
    await second.stop(grace_s=0.1)


async def test_a_stop_refuses_new_calls_and_lets_running_ones_end(served: Served) -> None:
    call = watch(served.connection)
    await call.read()
    seen: list[str] = []

    async def when_stopping() -> None:
        async with channel(served.server.address) as late:
            with pytest.raises(InfrastructureError), translated_errors("orchestrator"):
                await watch(late).read()
        seen.append("refused")
        served.servicer.release.set()

    served.server.on_stop(when_stopping)
    served.server.on_stop(lambda: seen.append("called in order"))
    async with deadline(10.0, "the stop"):
        await served.server.stop(grace_s=60.0)
    assert seen == ["refused", "called in order"]
    assert await remaining(call) == [1.0, 2.0]


async def test_a_failing_stop_callback_is_raised_after_the_stop(served: Served) -> None:
    def fail() -> None:
        raise OSError("no space left")

    called: list[str] = []
    served.server.on_stop(fail)
    served.server.on_stop(lambda: called.append("next"))
    with pytest.raises(OSError, match="no space left"):
        await served.server.stop(grace_s=0.1)
    assert called == ["next"]
    with pytest.raises(InfrastructureError), translated_errors("orchestrator"):
        await watch(served.connection).read()


async def test_a_stream_begun_before_the_signal_delivers(repository: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.contract.stream_server", cwd=repository, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with deadline(60.0, "the server's port"):
            port = int(await process.stdout.readline())
        async with channel(f"127.0.0.1:{port}") as connection:
            call = watch(connection)
            async with deadline(30.0, "the stream and the server's end"):
                numbers = [number_of(await call.read())]
                process.send_signal(signal.SIGTERM)
                numbers += await remaining(call)
                assert await process.wait() == 0
        assert numbers == [0, 1, 2]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
