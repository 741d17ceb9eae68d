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
from google.protobuf.message import Message

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
from services.common.records import PhaseKind, Task
from services.common.rpc.client import channel, translated_errors
from services.common.security.identity import DEADLINES
from services.common.security.keys import Peer
from services.common.telemetry.accounts import GATEWAY, ActivityName, TimeAccount
from services.common.wire import duration_to_proto
from services.inference.rollouts import phase_here
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
    """One channel for all rollouts of a replica. The replica calls ``connect`` with the address from the orchestrator.

    Each call is a phase of the rollout whose task makes it.
    """

    def __init__(self, account: TimeAccount) -> None:
        self._account = account
        self._channels: list[grpc.aio.Channel] = []
        self.address = ""

    def connect(self, address: str) -> None:
        """Use the gateway at ``address``; calls in flight at another one go on there."""
        if address and address != self.address:
            self.address = address
            self._channels.append(channel(address, Peer.ENVGATEWAY))

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution:
        request = environment_pb2.ExecuteCodeRequest(
            request_id=uuid.uuid4().hex,
            language="python",
            code=_encodable(code),
            stdin=stdin,
            print_trailing_expression=print_trailing_expression,
        )
        with phase_here(PhaseKind.EXECUTE_CODE) as phase:
            call = self._stub(environment_pb2_grpc.CodeExecutionServiceStub).ExecuteCode
            response = await self._call("execution", call, request, _limit("ExecuteCode") + EXECUTION_MARGIN_S)
            status = _STATUS.get(response.status)
            if status is None:
                name = environment_pb2.ExecutionStatus.Name(response.status)
                raise InfrastructureError(f"code execution ended with {name}: {response.detail}")
            phase.detail = status.value
        return Execution(
            status=status,
            stdout=response.stdout,
            stderr=response.stderr,
            truncated=response.truncated,
            wall_time_s=response.wall_time.seconds + response.wall_time.nanos * 1e-9,
            detail=response.detail,
        )

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        request = environment_pb2.CreateEpisodeRequest(
            request_id=uuid.uuid4().hex, environment=environment, task_json=orjson.dumps(task.data), seed=seed
        )
        with phase_here(PhaseKind.CREATE_EPISODE) as phase:
            call = self._stub(environment_pb2_grpc.EnvironmentServiceStub).CreateEpisode
            response = await self._call("environment", call, request, _limit("CreateEpisode"))
            phase.detail = environment
        return Episode(
            episode_id=response.episode_id,
            observation=response.observation,
            admissible_actions=tuple(response.admissible_actions),
            tools=tuple(orjson.loads(response.tools_json)) if response.tools_json else (),
            messages=tuple({"role": one.role, "content": one.content} for one in response.messages),
        )

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        request = environment_pb2.StepEpisodeRequest(episode_id=episode_id, turn=turn, action=_encodable(action))
        with phase_here(PhaseKind.STEP) as phase:
            call = self._stub(environment_pb2_grpc.EnvironmentServiceStub).StepEpisode
            response = await self._call("environment", call, request, _limit("StepEpisode"))
            phase.detail = f"turn {turn}, reward {response.reward:g}" + (", done" if response.done else "")
        return Step(
            observation=response.observation,
            reward=response.reward,
            done=response.done,
            admissible_actions=tuple(response.admissible_actions),
            metrics=dict(response.metrics),
        )

    async def close(self, episode_id: str) -> None:
        request = environment_pb2.CloseEpisodeRequest(episode_id=episode_id)
        with phase_here(PhaseKind.CLOSE_EPISODE):
            call = self._stub(environment_pb2_grpc.EnvironmentServiceStub).CloseEpisode
            await self._call("environment", call, request, _limit("CloseEpisode"))

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        request = environment_pb2.ComputeRewardRequest(
            request_id=uuid.uuid4().hex,
            reward=reward,
            task_json=orjson.dumps(task.data),
            completion=_encodable(completion),
        )
        limits = (JUDGING_S, JUDGING_WAIT_S) if reward == "code" else (_limit("ComputeReward"), CAPACITY_WAIT_S)
        with phase_here(PhaseKind.COMPUTE_REWARD) as phase:
            call = self._stub(environment_pb2_grpc.RewardServiceStub).ComputeReward
            response = await self._call("reward", call, request, *limits)
            if response.outcome in (
                environment_pb2.REWARD_OUTCOME_GRADER_FAILED,
                environment_pb2.REWARD_OUTCOME_UNSPECIFIED,
            ):
                raise GraderFailedError(f"the grader of reward {reward!r} failed: {response.detail}")
            is_unparsed = response.outcome == environment_pb2.REWARD_OUTCOME_UNPARSED
            phase.detail = f"{reward}: {response.reward:g}" + (", unparsed" if is_unparsed else "")
        return Reward(value=response.reward, unparsed=is_unparsed, detail=response.detail, opaque=response.opaque)

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        request = judge_request(
            _encodable(code), cases, entry_point=entry_point, case_time_s=case_time_s, request_id=uuid.uuid4().hex
        )
        with phase_here(PhaseKind.JUDGE) as phase:
            call = self._stub(judge_pb2_grpc.JudgeServiceStub).Judge
            time_s = _limit("Judge") + EXECUTION_MARGIN_S + len(cases) * case_time_s
            found = outcomes_from_proto(await self._call("judge", call, request, time_s), len(cases))
            phase.detail = f"{sum(outcome.passed for outcome in found)} of {len(found)} cases passed"
        return found

    async def stop(self) -> None:
        for connection in self._channels:
            await connection.close()

    async def _call(
        self,
        what: str,
        call: Callable[..., Awaitable[T]],
        request: Message,
        timeout_s: float,
        wait_s: float = CAPACITY_WAIT_S,
    ) -> T:
        """Call with a deadline; while the gateway is full, wait as long as its answer asks and call again, up to ``wait_s``."""
        with self._account.during(ActivityName.WAITING_FOR_GATEWAY.of(what), on=GATEWAY) as wait:
            async with deadline(wait_s + timeout_s, f"{what} at the environment gateway {self.address}"):
                while True:
                    try:
                        with translated_errors(f"environment gateway {self.address}"):
                            return await call(request, timeout=timeout_s)
                    except CapacityError as error:
                        wait.note(error.message)
                        await asyncio.sleep(error.retry_after_s or DEFAULT_RETRY_S)
        raise AssertionError("unreachable: the loop returns or raises")

    def _stub(self, service: Callable[[grpc.aio.Channel], T]) -> T:
        if not self._channels:
            raise ConfigError(
                "this run has no environment gateway, but its workflow asks for one: "
                "remove `envgateway: null` from the recipe, or write a reward by import path (package.module:function)"
            )
        return service(self._channels[-1])


def _limit(call: str) -> float:
    return DEADLINES[call] or 0.0


def _encodable(text: str) -> str:
    """Text that a message can carry, from any text of a policy. An error here would give the policy a second attempt.

    A policy can write lone surrogates (through JSON escapes), which are not Unicode text: they are replaced. Text beyond
    ``MOST_TEXT_BYTES`` is cut.
    """
    encoded = text.encode(errors="replace")
    if len(encoded) > MOST_TEXT_BYTES:
        return encoded[:MOST_TEXT_BYTES].decode(errors="ignore")
    return encoded.decode()
