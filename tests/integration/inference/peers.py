"""A fake orchestrator and a fake gateway over real gRPC, controlled by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from services.common.pb import environment_pb2 as env
from services.common.pb import (
    environment_pb2_grpc,
    judge_pb2,
    judge_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    weights_pb2,
)
from services.common.records import TaskGroupOrder
from services.common.rpc.interceptors import CallInterceptor
from services.common.wire import duration_to_proto, write

Context = grpc.aio.ServicerContext[Any, Any]


END_S = 60.0


async def end_of(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Exit code and output."""
    try:
        async with asyncio.timeout(END_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, (out + err).decode()


class FakeOrchestrator(pool_pb2_grpc.PoolServiceServicer, run_pb2_grpc.RunServiceServicer):
    """``start`` and ``stop`` may alternate on one port, as when an orchestrator is killed and started again."""

    def __init__(self, recipe: dict[str, Any] | None = None, envgateway_address: str = "") -> None:
        self.recipe = recipe or {}
        self.run_dir = "/nonexistent"
        self.envgateway_address = envgateway_address
        self.joins: list[pool_pb2.JoinPoolRequest] = []
        self.reports: list[pool_pb2.StreamReportsRequest] = []
        self.records: list[pool_pb2.NumberedRecord] = []  # as they came, over all streams
        self.message_sizes: list[int] = []  # records of each message
        self.senders: set[tuple[str, str]] = set()  # replica id and incarnation of each message
        self.answer = pool_pb2.RecordAck()  # the fields of every acknowledgement, without its number
        self.acknowledge: Callable[[pool_pb2.NumberedRecord], bool] = lambda record: True
        self.report_error: Exception | None = None
        self.next_report_s = 0.0
        self.join_error: Exception | None = None
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._commands: asyncio.Queue[pool_pb2.JoinPoolResponse | Exception | None] = asyncio.Queue()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(interceptors=[CallInterceptor()], options=[("grpc.so_reuseport", 0)])
        pool_pb2_grpc.add_PoolServiceServicer_to_server(self, self._server)
        run_pb2_grpc.add_RunServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Break every stream and refuse calls."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
            self._commands = asyncio.Queue()

    # -- the test's controls ------------------------------------------------------------------------------------

    def order(self, order: TaskGroupOrder) -> None:
        self._commands.put_nowait(pool_pb2.JoinPoolResponse(run_task_group=write(order, pool_pb2.RunTaskGroup())))

    def cancel(self, task_group_id: str) -> None:
        command = pool_pb2.CancelTaskGroup(task_group_id=task_group_id, reason="test")
        self._commands.put_nowait(pool_pb2.JoinPoolResponse(cancel_task_group=command))

    def announce(self, policy: str, number: int, digest: str = "d") -> None:
        version = weights_pb2.WeightVersion(policy=policy, number=number, digest=digest)
        self._commands.put_nowait(pool_pb2.JoinPoolResponse(new_version=pool_pb2.NewVersion(version=version)))

    def drain(self) -> None:
        self._commands.put_nowait(pool_pb2.JoinPoolResponse(drain=pool_pb2.Drain(reason="test")))

    def end_stream(self, error: Exception | None = None) -> None:
        """End the stream of commands, with an error or without."""
        self._commands.put_nowait(error)

    @property
    def slots(self) -> list[tuple[str, int]]:
        """(task group, index) of every record that came."""
        keys = []
        for request in self.records:
            record = request.trajectory if request.WhichOneof("record") == "trajectory" else request.failure
            keys.append((record.task_group_id, record.index))
        return keys

    # -- the services -------------------------------------------------------------------------------------------

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Context) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(run_id="run-1", config_json=json.dumps(self.recipe), run_dir=self.run_dir)

    async def JoinPool(
        self, request: pool_pb2.JoinPoolRequest, context: Context
    ) -> AsyncIterator[pool_pb2.JoinPoolResponse]:
        self.joins.append(request)
        if self.join_error is not None:
            raise self.join_error
        yield pool_pb2.JoinPoolResponse(
            welcome=pool_pb2.Welcome(
                run_id="run-1", lease=duration_to_proto(5.0), envgateway_address=self.envgateway_address
            )
        )
        while (command := await self._commands.get()) is not None:
            if isinstance(command, Exception):
                raise command
            yield command

    def _answer(self, request: pool_pb2.StreamReportsRequest) -> pool_pb2.StreamReportsResponse:
        if self.report_error is not None:
            raise self.report_error
        self.reports.append(request)
        return pool_pb2.StreamReportsResponse(
            lease=duration_to_proto(5.0), next_report=duration_to_proto(self.next_report_s)
        )

    async def StreamReports(
        self, request_iterator: AsyncIterator[pool_pb2.StreamReportsRequest], context: Context
    ) -> AsyncIterator[pool_pb2.StreamReportsResponse]:
        async for request in request_iterator:
            yield self._answer(request)

    async def StreamTrajectories(
        self, request_iterator: AsyncIterator[pool_pb2.StreamTrajectoriesRequest], context: Context
    ) -> AsyncIterator[pool_pb2.StreamTrajectoriesResponse]:
        async for request in request_iterator:
            self.records += request.records
            self.message_sizes.append(len(request.records))
            self.senders.add((request.replica_id, request.incarnation))
            acks = []
            for record in filter(self.acknowledge, request.records):
                acks.append(
                    pool_pb2.RecordAck(record_number=record.record_number, outcome=pool_pb2.RECORD_OUTCOME_ACCEPTED)
                )
                acks[-1].MergeFrom(self.answer)
            yield pool_pb2.StreamTrajectoriesResponse(acks=acks)


