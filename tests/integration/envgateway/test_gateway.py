"""The whole gateway over real gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common import errors
from services.common.config.envgateway import EnvGatewayConfig, ScorerConfig
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.pb import judge_pb2, judge_pb2_grpc, status_pb2, status_pb2_grpc
from services.common.rpc.client import channel, translated_errors
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG
from tests.integration.envgateway.environments.serving import Client
from tests.waiting import WAIT_S


class Clients(Client):
    """Of every service; errors of episodes arrive as the project's own."""

    def __init__(self, connection: grpc.aio.Channel) -> None:
        super().__init__(pb_grpc.EnvironmentServiceStub(connection))
        self.code = pb_grpc.CodeExecutionServiceStub(connection)
        self.rewards = pb_grpc.RewardServiceStub(connection)
        self.judge = judge_pb2_grpc.JudgeServiceStub(connection)
        self.status = status_pb2_grpc.StatusServiceStub(connection)


@pytest.fixture
async def gateway() -> AsyncIterator[Clients]:
    config = EnvGatewayConfig(
        port=0, sandbox=CONFIG, math=ScorerConfig(num_workers=1, timeout_s=3.0), max_episodes=3,
        environments={"parity": f"{__name__}:Parity"}, rewards=[f"{__name__}:failing", f"{__name__}:odd"],
    )  # fmt: skip
    started = Gateway(config, SandboxPool.start_before_threads(CONFIG))
    port = await started.start()
    connection = channel(f"127.0.0.1:{port}")
    yield Clients(connection)
    await connection.close()
    await started.stop()


class Parity:
    """A user's environment."""

    def __init__(self, context: object) -> None:
        self._number = 0

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        from services.envgateway.envs.base import Observation

        self._number = task["number"]
        return Observation(text=f"is {self._number} even?", admissible_actions=("yes", "no"))

    def step(self, action: str) -> Any:
        from services.envgateway.envs.base import StepResult

        return StepResult(reward=float((action == "yes") == (self._number % 2 == 0)), done=True)

    def close(self) -> None:
        pass


async def test_code_is_executed(gateway: Clients) -> None:
    answer = await gateway.code.ExecuteCode(pb.ExecuteCodeRequest(code="print(47*38)"), timeout=WAIT_S)
    assert (answer.status, answer.stdout, answer.exit_code) == (pb.EXECUTION_STATUS_OK, "1786\n", 0)
    assert answer.HasField("exit_code") and not answer.HasField("signal")
    assert answer.isolation_tier in ("2", "1", "U", "0") and answer.wall_time.ToNanoseconds() > 0
    status = await gateway.status.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)
    assert (status.service, status.state) == ("envgateway", "ready")
    assert status.labels["isolation_tier"] == answer.isolation_tier and status.gauges["sandbox_ok"] == 1


async def test_programs_are_judged_case_by_case(gateway: Clients) -> None:
    cases = [judge_pb2.StdinCase(stdin=text, expected=str(sum(map(int, text.split())))) for text in ("1 2", "3 4")]
    call = judge_pb2.CallCase(args_json=b"[1]", kwargs_json=b'{"b": 2}', expected_json=b"[1, 2]")
    ok, no = judge_pb2.VERDICT_OK, judge_pb2.VERDICT_WRONG_ANSWER
    for code, tests, verdicts in (
        ("print(sum(map(int, input().split())))", {"stdin_tests": judge_pb2.StdinTests(cases=cases)}, [ok, ok]),
        ("print(3)", {"stdin_tests": judge_pb2.StdinTests(cases=cases)}, [ok, no]),
        ("def f(a, b): return [a, b]", {"call_tests": judge_pb2.CallTests(entry_point="f", cases=[call])}, [ok]),
        ("def f(a): return a", {"assert_tests": judge_pb2.AssertTests(tests="assert f(1) == 2")}, [no]),
    ):
        answer = await gateway.judge.Judge(judge_pb2.JudgeRequest(code=code, **tests), timeout=WAIT_S)
        assert [case.verdict for case in answer.cases] == verdicts
        assert (answer.verdict, answer.num_cases) == (verdicts[-1], len(verdicts)) and answer.isolation_tier
        assert answer.cases[0].exit_code == 0 and not answer.cases[0].HasField("signal")


