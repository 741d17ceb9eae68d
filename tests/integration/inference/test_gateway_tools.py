"""``tool_math`` with a tool that keeps a state, against a real gateway: one process per rollout, which ends with the rollout."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.config.envgateway import EnvGatewayConfig, LiveConfig, SandboxConfig, ToolsConfig
from services.common.records import TokenSequence
from services.common.telemetry.accounts import TimeAccount
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from services.inference.gateway import GatewayClient
from services.inference.workflows.tools import ToolMath, ToolMathSettings
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, qwen_like_chat, served_policy
from tests.waiting import until

ANSWER = "<answer>\\boxed{42}</answer>"


@dataclasses.dataclass
class Ground:
    client: GatewayClient
    pool: SandboxPool

    async def play(self, *texts: str) -> tuple[TokenSequence, list[str]]:
        policy = await served_policy(list(texts), context_length=8192)
        settings = ToolMathSettings(tools=["jupyter_code", "python_code_with_standard_io"], reward="boxed")
        context = dataclasses.replace(make_context(policy, FakeGateway()), gateway=self.client)
        (sequence,) = (await ToolMath(settings).run(make_task(), context)).sequences
        read = [qwen_like_chat().decode(s.token_ids.tolist()) for s in sequence.segments if not s.is_policy][1:]
        return sequence, [text.split("<tool_response>\n")[1].split("\n</tool_response>")[0] for text in read]


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    sandbox = SandboxConfig(allow_tier_0=True, num_slots=1, num_live=2, prewarm_scientific=False)
    tools = ToolsConfig(jupyter=LiveConfig(cell_time_s=3.0))
    pool = SandboxPool.start_before_threads(sandbox)
    gateway = Gateway(EnvGatewayConfig(port=0, sandbox=sandbox, tools=tools), pool)
    client = GatewayClient(TimeAccount("replica/a"))
    client.connect(f"127.0.0.1:{await gateway.start()}")
    yield Ground(client, pool)
    await client.stop()
    await gateway.stop()


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_the_cells_of_a_rollout_share_a_process_that_ends_with_it(ground: Ground) -> None:
    sequence, responses = await ground.play(
        _call("jupyter_code", code="x = 6"),
        _call("python_code_with_standard_io", code="print(int(input()) + 1)", input="1"),
        _call("jupyter_code", code="print('Error')\nx * 7"),
        ANSWER,
    )
    assert responses == ["(no output)", "2", "Error\n42"]
    assert (sequence.reward, sequence.metrics["tool_calls"], sequence.metrics["penalty"]) == (1.0, 3, 0.0)
    _, (fresh, *_) = await ground.play(_call("jupyter_code", code="'x' in globals()"), ANSWER)
    assert fresh == "False"
    await until(lambda: not ground.pool.live.gauges["live_processes"])


async def test_what_fails_is_counted_by_its_status(ground: Ground) -> None:
    sequence, responses = await ground.play(
        _call("jupyter_code", code="1 / 0"),
        _call("jupyter_code", code="import time\ntime.sleep(30)"),
        _call("jupyter_code", cod="1"),
        ANSWER,
    )
    assert "ZeroDivisionError" in responses[0] and "TimeoutError" in responses[1]
    assert responses[2] == "Error: argument 'code' is missing; did you mean it by 'cod'?"
    kinds = {name for name in sequence.metrics if name.startswith("tool_errors_")}
    assert kinds == {"tool_errors_program_error", "tool_errors_time_limit", "tool_errors_invalid_arguments"}
    assert sequence.metrics["tool_error_share"] == 1.0


async def test_more_rollouts_than_processes_wait_for_each_other(ground: Ground) -> None:
    played = await asyncio.gather(*(ground.play(_call("jupyter_code", code=str(n)), ANSWER) for n in range(5)))
    assert [responses for _, responses in played] == [[str(n)] for n in range(5)]
    assert {sequence.metrics["tool_errors"] for sequence, _ in played} == {0}
