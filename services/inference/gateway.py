"""Client of the environment gateway for workflows: converts types, applies deadlines, retries while the gateway is full.

An unreachable gateway, a failed grader and a broken sandbox are ``InfrastructureError``, never an answer.
"""

from __future__ import annotations

import asyncio
import json  # not orjson: integers of any size
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import orjson

from services.common.aio import deadline
from services.common.errors import (
    CapacityError,
    ConfigError,
    GraderFailedError,
    InfrastructureError,
    InvalidRequestError,
)
from services.common.pb import environment_pb2, environment_pb2_grpc, judge_pb2_grpc
from services.common.pb import judge_pb2 as pb
from services.common.records import Task
from services.common.rpc.client import channel, translated_errors
from services.common.security.identity import DEADLINES
from services.common.security.keys import Peer
from services.common.telemetry.accounts import GATEWAY, ActivityName, TimeAccount
from services.common.wire import duration_to_proto
from services.inference.workflows.base import (
    CaseOutcome,
    Episode,
    Execution,
    JudgeCase,
    ProgramStatus,
    Reward,
    Step,
)

T = TypeVar("T")
EXECUTION_MARGIN_S = 60.0  # queueing and the gateway's own limits, beyond the table's 10 s
CAPACITY_WAIT_S = 120.0
JUDGING_WAIT_S = 1800.0  # for a slot, while slow programs of the same task are judged
JUDGING_S = 600.0  # of one call: a wait for a slot, and the judgement of a program, which takes 500 s at most
DEFAULT_RETRY_S = 0.5
MOST_TEXT_BYTES = 3 << 20  # of an action, a program or a completion; a message may have 4 MiB
_STATUS = {
    environment_pb2.ExecutionStatus.Value(f"EXECUTION_STATUS_{status.name}"): status
    for status in ProgramStatus
    if status is not ProgramStatus.WRONG_ANSWER
}
_STATUS[environment_pb2.EXECUTION_STATUS_COMPILE_ERROR] = ProgramStatus.RUNTIME_ERROR  # the policy's text is the same
_VERDICT = {pb.Verdict.Value(f"VERDICT_{verdict.name}"): verdict for verdict in ProgramStatus}


def judge_request(
    code: str, cases: Sequence[JudgeCase], *, entry_point: str, case_time_s: float, request_id: str
) -> pb.JudgeRequest:
    """A request that runs every case, also after a failed one. ``InvalidRequestError`` names a malformed case."""
    request = pb.JudgeRequest(
        request_id=request_id,
        language="python",
        code=code,
        limits=environment_pb2.ExecutionLimits(wall_time=duration_to_proto(case_time_s)),
        lane=pb.JUDGE_LANE_BATCH,
    )
    for number, case in enumerate(cases, start=1):
        if entry_point:
            request.call_tests.entry_point = entry_point
            request.call_tests.cases.add(
                args_json=json.dumps(case.given).encode(), expected_json=json.dumps(case.expected).encode()
            )
        elif isinstance(case.given, str) and isinstance(case.expected, str):
            request.stdin_tests.cases.add(stdin=case.given, expected=case.expected)
        else:
            raise InvalidRequestError(f"case {number}: a program reads and prints text")
    return request


def outcomes_from_proto(response: pb.JudgeResponse, num_cases: int) -> tuple[CaseOutcome, ...]:
    """One outcome per case; a program that was refused as a whole is refused on each case.

    Raises:
        GraderFailedError: a verdict that does not depend on the program.
    """
    if (
        response.verdict == pb.VERDICT_INVALID_TESTS
    ):  # a policy's own cases, or a row's that the data set should not have
        return (CaseOutcome(verdict=ProgramStatus.INVALID_REQUEST, detail=response.detail),) * num_cases
    verdicts = [response.verdict, *(case.verdict for case in response.cases)]
    broken = next((verdict for verdict in verdicts if verdict not in _VERDICT), None)
    if broken is not None:
        raise GraderFailedError(f"judging ended with {pb.Verdict.Name(broken)}: {response.detail}")
    if len(response.cases) == num_cases:
        return tuple(
            CaseOutcome(verdict=_VERDICT[case.verdict], detail=case.detail, stdout=case.stdout, stderr=case.stderr)
            for case in response.cases
        )
    if response.verdict == pb.VERDICT_INVALID_REQUEST:
        return (CaseOutcome(verdict=ProgramStatus.INVALID_REQUEST, detail=response.detail),) * num_cases
    raise GraderFailedError(f"{len(response.cases)} of {num_cases} cases were judged: {response.detail}")