async def test_limits_and_options_travel(gateway: Clients) -> None:
    request = pb.ExecuteCodeRequest(
        code="import sys\nlen(sys.stdin.read())", stdin=b"abc", print_trailing_expression=True
    )
    assert (await gateway.code.ExecuteCode(request, timeout=WAIT_S)).stdout == "3\n"
    slow = pb.ExecuteCodeRequest(code="while True: pass")
    slow.limits.wall_time.FromMilliseconds(200)
    assert (await gateway.code.ExecuteCode(slow, timeout=WAIT_S)).status == pb.EXECUTION_STATUS_TIME_LIMIT
    slow.limits.wall_time.FromMilliseconds(0)
    with pytest.raises(errors.InvalidRequestError, match="wall_s is 0"), translated_errors("gateway"):
        await gateway.code.ExecuteCode(slow, timeout=WAIT_S)
    other = pb.ExecuteCodeRequest(code="main(){}", language="c")
    assert (await gateway.code.ExecuteCode(other, timeout=WAIT_S)).status == pb.EXECUTION_STATUS_INVALID_REQUEST
    noise = pb.ExecuteCodeRequest(code=r"import os; os.write(1, b'\xff\n')")
    assert (await gateway.code.ExecuteCode(noise, timeout=WAIT_S)).stdout == "\ufffd\n"


