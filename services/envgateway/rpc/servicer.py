"""gRPC servicer of the gateway: convert, call, convert. No other module of the gateway sees grpc or protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import orjson

from services.common.codec import json_object
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.telemetry.gateway_queue import Lane
from services.common.text.encodable import encodable
from services.common.wire import duration_to_proto
from services.envgateway.calls import SharedCalls
from services.envgateway.envs.episodes import EpisodeManager
from services.envgateway.queue.local import JobQueue
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import RewardOutcome, RewardResult
from services.envgateway.rpc.batches import answered
from services.envgateway.rpc.convert import execution_from_proto, execution_to_proto
from services.envgateway.rpc.deadlines import time_left_s

Context = grpc.aio.ServicerContext[Any, Any]

_STORED_RESULTS = 1024
_OUTCOME = {outcome: pb.RewardOutcome.Value(f"REWARD_OUTCOME_{outcome.name}") for outcome in RewardOutcome}


class EnvironmentServicer(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, episodes: EpisodeManager) -> None:
        self._episodes = episodes

    async def CreateEpisode(self, request: pb.CreateEpisodeRequest, context: Context) -> pb.CreateEpisodeResponse:
        start = await self._episodes.create(
            request.request_id, request.environment, json_object(request.task_json, "task_json"), request.seed
        )
        observation = start.observation
        return pb.CreateEpisodeResponse(
            episode_id=start.episode_id,
            observation=encodable(observation.text),
            admissible_actions=encodable(observation.admissible_actions),
            tools_json=orjson.dumps(encodable(observation.tools)) if observation.tools else b"",
            lease=duration_to_proto(start.lease_s),
            messages=[pb.ChatMessage(role=one["role"], content=one["content"]) for one in observation.messages],
        )

    async def StepEpisode(self, request: pb.StepEpisodeRequest, context: Context) -> pb.StepEpisodeResponse:
        result = await self._episodes.step(request.episode_id, request.turn, request.action)
        return pb.StepEpisodeResponse(
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            admissible_actions=result.admissible_actions,
            metrics=result.metrics,
        )

    async def CloseEpisode(self, request: pb.CloseEpisodeRequest, context: Context) -> pb.CloseEpisodeResponse:
        await self._episodes.close(request.episode_id)
        return pb.CloseEpisodeResponse()


class CodeExecutionServicer(pb_grpc.CodeExecutionServiceServicer):
    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def ExecuteCode(self, request: pb.ExecuteCodeRequest, context: Context) -> pb.ExecuteCodeResponse:
        return await self._execute(request, time_left_s(context))

    async def ExecuteCodes(
        self, request: pb.ExecuteCodesRequest, context: Context
    ) -> AsyncIterator[pb.ExecuteCodesResponse]:
        left_s = time_left_s(context)
        async with aclosing(answered(request.requests, lambda one: self._execute(one, left_s))) as found:
            async for some in found:
                answers = [pb.ExecuteCodesAnswer(index=index, response=response) for index, response in some]
                yield pb.ExecuteCodesResponse(answers=answers)

    async def _execute(self, request: pb.ExecuteCodeRequest, deadline_s: float) -> pb.ExecuteCodeResponse:
        execution = execution_from_proto(request)
        result = await self._queue.run(
            execution, lane=Lane.INTERACTIVE, request_id=request.request_id, deadline_s=deadline_s
        )
        return execution_to_proto(result)


class RewardServicer(pb_grpc.RewardServiceServicer):
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._shared: SharedCalls[RewardResult] = SharedCalls(_STORED_RESULTS, keep=_is_graded)

    async def ComputeReward(self, request: pb.ComputeRewardRequest, context: Context) -> pb.ComputeRewardResponse:
        return await self._compute(request)

    async def ComputeRewards(
        self, request: pb.ComputeRewardsRequest, context: Context
    ) -> AsyncIterator[pb.ComputeRewardsResponse]:
        async with aclosing(answered(request.requests, self._compute)) as found:
            async for some in found:
                answers = [pb.ComputeRewardsAnswer(index=index, response=response) for index, response in some]
                yield pb.ComputeRewardsResponse(answers=answers)

    async def _compute(self, request: pb.ComputeRewardRequest) -> pb.ComputeRewardResponse:
        task = json_object(request.task_json, "task_json")
        result = await self._shared.run(
            request.request_id, lambda: self._rewards.compute(request.reward, task, request.completion)
        )
        return pb.ComputeRewardResponse(
            outcome=_OUTCOME[result.outcome],
            reward=result.reward,
            detail=encodable(result.detail),
            opaque=result.opaque,
        )


def _is_graded(result: RewardResult) -> bool:
    return result.outcome is not RewardOutcome.GRADER_FAILED
