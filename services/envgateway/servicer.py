"""The membrane of the gateway: convert, call, convert. Behind it nothing sees grpc or protobuf."""

from __future__ import annotations

from typing import Any

import grpc
import orjson

from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.serde import duration_to_proto, json_object
from services.envgateway.calls import SharedCalls
from services.envgateway.deadlines import time_left_s
from services.envgateway.envs.registry import EnvironmentRegistry
from services.envgateway.episodes import EpisodeManager
from services.envgateway.judge.records import Lane
from services.envgateway.queue.base import JobQueue
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import RewardOutcome, RewardResult
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult, ExecutionStatus
from services.envgateway.servicer_judge import limits_from_proto

Context = grpc.aio.ServicerContext[Any, Any]

_STORED_RESULTS = 1024
_STATUS = {status: pb.ExecutionStatus.Value(f"EXECUTION_STATUS_{status.name}") for status in ExecutionStatus}
_OUTCOME = {outcome: pb.RewardOutcome.Value(f"REWARD_OUTCOME_{outcome.name}") for outcome in RewardOutcome}


class EnvironmentServicer(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, episodes: EpisodeManager, environments: EnvironmentRegistry) -> None:
        self._episodes = episodes
        self._environments = environments

    async def CreateEpisode(self, request: pb.CreateEpisodeRequest, context: Context) -> pb.CreateEpisodeResponse:
        start = await self._episodes.create(
            request.request_id, request.environment, json_object(request.task_json, "task_json"), request.seed
        )
        observation = start.observation
        return pb.CreateEpisodeResponse(
            episode_id=start.episode_id,
            observation=observation.text,
            admissible_actions=observation.admissible_actions,
            tools_json=orjson.dumps(observation.tools) if observation.tools else b"",
            lease=duration_to_proto(start.lease_s),
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

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Context
    ) -> pb.ListEnvironmentsResponse:
        return pb.ListEnvironmentsResponse(environments=self._environments.names)


class CodeExecutionServicer(pb_grpc.CodeExecutionServiceServicer):
    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def ExecuteCode(self, request: pb.ExecuteCodeRequest, context: Context) -> pb.ExecuteCodeResponse:
        execution = _execution_from_proto(request)
        result = await self._queue.run(
            execution, lane=Lane.INTERACTIVE, request_id=request.request_id, deadline_s=time_left_s(context)
        )
        return _execution_to_proto(result)


class RewardServicer(pb_grpc.RewardServiceServicer):
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._shared: SharedCalls[RewardResult] = SharedCalls(_STORED_RESULTS, keep=_is_graded)

    async def ComputeReward(self, request: pb.ComputeRewardRequest, context: Context) -> pb.ComputeRewardResponse:
        task = json_object(request.task_json, "task_json")
        result = await self._shared.run(
            request.request_id, lambda: self._rewards.compute(request.reward, task, request.completion)
        )
        return pb.ComputeRewardResponse(outcome=_OUTCOME[result.outcome], reward=result.reward, detail=result.detail)


def _is_graded(result: RewardResult) -> bool:
    return result.outcome is not RewardOutcome.GRADER_FAILED


def _execution_from_proto(request: pb.ExecuteCodeRequest) -> ExecutionRequest:
    return ExecutionRequest(
        code=request.code,
        stdin=request.stdin,
        limits=limits_from_proto(request.limits),
        echo=request.print_trailing_expression,
        language=request.language or "python",
    )


def _execution_to_proto(result: ExecutionResult) -> pb.ExecuteCodeResponse:
    return pb.ExecuteCodeResponse(
        status=_STATUS[result.status],
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        truncated=result.truncated,
        wall_time=duration_to_proto(result.wall_s),
        cpu_time=duration_to_proto(result.cpu_s),
        peak_memory_bytes=result.peak_memory_bytes,
        isolation_tier=result.tier,
        detail=result.detail,
    )
