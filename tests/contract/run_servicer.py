"""A small servicer of real stubs: the test sets the answer of GetRun and releases the messages of PullBatch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import structlog

from services.common.pb import run_pb2, run_pb2_grpc, training_pb2, training_pb2_grpc
from services.common.rpc.server import Server

log = structlog.get_logger()

SERVICE = "rollmill.v1.RunService"
STREAMING_SERVICE = "rollmill.v1.TrainingService"


class RunServicer(run_pb2_grpc.RunServiceServicer, training_pb2_grpc.TrainingServiceServicer):
    def __init__(self) -> None:
        self.failure: Callable[[], Exception] | None = None
        self.num_calls = 0
        self.times_left: list[float | None] = []
        self.ended = asyncio.Event()
        self.release = asyncio.Event()
        self.num_messages = 3
        self.message_size = 0
        self.ended_in: asyncio.Task[Any] | None = None
        self.began_in: asyncio.Task[Any] | None = None

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        self.num_calls += 1
        self.times_left.append(context.time_remaining())
        log.info("run.asked")
        if self.failure is not None:
            raise self.failure()
        return run_pb2.GetRunResponse(run_id="r1")

    async def PullBatch(
        self, request: training_pb2.PullBatchRequest, context: Any
    ) -> AsyncIterator[training_pb2.PullBatchResponse]:
        """One message at once, the others when released; then the failure, if there is one."""
        self.num_calls += 1
        self.began_in = asyncio.current_task()
        try:
            for number in range(self.num_messages):
                if number == 1:
                    await self.release.wait()
                sequence = training_pb2.TrainingSequence(position=number, sequence_id="x" * self.message_size)
                yield training_pb2.PullBatchResponse(chunk=training_pb2.SequenceChunk(sequences=[sequence]))
            if self.failure is not None:
                raise self.failure()
        finally:
            self.ended_in = asyncio.current_task()
            self.ended.set()


def make_server(servicer: RunServicer, port: int = 0, **settings: Any) -> Server:
    server = Server(service="orchestrator", instance_id="test", host="127.0.0.1", port=port, **settings)
    server.add(run_pb2_grpc.add_RunServiceServicer_to_server, servicer, SERVICE)
    server.add(training_pb2_grpc.add_TrainingServiceServicer_to_server, servicer, STREAMING_SERVICE)
    return server


def watch(connection: grpc.aio.Channel) -> Any:
    return training_pb2_grpc.TrainingServiceStub(connection).PullBatch(training_pb2.PullBatchRequest())


def number_of(response: training_pb2.PullBatchResponse) -> int:
    """The place of a message in its stream."""
    return response.chunk.sequences[0].position


async def remaining(call: Any) -> list[int]:
    """The remaining messages of a stream, to its end. (grpc forbids iterating over a call after ``read``.)"""
    numbers: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        numbers.append(number_of(response))
    return numbers


async def get_run(connection: grpc.aio.Channel, timeout_s: float = 10.0, **arguments: Any) -> run_pb2.GetRunResponse:
    stub = run_pb2_grpc.RunServiceStub(connection)
    return await stub.GetRun(run_pb2.GetRunRequest(), timeout=timeout_s, **arguments)
