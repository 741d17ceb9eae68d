"""Errors keep their class, message, metadata and waiting time over the wire."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from structlog.testing import capture_logs

from services.common import errors
from services.common.aio import deadline
from services.common.errors import CapacityError, InfrastructureError, NotFoundError, RollmillError
from services.common.pb import errors_pb2
from services.common.rpc.client import CLASS_OF_REASON, channel, from_call, translated_errors
from services.common.telemetry.logs import LogEvent
from tests.contract.conftest import Served
from tests.contract.run_servicer import get_run, watch
from tests.ports import free_port


def tree(root: type[RollmillError] = RollmillError) -> list[type[RollmillError]]:
    """Every class that services.common.errors defines."""
    return [root] + [
        cls for child in root.__subclasses__() if child.__module__ == errors.__name__ for cls in tree(child)
    ]


LEAVES = [cls for cls in tree() if not cls.__subclasses__()]


def test_reasons_in_the_protos_are_those_of_the_exception_tree() -> None:
    prefix = "ERROR_REASON_"
    declared = {name.removeprefix(prefix) for name in errors_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert declared == {cls.reason for cls in tree()}


def test_every_reason_names_one_class_and_every_leaf_has_a_reason() -> None:
    assert set(LEAVES) <= set(CLASS_OF_REASON.values())
    assert CLASS_OF_REASON.keys() == {cls.reason for cls in tree()}


@pytest.mark.parametrize("cls", CLASS_OF_REASON.values(), ids=lambda cls: cls.__name__)
async def test_every_error_arrives_as_the_class_that_was_raised(served: Served, cls: type[RollmillError]) -> None:
    # Not "UNAVAILABLE": the channel would retry that, as test_channel shows.
    connection_call = watch(served.connection)
    served.servicer.num_messages = 0
    served.servicer.failure = lambda: cls("what happened: 7 of 8 – full", retry_after_s=1.5, policy="model0")
    with pytest.raises(RollmillError) as caught, translated_errors("orchestrator"):
        await connection_call.read()
    assert type(caught.value) is cls
    assert caught.value.message == "what happened: 7 of 8 – full"
    assert caught.value.metadata == {"policy": "model0"}
    assert caught.value.retry_after_s == 1.5


async def test_the_wire_has_one_error_info_of_our_domain_and_retry_info(served: Served) -> None:
    served.servicer.failure = lambda: CapacityError("full", retry_after_s=2.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get_run(served.connection)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert [detail.TypeName() for detail in status.details] == ["google.rpc.ErrorInfo", "google.rpc.RetryInfo"]
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.domain, info.reason) == ("rollmill", "CAPACITY_EXHAUSTED")
    assert retry.retry_delay.seconds == 2


async def test_a_bug_is_told_as_internal_error_and_its_trace_stays_in_the_log(served: Served) -> None:
    served.servicer.failure = lambda: KeyError("secret")
    with capture_logs() as logs, pytest.raises(RollmillError) as caught, translated_errors("orchestrator"):
        await get_run(served.connection)
    assert type(caught.value) is RollmillError
    assert caught.value.message == "internal error"
    (event,) = [event for event in logs if event["event"] == LogEvent.RPC_FAILED]
    assert event["method"] == "/rollmill.v1.RunService/GetRun"
    assert event["exc_info"]


async def test_the_reason_survives_a_message_longer_than_the_metadata_limit(served: Served) -> None:
    served.servicer.failure = lambda: NotFoundError("é" * 50_000, detail="ü" * 50_000)
    with pytest.raises(NotFoundError) as caught, translated_errors("orchestrator"):
        await get_run(served.connection)
    assert caught.value.message.startswith("éé")
    assert caught.value.message.endswith("...")


async def test_metadata_may_have_the_names_of_our_arguments(served: Served) -> None:
    def failure() -> RollmillError:
        error = NotFoundError("gone")
        error.metadata = {"message": "m", "retry_after_s": "9", "self": "s"}
        return error

    served.servicer.failure = failure
    with pytest.raises(NotFoundError) as caught, translated_errors("orchestrator"):
        await get_run(served.connection)
    assert caught.value.metadata == {"message": "m", "retry_after_s": "9", "self": "s"}
    assert caught.value.retry_after_s is None


async def test_nobody_listening_is_an_infrastructure_error_that_names_the_peer() -> None:
    async with channel(f"127.0.0.1:{free_port()}") as connection:
        with (
            pytest.raises(InfrastructureError, match=r"^the orchestrator: UNAVAILABLE"),
            translated_errors("the orchestrator"),
        ):
            await watch(connection).read()


async def test_a_client_that_leaves_while_the_server_writes_is_no_error_and_ends_the_stream_at_once(
    served: Served,
) -> None:
    """More than fits into the windows of HTTP/2, so that the servicer is suspended at its yield."""
    served.servicer.num_messages = 100
    served.servicer.message_size = 1_000_000
    served.servicer.release.set()
    with capture_logs() as logs:
        call = watch(served.connection)
        await call.read()
        call.cancel()
        async with deadline(30.0, "the end of the stream"):
            await served.servicer.ended.wait()
        await get_run(served.connection)
    # Ended in the task of the call, where its context is, and not by the garbage collector.
    assert served.servicer.ended_in is served.servicer.began_in
    assert [event["event"] for event in logs if event["log_level"] in ("error", "warning")] == []


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
def test_what_the_transport_says_by_itself_is_an_infrastructure_error(code: grpc.StatusCode) -> None:
    nothing = grpc.aio.Metadata()
    said = grpc.aio.AioRpcError(code, nothing, nothing, details="Stream removed")
    found = from_call(said, "orchestrator 127.0.0.1:1")
    assert type(found) is InfrastructureError
    assert "orchestrator 127.0.0.1:1" in found.message and "Stream removed" in found.message