async def test_rewards_are_computed(gateway: Clients) -> None:
    async def outcome(reward: str, completion: str, task: dict[str, Any]) -> pb.ComputeRewardResponse:
        request = pb.ComputeRewardRequest(reward=reward, completion=completion, task_json=json.dumps(task).encode())
        return await gateway.rewards.ComputeReward(request, timeout=WAIT_S)

    assert (await outcome("boxed", r"\boxed{4}", {"answer": 4})).outcome == pb.REWARD_OUTCOME_CORRECT
    assert (await outcome("math", r"\boxed{5}", {"answer": 4})).outcome == pb.REWARD_OUTCOME_WRONG
    assert (await outcome("boxed", "4", {"answer": 4})).outcome == pb.REWARD_OUTCOME_UNPARSED
    tests = {"kind": "call", "entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}]}
    for answer, expected in (
        ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```", pb.REWARD_OUTCOME_CORRECT),
        ("```python\ndef add(a, b):\n    return a - b\n```", pb.REWARD_OUTCOME_WRONG),
        ("```python\n\n```", pb.REWARD_OUTCOME_UNPARSED),
        ("I would rather not.", pb.REWARD_OUTCOME_WRONG),
    ):
        assert (await outcome("code", answer, {"tests": tests})).outcome == expected
    with pytest.raises(errors.InvalidRequestError, match="unknown reward"), translated_errors("gateway"):
        await outcome("luck", "", {"answer": 4})
    with pytest.raises(errors.InvalidRequestError, match="no reference answer"), translated_errors("gateway"):
        await outcome("boxed", "", {})
    with pytest.raises(errors.InvalidRequestError, match="task_json"), translated_errors("gateway"):
        await gateway.rewards.ComputeReward(pb.ComputeRewardRequest(reward="boxed", task_json=b"{"), timeout=WAIT_S)


async def test_a_single_step_episode(gateway: Clients) -> None:
    task = {"question": "What is 2 + 2?", "answer": "4", "environment": {"reward": "boxed"}}
    episode = await gateway.create("single_step", task)
    assert episode.observation == "What is 2 + 2?" and episode.lease.seconds == 300
    end = await gateway.step(episode.episode_id, 1, r"\boxed{4}")
    assert (end.reward, end.done) == (1.0, True)
    assert await gateway.step(episode.episode_id, 1, "again") == end
    await gateway.close(episode.episode_id)
    with pytest.raises(errors.EpisodeNotFoundError):
        await gateway.step(episode.episode_id, 1, "again")


def _call(code: str) -> str:
    return "<tool_call>" + json.dumps({"name": "python", "arguments": {"code": code}}) + "</tool_call>"


async def test_the_last_turns_call_is_not_run(gateway: Clients) -> None:
    task = {"question": "?", "answer": 1, "environment": {"reward": "boxed", "max_turns": 1}}
    episode = await gateway.create("tool", task)
    end = await gateway.step(episode.episode_id, 1, _call("print(1)"))
    assert (end.done, end.reward, end.metrics["tool_calls"], end.metrics["reward_unparsed"]) == (True, 0.0, 0, 1)


async def test_a_failed_grader_is_an_error_and_never_a_reward(gateway: Clients) -> None:
    task = {"question": "?", "answer": 1, "environment": {"reward": f"{__name__}:failing"}}
    episode = await gateway.create("single_step", task)
    with pytest.raises(errors.InfrastructureError, match="the grader"):
        await gateway.step(episode.episode_id, 1, "x")  # the client asks again by itself


def failing(task: dict[str, Any], completion: str) -> float:
    raise ZeroDivisionError


def odd(task: dict[str, Any], completion: str) -> float:
    if completion == "odd":
        raise ValueError("\ud800")
    return 1.0


async def test_an_odd_answer_is_told_without_the_odd_letters(gateway: Clients) -> None:
    request = pb.ComputeRewardRequest(reward=f"{__name__}:odd", task_json=b"{}", completion="odd")
    result = await gateway.rewards.ComputeReward(request, timeout=WAIT_S)
    assert (result.outcome, result.detail.endswith("ValueError: ?")) == (pb.REWARD_OUTCOME_GRADER_FAILED, True)


async def test_a_program_that_raises_an_odd_text_is_wrong(gateway: Clients) -> None:
    tests = [("assert", "def check(f):\n    r = f(1)\n    assert r == 5, f'got {r}'\n"), ("assert", "assert f(1) == 5")]
    for code in ("def f(n): raise ValueError('\\ud800')", "def f(n): return '\\ud800'"):
        for kind, text in tests:
            task = {"tests": {"kind": kind, "tests": text, "entry_point": "f"}}
            request = pb.ComputeRewardRequest(reward="code", task_json=json.dumps(task).encode(), completion=code)
            result = await gateway.rewards.ComputeReward(request, timeout=WAIT_S)
            assert (result.outcome, result.reward) == (pb.REWARD_OUTCOME_WRONG, 0.0), (code, text)


async def test_episode_errors_are_structured(gateway: Clients) -> None:
    with pytest.raises(errors.UnknownEnvironmentError):
        await gateway.create("nowhere", {})
    with pytest.raises(errors.InvalidRequestError, match=r"environment\.max_turn"):
        await gateway.create("tool", {"question": "?", "environment": {"max_turn": 3}})
    same = [await gateway.create("parity", {"number": 1}, request_id="once") for _ in range(2)]
    assert same[0].episode_id == same[1].episode_id and list(same[0].admissible_actions) == ["yes", "no"]
    assert (await gateway.step(same[0].episode_id, 1, "no")).reward == 1.0
    for _ in range(2):
        await gateway.create("parity", {"number": 1})
    with pytest.raises(errors.CapacityError) as full:
        await gateway.create("parity", {"number": 1})
    assert full.value.retry_after_s


@pytest.mark.slow
async def test_the_process_starts_from_a_recipe_and_stops_cleanly(tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[3] / "recipes" / "quickstart"
    overrides = ["envgateway.port=0", "envgateway.sandbox.allow_tier_0=true", "envgateway.sandbox.num_slots=1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.envgateway", "--recipe", str(recipe)),
        *(part for override in overrides for part in ("--set", override)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    os.chmod(tmp_path, 0o711)
    assert process.stderr is not None
    seen = b""
    async with asyncio.timeout(60):
        while b"server.ready" not in seen:
            line = await process.stderr.readline()
            assert line, seen.decode()
            seen += line
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []
