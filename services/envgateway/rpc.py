"""Converts programs, judgements and their results to and from the messages of the protos."""

from __future__ import annotations

import json
import time
from asyncio import sleep
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import grpc
import orjson
import structlog

from services.common import wire
from services.common.aio import backoff
from services.common.errors import ConfigError, DeadlineError, InvalidRequestError, RollmillError, UserError
from services.common.pb import environment_pb2, judge_pb2_grpc, pool_pb2, pool_pb2_grpc
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.pb import judge_pb2 as judge_pb
from services.common.records import encodable
from services.common.rpc.client import channel, refusal_behind, translated_errors
from services.common.rpc.interceptors import Context
from services.common.rpc.run_client import AWAY_S, FIRST_WORD_S, TELL_S
from services.common.security.keys import Peer
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import Lane
from services.common.wire import duration_to_proto, json_object, read, write
from services.envgateway.calls import RewardOutcome, RewardResult, SharedCalls
from services.envgateway.envs.episodes import EpisodeManager
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    CaseResult,
    Comparison,
    ComparisonMode,
    JudgeRequest,
    JudgeResult,
    StdinTests,
    Tests,
)
from services.envgateway.queue import JobQueue
from services.envgateway.rewards.registry import Rewards
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult
from services.envgateway.sandbox.scheduler import on_behalf_of

_MODE = {judge_pb.ComparisonMode.Value(f"COMPARISON_MODE_{mode.name}"): mode for mode in ComparisonMode}
wire.DISPLAYED |= {CaseResult, ExecutionResult, JudgeResult}  # texts of programs
wire.RENAMED |= {
    ExecutionLimits: {"processes": "num_processes"},
    ExecutionRequest: {"echo": "print_trailing_expression", "language": ""},
    ExecutionResult: {"tier": "isolation_tier", "stdout": "", "stderr": ""},
    JudgeResult: {"tier": "isolation_tier"},
}


def execution_from_proto(request: environment_pb2.ExecuteCodeRequest) -> ExecutionRequest:
    execution = read(ExecutionRequest, request, language=request.language or "python")
    _check_limits(execution.limits)
    return execution


def execution_to_proto(result: ExecutionResult) -> environment_pb2.ExecuteCodeResponse:
    response = write(result, environment_pb2.ExecuteCodeResponse())
    response.stdout = result.stdout.decode(errors="replace")
    response.stderr = result.stderr.decode(errors="replace")
    return response


def judge_request_from_proto(proto: judge_pb.JudgeRequest) -> JudgeRequest:
    """Raises ``InvalidRequestError``, which names the field."""
    limits = read(ExecutionLimits, proto.limits)
    _check_limits(limits)
    return JudgeRequest(
        code=proto.code,
        tests=_tests_from_proto(proto),
        language=proto.language or "python",
        comparison=Comparison(
            mode=_MODE.get(proto.comparison), tolerance=_not_negative("tolerance", proto.tolerance) or 1e-6
        ),
        limits=limits,
        stop_early=proto.stop_early,
    )


def _check_limits(limits: ExecutionLimits) -> None:
    """Raises ``InvalidRequestError`` for a limit that cannot be kept."""
    for name, value in asdict(limits).items():
        if value is not None and not value > 0:
            raise InvalidRequestError(f"limits.{name} is {value:g}; it must be more than 0")


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:
        raise InvalidRequestError(f"{name} is {value:g}; it must not be negative")
    return value


def _tests_from_proto(proto: judge_pb.JudgeRequest) -> Tests:
    match proto.WhichOneof("tests"):
        case "stdin_tests":
            return read(StdinTests, proto.stdin_tests)
        case "call_tests":
            cases = enumerate(proto.call_tests.cases)
            return CallTests(
                entry_point=proto.call_tests.entry_point,
                cases=tuple(_call_from_proto(index, case) for index, case in cases),
            )
        case "assert_tests":
            return read(AssertTests, proto.assert_tests)
    raise InvalidRequestError("a request without tests: set stdin_tests, call_tests or assert_tests")