class GatewayClient:
    """One channel for all rollouts of a replica. The replica calls ``connect`` with the address from the orchestrator."""

    def __init__(self, account: TimeAccount) -> None:
        self._account = account
        self._channels: list[grpc.aio.Channel] = []
        self._environments: environment_pb2_grpc.EnvironmentServiceAsyncStub | None = None
        self._executions: environment_pb2_grpc.CodeExecutionServiceAsyncStub | None = None
        self._rewards: environment_pb2_grpc.RewardServiceAsyncStub | None = None
        self._judge: judge_pb2_grpc.JudgeServiceAsyncStub | None = None
        self.address = ""

    def connect(self, address: str) -> None:
        """Use the gateway at ``address``; calls in flight at another one go on there."""
        if address == self.address or not address:
            return
        self.address = address
        connection = channel(address, Peer.ENVGATEWAY)
        self._channels.append(connection)
        self._environments = environment_pb2_grpc.EnvironmentServiceStub(connection)
        self._executions = environment_pb2_grpc.CodeExecutionServiceStub(connection)
        self._rewards = environment_pb2_grpc.RewardServiceStub(connection)
        self._judge = judge_pb2_grpc.JudgeServiceStub(connection)

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution:
        stub = self._connected(self._executions)
        request = environment_pb2.ExecuteCodeRequest(
            request_id=uuid.uuid4().hex,
            language="python",
            code=_encodable(code),
            stdin=stdin,
            print_trailing_expression=print_trailing_expression,
        )
        timeout = (DEADLINES["ExecuteCode"] or 0.0) + EXECUTION_MARGIN_S
        response = await self._call("execution", timeout, lambda: stub.ExecuteCode(request, timeout=timeout))
        status = _STATUS.get(response.status)
        if status is None:
            name = environment_pb2.ExecutionStatus.Name(response.status)
            raise InfrastructureError(f"code execution ended with {name}: {response.detail}")
        return Execution(
            status=status,
            stdout=response.stdout,
            stderr=response.stderr,
            truncated=response.truncated,
            wall_time_s=response.wall_time.seconds + response.wall_time.nanos * 1e-9,
            detail=response.detail,
        )

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        stub = self._connected(self._environments)
        request = environment_pb2.CreateEpisodeRequest(
            request_id=uuid.uuid4().hex, environment=environment, task_json=orjson.dumps(task.data), seed=seed
        )
        timeout = DEADLINES["CreateEpisode"] or 0.0
        response = await self._call("environment", timeout, lambda: stub.CreateEpisode(request, timeout=timeout))
        return Episode(
            episode_id=response.episode_id,
            observation=response.observation,
            admissible_actions=tuple(response.admissible_actions),
            tools=tuple(orjson.loads(response.tools_json)) if response.tools_json else (),
            messages=tuple({"role": one.role, "content": one.content} for one in response.messages),
        )

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        stub = self._connected(self._environments)
        request = environment_pb2.StepEpisodeRequest(episode_id=episode_id, turn=turn, action=_encodable(action))
        timeout = DEADLINES["StepEpisode"] or 0.0
        response = await self._call("environment", timeout, lambda: stub.StepEpisode(request, timeout=timeout))
        return Step(
            observation=response.observation,
            reward=response.reward,
            done=response.done,
            admissible_actions=tuple(response.admissible_actions),
            metrics=dict(response.metrics),
        )

    async def close(self, episode_id: str) -> None:
        stub = self._connected(self._environments)
        request = environment_pb2.CloseEpisodeRequest(episode_id=episode_id)
        timeout = DEADLINES["CloseEpisode"] or 0.0
        await self._call("environment", timeout, lambda: stub.CloseEpisode(request, timeout=timeout))

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        stub = self._connected(self._rewards)
        request = environment_pb2.ComputeRewardRequest(
            request_id=uuid.uuid4().hex,
            reward=reward,
            task_json=orjson.dumps(task.data),
            completion=_encodable(completion),
        )
        timeout = JUDGING_S if reward == "code" else DEADLINES["ComputeReward"] or 0.0
        wait_s = JUDGING_WAIT_S if reward == "code" else CAPACITY_WAIT_S
        response = await self._call("reward", timeout, lambda: stub.ComputeReward(request, timeout=timeout), wait_s)
        if response.outcome in (
            environment_pb2.REWARD_OUTCOME_GRADER_FAILED,
            environment_pb2.REWARD_OUTCOME_UNSPECIFIED,
        ):
            raise GraderFailedError(f"the grader of reward {reward!r} failed: {response.detail}")
        return Reward(
            value=response.reward,
            unparsed=response.outcome == environment_pb2.REWARD_OUTCOME_UNPARSED,
            detail=response.detail,
            opaque=response.opaque,
        )

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        stub = self._connected(self._judge)
        request = judge_request(
            _encodable(code), cases, entry_point=entry_point, case_time_s=case_time_s, request_id=uuid.uuid4().hex
        )
        timeout = (DEADLINES["Judge"] or 0.0) + EXECUTION_MARGIN_S + len(cases) * case_time_s
        response = await self._call("judge", timeout, lambda: stub.Judge(request, timeout=timeout))
        return outcomes_from_proto(response, len(cases))

    async def stop(self) -> None:
        for connection in self._channels:
            await connection.close()

    async def _call(
        self, what: str, timeout: float, call: Callable[[], Awaitable[T]], wait_s: float = CAPACITY_WAIT_S
    ) -> T:
        """Call with a deadline; while the gateway is full, wait as long as its answer asks and call again, up to ``wait_s``."""
        with self._account.during(ActivityName.WAITING_FOR_GATEWAY.of(what), on=GATEWAY) as wait:
            async with deadline(wait_s + timeout, f"{what} at the environment gateway {self.address}"):
                while True:
                    try:
                        with translated_errors(f"environment gateway {self.address}"):
                            return await call()
                    except CapacityError as error:
                        wait.note(error.message)
                        await asyncio.sleep(error.retry_after_s or DEFAULT_RETRY_S)
        raise AssertionError("unreachable: the loop returns or raises")

    def _connected(self, stub: T | None) -> T:
        if stub is None:
            raise ConfigError(
                "this run has no environment gateway, but its workflow asks for one: "
                "remove `envgateway: null` from the recipe, or write a reward by import path (package.module:function)"
            )
        return stub


def _encodable(text: str) -> str:
    """Text that a message can carry, from any text of a policy. An error here would give the policy a second attempt.

    A policy can write lone surrogates (through JSON escapes), which are not Unicode text: they are replaced. Text beyond
    ``MOST_TEXT_BYTES`` is cut.
    """
    encoded = text.encode(errors="replace")
    if len(encoded) > MOST_TEXT_BYTES:
        return encoded[:MOST_TEXT_BYTES].decode(errors="ignore")
    return encoded.decode()
