"""gRPC servicer of the judge: convert, call the queue, convert. No module behind this one sees grpc or protobuf."""

from __future__ import annotations

from typing import Any

import grpc

from services.common.pb import judge_pb2 as pb
from services.common.pb import judge_pb2_grpc
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.queue.local import JobQueue
from services.envgateway.rpc.convert import judge_request_from_proto, judge_result_to_proto
from services.envgateway.rpc.deadlines import time_left_s

Context = grpc.aio.ServicerContext[Any, Any]


class JudgeServicer(judge_pb2_grpc.JudgeServiceServicer):
    """Serves the judge's calls. A call that is cancelled, or whose deadline passes, is cancelled in the queue and
    killed in the sandbox."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def Judge(self, request: pb.JudgeRequest, context: Context) -> pb.JudgeResponse:
        lane = Lane.INTERACTIVE if request.lane == pb.JUDGE_LANE_INTERACTIVE else Lane.BATCH
        result = await self._queue.run(
            judge_request_from_proto(request),
            lane=lane,
            request_id=request.request_id,
            deadline_s=time_left_s(context),
        )
        return judge_result_to_proto(result)