def _call_from_proto(index: int, case: judge_pb.CallCase) -> CallCase:
    args = _json(f"cases[{index}].args_json", case.args_json or b"[]")
    kwargs = _json(f"cases[{index}].kwargs_json", case.kwargs_json or b"{}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InvalidRequestError(f"cases[{index}]: args_json is a JSON array, kwargs_json an object")
    expected = _json(f"cases[{index}].expected_json", case.expected_json or b"null")
    return CallCase(args=tuple(args), kwargs=kwargs, expected=expected)


def _json(name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}") from None


log = structlog.get_logger()
CLIENT_KEY = "x-client-id"


def by_client(_: str, context: Context) -> AbstractContextManager[object]:
    """Round a call: metadata ``x-client-id`` names a client that has several connections; without the name each connection is a
    client."""
    named = dict(context.invocation_metadata() or ()).get(CLIENT_KEY)
    return on_behalf_of(str(named or context.peer()))


_UNNAMED_S = 600.0  # of callers that name no deadline


def time_left_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Seconds until the caller's deadline."""
    left_s = context.time_remaining()
    return _UNNAMED_S if left_s is None else float(left_s)


# --- Membership in a run: tells the orchestrator the gateway's address, and hears the end of the run.


FIRST_S = 3600.0  # for an orchestrator that has never answered: starting checkpoints are made before its start
_LONGEST_PAUSE_S = 2.0


async def stay(
    orchestrator: str, address: str, run_id: str = "", *, first_s: float = FIRST_S, away_s: float = AWAY_S
) -> None:
    """Return when the run has ended. ``address`` is where replicas reach this gateway.

    Raises:
        DeadlineError: the orchestrator did not answer for ``first_s``, or for ``away_s`` after it had.
        UserError: the orchestrator refuses this gateway: its keys or its run are not ours.
    """
    since, limit_s, pauses = time.monotonic(), first_s, backoff(longest_s=_LONGEST_PAUSE_S)
    tell_at = since + FIRST_WORD_S
    async with channel(orchestrator, Peer.ORCHESTRATOR) as connection:
        stub: pool_pb2_grpc.PoolServiceAsyncStub = pool_pb2_grpc.PoolServiceStub(connection)
        while True:
            call, answered, why = stub.JoinGateway(pool_pb2.JoinGatewayRequest(address=address)), False, "it stops"
            try:
                with translated_errors("orchestrator", "JoinGateway"):
                    async for response in call:
                        answered = True
                        if response.WhichOneof("command") == "leave":
                            log.info(LogEvent.RUN_ENDED, reason=response.leave.reason or "the run has ended")
                            return
                        if response.WhichOneof("command") == "welcome":
                            _check_run(run_id, response.welcome.run_id)
                            log.info("run.joined", run=response.welcome.run_id, address=address)
            except UserError:
                raise  # refused for our keys or our run: joining again would be refused again
            except RollmillError as error:
                why = error.message
                if (refused := await refusal_behind(error, connection)) is not None:
                    raise refused from None
            finally:
                call.cancel()
            now = time.monotonic()
            if answered:  # the orchestrator was there until now
                since, limit_s, pauses = now, away_s, backoff(longest_s=_LONGEST_PAUSE_S)
                tell_at = now + FIRST_WORD_S
            silent_s = now - since
            if now >= tell_at:
                tell_at = now + TELL_S
                log.warning("orchestrator.waited_for", address=orchestrator, error=why, silent_s=round(silent_s))
            if silent_s > limit_s:
                raise DeadlineError(
                    f"waiting for the orchestrator at {orchestrator}: no answer for {silent_s:.0f} s (limit {limit_s:g} s): "
                    f"{why}; start it (deploy/launch/2_orchestrator.sh RECIPE), then this gateway again"
                )
            await sleep(next(pauses))


def _check_run(own: str, found: str) -> None:
    if own and own != found:
        raise ConfigError(
            f"this gateway is of run {own!r}, but the orchestrator belongs to run {found!r}: name the orchestrator of the run "
            "with --orchestrator, or leave that out to serve without a run"
        )


# --- gRPC servicer of the gateway: convert, call, convert. No other module of the gateway sees grpc or protobuf.


EnvironmentRpcContext = grpc.aio.ServicerContext[Any, Any]
_OUTCOME = {outcome: pb.RewardOutcome.Value(f"REWARD_OUTCOME_{outcome.name}") for outcome in RewardOutcome}


class EnvironmentServicer(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, episodes: EpisodeManager) -> None:
        self._episodes = episodes

    async def CreateEpisode(
        self, request: pb.CreateEpisodeRequest, context: EnvironmentRpcContext
    ) -> pb.CreateEpisodeResponse:
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

    async def StepEpisode(
        self, request: pb.StepEpisodeRequest, context: EnvironmentRpcContext
    ) -> pb.StepEpisodeResponse:
        result = await self._episodes.step(request.episode_id, request.turn, request.action)
        return pb.StepEpisodeResponse(
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            admissible_actions=result.admissible_actions,
            metrics=result.metrics,
        )

    async def CloseEpisode(
        self, request: pb.CloseEpisodeRequest, context: EnvironmentRpcContext
    ) -> pb.CloseEpisodeResponse:
        await self._episodes.close(request.episode_id)
        return pb.CloseEpisodeResponse()


class CodeExecutionServicer(pb_grpc.CodeExecutionServiceServicer):
    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def ExecuteCode(
        self, request: pb.ExecuteCodeRequest, context: EnvironmentRpcContext
    ) -> pb.ExecuteCodeResponse:
        execution = execution_from_proto(request)
        result = await self._queue.run(
            execution, lane=Lane.INTERACTIVE, request_id=request.request_id, deadline_s=time_left_s(context)
        )
        return execution_to_proto(result)


class RewardServicer(pb_grpc.RewardServiceServicer):
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._shared: SharedCalls[RewardResult] = SharedCalls()

    async def ComputeReward(
        self, request: pb.ComputeRewardRequest, context: EnvironmentRpcContext
    ) -> pb.ComputeRewardResponse:
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


# --- gRPC servicer of the judge: convert, call the queue, convert. No module behind this one sees grpc or protobuf.


JudgeContext = grpc.aio.ServicerContext[Any, Any]


class JudgeServicer(judge_pb2_grpc.JudgeServiceServicer):
    """Serves the judge's calls. A call that is cancelled, or whose deadline passes, is cancelled in the queue and
    killed in the sandbox."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    async def Judge(self, request: judge_pb.JudgeRequest, context: JudgeContext) -> judge_pb.JudgeResponse:
        lane = Lane.INTERACTIVE if request.lane == judge_pb.JUDGE_LANE_INTERACTIVE else Lane.BATCH
        result = await self._queue.run(
            judge_request_from_proto(request),
            lane=lane,
            request_id=request.request_id,
            deadline_s=time_left_s(context),
        )
        return write(result, judge_pb.JudgeResponse())
