"""gRPC servicer of the judge: convert, call the queue, convert. No module behind this one sees grpc or protobuf."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import CapacityError, InvalidRequestError
from services.common.pb import judge_pb2 as pb
from services.common.pb import judge_pb2_grpc
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue.base import JobQueue
from services.envgateway.rpc.convert import judge_request_from_proto, judge_result_to_proto
from services.envgateway.rpc.deadlines import time_left_s
from services.envgateway.sandbox.bare.statuses import RunStatus

Context = grpc.aio.ServicerContext[Any, Any]

_IN_FLIGHT = 256  # of one batch; the others wait here, so that one batch does not fill the queue


class JudgeServicer(judge_pb2_grpc.JudgeServiceServicer):
    """Serves the judge's calls. A call that is cancelled, or whose deadline passes, is cancelled in the queue and
    killed in the sandbox."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def Judge(self, request: pb.JudgeRequest, context: Context) -> pb.JudgeResponse:
        return judge_result_to_proto(await self._judge(judge_request_from_proto(request), time_left_s(context)))

    async def JudgeBatch(self, request: pb.JudgeBatchRequest, context: Context) -> AsyncIterator[pb.JudgeBatchResponse]:
        end = asyncio.get_running_loop().time() + time_left_s(context)
        waiting = iter(enumerate(request.requests))
        running: dict[asyncio.Task[JudgeResult], int] = {}
        try:
            while True:
                while len(running) < _IN_FLIGHT and (following := next(waiting, None)) is not None:
                    index, one = following
                    task = asyncio.create_task(self._judge_of_batch(one, end), name=f"judge {index} of a batch")
                    running[task] = index
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = running.pop(task)
                    yield pb.JudgeBatchResponse(
                        index=index,
                        request_id=request.requests[index].request_id,
                        result=judge_result_to_proto(task.result()),
                    )
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _judge(self, request: JudgeRequest, deadline_s: float) -> JudgeResult:
        return await self._queue.run(request, lane=request.lane, request_id=request.request_id, deadline_s=deadline_s)

    async def _judge_of_batch(self, proto: pb.JudgeRequest, end: float) -> JudgeResult:
        """A full queue is waited for, as long as the caller's deadline allows."""
        loop = asyncio.get_running_loop()
        try:
            request = judge_request_from_proto(proto)
        except InvalidRequestError as error:
            return JudgeResult(verdict=RunStatus.INVALID_REQUEST, detail=error.message, request_id=proto.request_id)
        while True:
            try:
                return await self._judge(request, end - loop.time())
            except CapacityError as full:
                pause_s = full.retry_after_s or 1.0
                if loop.time() + pause_s >= end:
                    return JudgeResult(
                        verdict=RunStatus.INFRA_ERROR, detail=full.message, request_id=request.request_id
                    )
                await asyncio.sleep(pause_s)
