"""Coder and test-case verifier against a whole gateway: real programs, real cases, real verdicts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config.envgateway import EnvGatewayConfig, ScorerConfig
from services.common.records import Task
from services.common.telemetry.accounts import TimeAccount
from services.common.text.programs import program_of
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from services.inference.gateway import GatewayClient
from services.inference.rollouts import RolloutPolicy
from services.inference.workflows.base import JudgeCase, Outcome, ProgramStatus, WorkflowContext
from services.inference.workflows.codegen import CodegenVerifier, CodegenVerifierSettings
from services.orchestrator.tasks.code_rows import code_row
from tests.integration.envgateway.conftest import CONFIG
from tests.unit.inference.fakes import FakeGateway, make_context, served_policy

ADD = "print(sum(map(int, input().split())))"
CARELESS = "a, b = input().split()\nprint(abs(int(a)) + int(b))"
ROW = {
    "problem": "Print the sum of two whole numbers.",
    "tests": {"kind": "stdin", "cases": [{"stdin": "1 2", "expected": "3"}, {"stdin": "-3 1", "expected": "-2"}]},
    "solution": f"```python\n{ADD}\n```",
}


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayClient]:
    config = EnvGatewayConfig(port=0, sandbox=CONFIG, math=ScorerConfig(num_workers=1, timeout_s=3.0))
    started = Gateway(config, SandboxPool.start_before_threads(CONFIG))
    port = await started.start()
    client = GatewayClient(TimeAccount("replica/a"))
    client.connect(f"127.0.0.1:{port}")
    yield client
    await client.stop()
    await started.stop()


async def play(
    gateway: GatewayClient, programs: list[str], cases: list[dict[str, Any]], row: dict[str, Any] | None = None
) -> Outcome:
    coder = await served_policy([f"```python\n{program}\n```" for program in programs], context_length=1 << 15)
    words = await served_policy([f"```json\n{json.dumps(cases)}\n```"], context_length=1 << 15)
    verifier = RolloutPolicy(
        dataclasses.replace(words, name="model1"), request_prefix="r", seed=2, account=TimeAccount("replica/a")
    )
    context = make_context(coder, FakeGateway(), max_new_tokens=8000)
    context = WorkflowContext(
        policies={**context.policies, "model1": verifier},
        gateway=gateway,
        sampling=context.sampling,
        seed=1,
        episode_seed=1,
    )
    task = Task(task_id="t", data=row or ROW)
    return await CodegenVerifier(CodegenVerifierSettings(case_time_s=3.0, num_cases=len(cases))).run(task, context)


@pytest.mark.parametrize(
    ("programs", "cases", "rewards"),
    [
        ([ADD], [{"input": "-5 2\n", "output": "-3\n"}], [1.0, 2.0]),
        ([CARELESS, ADD], [{"input": "-5 2\n", "output": "-3"}, {"input": "0 0", "output": "0"}], [0.0, 2.0, 1.0]),
        ([CARELESS], [{"input": "5 2", "output": "7"}], [0.0, 1.0]),
        ([ADD, CARELESS], [{"input": "-5 2", "output": "7"}], [1.0, 0.0, 0.0]),
    ],
    ids=["right at once", "caught and corrected", "not caught", "talked out of it"],
)
async def test_a_rollout(
    gateway: GatewayClient, programs: list[str], cases: list[dict[str, Any]], rewards: list[float]
) -> None:
    outcome = await play(gateway, programs, cases)
    assert [sequence.reward for sequence in outcome.sequences] == rewards
    assert outcome.reward == (rewards[0] if len(rewards) == 2 else rewards[2])


async def test_real_rows_are_solved_by_their_reference_solution_and_checked_by_their_own_cases(
    gateway: GatewayClient, data_root: Path
) -> None:
    """Their first cases, as a verifier would write them; then the same with the output of the other case."""
    lines = (data_root / "areal_rlvr_samples" / "rlvr_code.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        row = code_row(json.loads(line), f"row {number}")
        pairs = [(case["stdin"], case["expected"]) for case in row["tests"]["cases"]]
        (first, right), (second, other) = pairs[0], next(pair for pair in pairs if pair[1] != pairs[0][1])
        row["tests"]["cases"] = row["tests"]["cases"][:3]  # of up to hundreds
        cases = [{"input": first, "output": right}, {"input": second, "output": other}]
        outcome = await play(gateway, [program_of(row["solution"])], cases, row)
        assert [sequence.reward for sequence in outcome.sequences] == [1.0, 2.0], row["problem"]
        broken = [{"input": first, "output": other}]
        outcome = await play(gateway, [program_of(row["solution"])], broken, row)
        assert [sequence.reward for sequence in outcome.sequences] == [1.0, 1.0, 1.0]
        assert outcome.metrics["reference_missing"] == 0.0


async def test_verdicts_of_hostile_programs_and_odd_values_come_back_case_by_case(gateway: GatewayClient) -> None:
    code = "import sys\nn = int(input())\nprint(n if n < 2 else 1 / 0 if n == 2 else sys.stdin.foo)"
    cases = [JudgeCase(given=str(n), expected="1") for n in (1, 0, 2, 3)]
    outcomes = await gateway.judge(code, cases, case_time_s=3.0)
    V = ProgramStatus
    assert [o.verdict for o in outcomes] == [V.OK, V.WRONG_ANSWER, V.RUNTIME_ERROR, V.RUNTIME_ERROR]
    assert outcomes[1].stdout == "0\n" and "ZeroDivisionError" in outcomes[2].stderr
    endless = await gateway.judge("while True: pass", cases[:1], case_time_s=0.5)
    assert endless[0].verdict is V.TIME_LIMIT
    calls = [JudgeCase(given=[10**30], expected=10**30 + 1), JudgeCase(given=[1.5], expected=[2.5])]
    called = await gateway.judge("def f(x): return x + 1", calls, entry_point="f", case_time_s=3.0)
    assert [o.verdict for o in called] == [V.OK, V.WRONG_ANSWER]
