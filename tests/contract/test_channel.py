"""Channels: which calls are retried, which wait for their peer, which ids travel, and the table of deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from structlog.contextvars import bound_contextvars
from structlog.testing import LogCapture, capture_logs

from services.common.errors import ConfigError, DeadlineError, InfrastructureError, WeightsStaleError
from services.common.pb import (
    pool_pb2,
    pool_pb2_grpc,
)
from services.common.rpc import run_client
from services.common.rpc.client import channel, translated_errors, with_ids
from services.common.rpc.run_client import fetch_run
from services.common.rpc.server import Server
from tests.contract.conftest import Served
from tests.contract.run_servicer import RunServicer, get_run, make_server, watch
from tests.ports import free_port
from tests.waiting import until


async def test_unavailable_is_retried_up_to_four_attempts(served: Served) -> None:
    served.servicer.failure = lambda: InfrastructureError("starting")
    with pytest.raises(InfrastructureError, match="starting"), translated_errors("orchestrator"):
        await get_run(served.connection, timeout_s=30.0)
    assert served.servicer.num_calls == 4


async def test_other_errors_are_not_retried(served: Served) -> None:
    served.servicer.failure = lambda: WeightsStaleError("behind")
    with pytest.raises(WeightsStaleError), translated_errors("orchestrator"):
        await get_run(served.connection)
    assert served.servicer.num_calls == 1


async def test_calls_that_are_not_safe_are_not_retried(served: Served) -> None:
    served.servicer.failure = lambda: InfrastructureError("starting")
    served.servicer.num_messages = 0
    with pytest.raises(InfrastructureError), translated_errors("orchestrator"):
        await watch(served.connection).read()
    assert served.servicer.num_calls == 1


async def test_a_safe_call_waits_for_a_peer_that_starts_later() -> None:
    port = free_port()
    async with channel(f"127.0.0.1:{port}") as connection:
        call = asyncio.ensure_future(get_run(connection, timeout_s=30.0))
        await until(lambda: connection.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        server = make_server(RunServicer(), port=port)
        await server.start()
        assert (await call).run_id == "r1"
    await server.stop(grace_s=0.1)


@pytest.fixture
def events() -> LogCapture:
    """Every event of the process, with the ids that are bound where it was logged."""
    capture = LogCapture()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, capture])
    return capture


def asked(events: LogCapture) -> list[dict[str, object]]:
    return [dict(event) for event in events.entries if event["event"] == "run.asked"]


async def test_the_callers_ids_are_on_the_servers_log_lines(events: LogCapture) -> None:
    server = make_server(RunServicer())
    await server.start()
    async with channel(server.address) as connection:
        with bound_contextvars(run="r7", request="q1"):
            await get_run(connection)
        await get_run(connection, metadata=(("x-run-id", "r8"),))
        await get_run(connection)
        await get_run(connection)
    await server.stop(grace_s=0.1)
    first, second, third, fourth = asked(events)
    assert (first["run"], first["request"]) == ("r7", "q1")
    assert second["run"] == "r8"
    assert "run" not in third
    assert third["request"] != fourth["request"]


async def test_streams_carry_the_ids_and_release_them_when_they_are_cancelled(events: LogCapture) -> None:
    servicer = RunServicer()
    server = make_server(servicer)
    await server.start()
    async with channel(server.address) as connection:
        with bound_contextvars(run="r7"):
            call = watch(connection)
            await call.read()
        call.cancel()
        await servicer.ended.wait()
    await server.stop(grace_s=0.1)
    assert [event for event in events.entries if event["log_level"] == "error"] == []


def test_ids_that_http_refuses_are_left_out() -> None:
    with bound_contextvars(run="läuft", request="a\nb"):
        assert with_ids() == ()


async def reading(served: Served) -> tuple[Any, asyncio.Future[None]]:
    """A stream that the server has begun, and the task that reads it."""

    async def read() -> None:
        with translated_errors("orchestrator", "PullBatch"):
            await call.read()
            await call.read()

    call = watch(served.connection)
    reader = asyncio.ensure_future(read())
    await until(lambda: served.servicer.num_calls != 0)
    return call, reader


async def test_a_stream_whose_call_was_cancelled_is_an_infrastructure_error(served: Served) -> None:
    call, reader = await reading(served)
    call.cancel()
    with pytest.raises(InfrastructureError, match="PullBatch"):
        await reader


async def test_cancelling_the_reader_itself_stays_a_cancellation(served: Served) -> None:
    _, reader = await reading(served)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


class Ending(pool_pb2_grpc.PoolServiceServicer):
    """Ends a stream with an error, when released, before its first message."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.release = asyncio.Event()

    async def StreamTrajectories(
        self, requests: Any, context: Any
    ) -> AsyncIterator[pool_pb2.StreamTrajectoriesResponse]:
        self.began.set()
        await self.release.wait()
        raise InfrastructureError("the orchestrator is stopping")
        yield


async def test_cancelling_the_reader_at_the_moment_at_which_the_call_ends_stays_a_cancellation() -> None:
    """Peers are often closed when the orchestrator ends, and grpc.aio raises only one of the two."""

    async def read() -> None:
        with translated_errors("orchestrator", "StreamTrajectories"):
            await call.read()

    ending = Ending()
    server = Server(service="orchestrator", instance_id="test", host="127.0.0.1", port=0)
    server.add(pool_pb2_grpc.add_PoolServiceServicer_to_server, ending, "rollmill.v1.PoolService")
    await server.start()
    async with channel(server.address) as connection:
        call = pool_pb2_grpc.PoolServiceStub(connection).StreamTrajectories()
        reader = asyncio.ensure_future(read())
        call.add_done_callback(lambda _: reader.cancel())
        await ending.began.wait()
        ending.release.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
    await server.stop(grace_s=0.1)


async def test_asking_an_orchestrator_that_is_not_there_names_address_and_remedy() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineError) as caught:
        await fetch_run(address, timeout_s=0.3)
    assert address in caught.value.message
    assert "python -m services.orchestrator" in caught.value.message


async def test_what_is_in_the_way_of_the_first_answer_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_client, "FIRST_WORD_S", 0.1)
    monkeypatch.setitem(run_client.DEADLINES, "GetRun", 0.2)  # of each try, so that there are several
    address = f"127.0.0.1:{free_port()}"
    with capture_logs() as logs, pytest.raises(DeadlineError, match="is it running"):
        await fetch_run(address, timeout_s=3.0)
    assert [entry["address"] for entry in logs if entry["event"] == "orchestrator.waited_for"] == [address]


@pytest.mark.parametrize("place", ["nonsense", "host:", ":50050", "host:0", "host:port", "host:70000"])
async def test_what_is_no_address_is_not_waited_for(place: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        await fetch_run(place)
