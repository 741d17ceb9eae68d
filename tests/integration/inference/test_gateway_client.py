"""The gateway over real gRPC: answers are converted, broken machinery is never an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from services.common import errors
from services.common.errors import (
    CapacityError,
    ConfigError,
    InfrastructureError,
)
from services.common.pb import environment_pb2 as env
from services.common.pb import judge_pb2 as pb
from services.common.rpc.client import MESSAGE_BYTES, to_status
from services.common.telemetry.accounts import TimeAccount
from services.inference.gateway import MOST_TEXT_BYTES, GatewayClient, _encodable
from services.inference.rollouts import _CLOCK, RolloutClock
from services.inference.workflows.base import JudgeCase, ProgramStatus
from tests.integration.inference.peers import FakeGatewayServer
from tests.unit.inference.fakes import make_task


@pytest.fixture
async def gateway(gateway_server: FakeGatewayServer) -> AsyncIterator[GatewayClient]:
    client = GatewayClient(TimeAccount("replica/a"))
    client.connect(gateway_server.address)
    yield client
    await client.stop()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *(
            (status.name, status)
            for status in ProgramStatus
            if status not in (ProgramStatus.WRONG_ANSWER, ProgramStatus.COMPILE_ERROR)
        ),
        ("COMPILE_ERROR", ProgramStatus.RUNTIME_ERROR),
    ],
)
async def test_what_a_program_did_is_an_answer(
    gateway: GatewayClient, gateway_server: FakeGatewayServer, name: str, status: ProgramStatus
) -> None:
    number = env.ExecutionStatus.Value(f"EXECUTION_STATUS_{name}")
    gateway_server.answer(env.ExecuteCodeResponse(status=number, stdout="out", stderr="err", detail="why"))
    execution = await gateway.execute_code("x", stdin=b"in", print_trailing_expression=True)
    assert (execution.status, execution.stdout, execution.stderr, execution.detail) == (status, "out", "err", "why")
    (request,) = gateway_server.requests
    assert (request.code, request.stdin, request.language) == ("x", b"in", "python")
    assert request.print_trailing_expression


@pytest.mark.parametrize(
    "answer",
    [
        env.ExecuteCodeResponse(status=env.EXECUTION_STATUS_INFRA_ERROR, detail="fork server died"),
        env.ExecuteCodeResponse(status=env.EXECUTION_STATUS_CANCELLED),
        env.ExecuteCodeResponse(),
    ],
    ids=["infra", "cancelled", "unset"],
)
async def test_broken_machinery_is_no_answer(
    gateway: GatewayClient, gateway_server: FakeGatewayServer, answer: env.ExecuteCodeResponse
) -> None:
    gateway_server.answer(answer)
    with pytest.raises(InfrastructureError):
        await gateway.execute_code("x")


async def test_a_full_gateway_is_asked_again_with_the_same_request(
    gateway: GatewayClient, gateway_server: FakeGatewayServer
) -> None:
    gateway_server.answer(CapacityError("full", retry_after_s=0.2), CapacityError("full", retry_after_s=0.2))
    began = time.monotonic()
    assert (await gateway.execute_code("x")).status is ProgramStatus.OK
    assert time.monotonic() - began >= 0.4
    assert len({request.request_id for request in gateway_server.requests}) == 1
    assert len(gateway_server.requests) == 3


async def test_every_call_is_a_phase_of_its_rollout_with_what_came_of_it(
    gateway: GatewayClient, gateway_server: FakeGatewayServer
) -> None:
    clock = RolloutClock()
    _CLOCK.set(clock)
    gateway_server.answer(env.ExecuteCodeResponse(status=env.EXECUTION_STATUS_INFRA_ERROR))
    with pytest.raises(InfrastructureError):
        await gateway.execute_code("x")
    await gateway.execute_code("x")
    await gateway.step("e1", 1, "go")
    await gateway.compute_reward("math", make_task(), "42")
    assert [(phase.what, phase.detail) for phase in clock.timing().phases] == [
        ("execute_code", "INFRASTRUCTURE"),
        ("execute_code", "ok"),
        ("step", "turn 1, reward 0.5, done"),
        ("compute_reward", "math: 1"),
    ]


@pytest.mark.parametrize("opaque", [True, False])
async def test_the_mark_of_an_opaque_reward_comes_into_the_metrics(
    gateway: GatewayClient, gateway_server: FakeGatewayServer, opaque: bool
) -> None:
    gateway_server.answer(env.ComputeRewardResponse(outcome=env.REWARD_OUTCOME_CORRECT, reward=1.0, opaque=opaque))
    reward = await gateway.compute_reward("code", make_task(), "x")
    assert reward.metrics == {"reward_unparsed": 0.0} | ({"reward_opaque": 1.0} if opaque else {})


async def test_a_grader_that_failed_gave_no_reward(gateway: GatewayClient, gateway_server: FakeGatewayServer) -> None:
    gateway_server.answer(env.ComputeRewardResponse(outcome=env.REWARD_OUTCOME_GRADER_FAILED, reward=0.0))
    with pytest.raises(InfrastructureError, match="grader"):
        await gateway.compute_reward("math", make_task(), "x")


async def test_judging_may_take_as_long_as_its_cases_and_other_rewards_may_not(
    gateway: GatewayClient, gateway_server: FakeGatewayServer
) -> None:
    """A program that runs into its limit on every case is wrong, and no infrastructure failure."""
    for reward in ("code", "math"):
        await gateway.compute_reward(reward, make_task(), "x")
    code, math = gateway_server.time_left_s
    assert code > 500 and 0 < math < 70


async def test_an_episode_is_played(gateway: GatewayClient, gateway_server: FakeGatewayServer) -> None:
    episode = await gateway.create_episode("house", make_task(), seed=3)
    assert (episode.episode_id, episode.observation, episode.admissible_actions) == ("e1", "look", ("go",))
    assert episode.tools == ({"type": "function"},)
    step = await gateway.step("e1", 1, "go")
    assert (step.observation, step.reward, step.done, step.metrics) == ("end", 0.5, True, {"tool_errors": 1.0})
    await gateway.close("e1")


async def test_a_gateway_that_comes_late_is_waited_for(gateway_server: FakeGatewayServer) -> None:
    await gateway_server.stop()
    client = GatewayClient(TimeAccount("replica/a"))
    client.connect(gateway_server.address)
    call = asyncio.create_task(client.execute_code("x"))
    await asyncio.sleep(0.3)
    await gateway_server.start()
    assert (await call).stdout == "x\n"
    await client.stop()


async def test_a_run_without_a_gateway_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match="envgateway"):
        await GatewayClient(TimeAccount("replica/a")).execute_code("x")


CASES = [JudgeCase(given="1", expected="2"), JudgeCase(given="3", expected="4")]


@pytest.mark.parametrize("verdict", list(ProgramStatus))
async def test_every_case_has_its_verdict(
    gateway: GatewayClient, gateway_server: FakeGatewayServer, verdict: ProgramStatus
) -> None:
    number = pb.Verdict.Value(f"VERDICT_{verdict.name}")
    cases = [
        pb.CaseResult(verdict=pb.VERDICT_OK),
        pb.CaseResult(index=1, verdict=number, detail="d", stdout="o", stderr="e"),
    ]
    gateway_server.answer(pb.JudgeResponse(verdict=number, cases=cases, num_cases=2))
    first, second = await gateway.judge("x", CASES, case_time_s=2.5)
    assert first.passed and second.passed == (verdict is ProgramStatus.OK)
    assert (second.verdict, second.detail, second.stdout, second.stderr) == (verdict, "d", "o", "e")
    (request,) = gateway_server.requests
    assert [(case.stdin, case.expected) for case in request.stdin_tests.cases] == [("1", "2"), ("3", "4")]
    assert (request.code, request.limits.wall_time.ToTimedelta().total_seconds(), request.stop_early) == (
        "x",
        2.5,
        False,
    )


async def test_a_program_that_is_refused_is_refused_on_every_case(
    gateway: GatewayClient, gateway_server: FakeGatewayServer
) -> None:
    gateway_server.answer(pb.JudgeResponse(verdict=pb.VERDICT_INVALID_REQUEST, detail="too long"))
    outcomes = await gateway.judge("x", CASES)
    assert [(o.verdict, o.detail) for o in outcomes] == [(ProgramStatus.INVALID_REQUEST, "too long")] * 2


@pytest.mark.parametrize(
    "answer",
    [
        pb.JudgeResponse(verdict=pb.VERDICT_INFRA_ERROR, detail="no sandbox"),
        pb.JudgeResponse(verdict=pb.VERDICT_CANCELLED),
        pb.JudgeResponse(),
        pb.JudgeResponse(verdict=pb.VERDICT_OK, cases=[pb.CaseResult(verdict=pb.VERDICT_OK)]),
        pb.JudgeResponse(
            verdict=pb.VERDICT_WRONG_ANSWER,
            cases=[pb.CaseResult(verdict=pb.VERDICT_WRONG_ANSWER), pb.CaseResult(verdict=pb.VERDICT_INFRA_ERROR)],
        ),
    ],
    ids=["infra", "cancelled", "unset", "a case is missing", "one case is infra"],
)
async def test_a_judge_that_failed_gave_no_verdict(
    gateway: GatewayClient, gateway_server: FakeGatewayServer, answer: pb.JudgeResponse
) -> None:
    gateway_server.answer(answer)
    with pytest.raises(InfrastructureError):
        await gateway.judge("x", CASES)


# -- Any text of a policy can be sent: an error would give the policy another attempt.


@pytest.mark.parametrize(
    "text", ["", "plain", "\ud800", "a\udfffb", "é" * MOST_TEXT_BYTES, "x" * (10 << 20), "\0", "😀"]
)
def test_any_text_becomes_one_that_a_message_carries(text: str) -> None:
    sent = _encodable(text)
    assert len(sent.encode()) <= MOST_TEXT_BYTES
    if len(text) < 10 and "\ud800" not in text and "\udfff" not in text:
        assert sent == text


@pytest.mark.parametrize("message", ["\ud800", "\udfff" * 10_000, "x" * 10_000_000])
def test_an_error_that_repeats_an_action_can_be_told(message: str) -> None:
    status = to_status(errors.InfrastructureError(message))
    assert len(status.details.encode()) <= MESSAGE_BYTES + 3