class FakeGatewayServer(
    environment_pb2_grpc.EnvironmentServiceServicer,
    environment_pb2_grpc.CodeExecutionServiceServicer,
    environment_pb2_grpc.RewardServiceServicer,
    judge_pb2_grpc.JudgeServiceServicer,
):
    """Answers from a list, one entry a call: a response, or an exception to raise."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.time_left_s: list[float] = []  # of each reward that was asked for
        self.answers: list[Any] = []
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def answer(self, *answers: Any) -> None:
        self.answers += answers

    async def start(self) -> None:
        self._server = grpc.aio.server(interceptors=[CallInterceptor()], options=[("grpc.so_reuseport", 0)])
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, self._server)
        environment_pb2_grpc.add_CodeExecutionServiceServicer_to_server(self, self._server)
        environment_pb2_grpc.add_RewardServiceServicer_to_server(self, self._server)
        judge_pb2_grpc.add_JudgeServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def _next(self, request: Any, default: Any) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else default
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ExecuteCode(self, request: env.ExecuteCodeRequest, context: Context) -> env.ExecuteCodeResponse:
        default = env.ExecuteCodeResponse(status=env.EXECUTION_STATUS_OK, stdout=f"{request.code}\n")
        answer: env.ExecuteCodeResponse = self._next(request, default)
        return answer

    async def ComputeReward(self, request: env.ComputeRewardRequest, context: Context) -> env.ComputeRewardResponse:
        self.time_left_s.append(context.time_remaining() or 0.0)
        default = env.ComputeRewardResponse(outcome=env.REWARD_OUTCOME_CORRECT, reward=1.0)
        answer: env.ComputeRewardResponse = self._next(request, default)
        return answer

    async def Judge(self, request: judge_pb2.JudgeRequest, context: Context) -> judge_pb2.JudgeResponse:
        answer: judge_pb2.JudgeResponse = self._next(request, judge_pb2.JudgeResponse(verdict=judge_pb2.VERDICT_OK))
        return answer

    async def CreateEpisode(self, request: env.CreateEpisodeRequest, context: Context) -> env.CreateEpisodeResponse:
        default = env.CreateEpisodeResponse(
            episode_id="e1", observation="look", admissible_actions=["go"], tools_json=b'[{"type": "function"}]'
        )
        answer: env.CreateEpisodeResponse = self._next(request, default)
        return answer

    async def StepEpisode(self, request: env.StepEpisodeRequest, context: Context) -> env.StepEpisodeResponse:
        default = env.StepEpisodeResponse(observation="end", reward=0.5, done=True, metrics={"tool_errors": 1.0})
        answer: env.StepEpisodeResponse = self._next(request, default)
        return answer

    async def CloseEpisode(self, request: env.CloseEpisodeRequest, context: Context) -> env.CloseEpisodeResponse:
        answer: env.CloseEpisodeResponse = self._next(request, env.CloseEpisodeResponse())
        return answer


def scripted_recipe(**changes: Any) -> dict[str, Any]:
    """A recipe with replicas that need no model, no gateway and no publisher."""
    recipe: dict[str, Any] = {
        "name": "scripted",
        "policies": {"model0": {"model": {"path": "unused", "context_length": 2048}}},
        "workflow": {"name": "single_turn", "settings": {"reward": "tests.integration.inference.peers:one"}},
        "data": {"train": {"path": "unused"}},
        "evaluation": {"at_start": False, "at_end": False},
        "inference": {"a": {"engine": "scripted", "port": 0, "num_slots": 8}},
        "envgateway": None,
    }
    return recipe | changes


def one(task: Any, completion: str) -> float:
    return 1.0


def indices_of(slots: Sequence[tuple[str, int]]) -> list[int]:
    return [index for _, index in slots]
