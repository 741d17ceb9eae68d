"""Code Judge's clients, their oddities included, against the HTTP interface of a gateway with its own sandbox."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from extras.code_judge import server as http
from extras.code_judge.tests.judge_clients import GradingClient, RolloutClient, Status, Submission
from services.common.config.envgateway import EnvGatewayConfig, HttpConfig
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG

LIMITS = CONFIG.model_copy(update={"wall_time_s": 4.0})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = EnvGatewayConfig(port=0, sandbox=LIMITS, http=HttpConfig(port=0))
    gateway = Gateway(config, SandboxPool.start_before_threads(LIMITS))
    await gateway.start()
    assert gateway.http is not None
    yield gateway.http.port
    await gateway.stop()


@pytest.fixture
async def rollout(port: int) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(port) as client:
        yield client


async def test_a_rollouts_tool_calls_read_as_with_code_judge(rollout: RolloutClient) -> None:
    words = await rollout.call("x = 20\nx + 1")
    assert re.match(r"Tool call success\nstdout: 21\n\nexecution time: \d\.", words), words
    assert "stdout: from stdin\n" in await rollout.call("print(input())", stdin="from stdin")
    assert "stdout: é€😀\n" in await rollout.call("print('é€😀')")
    words = await rollout.call("print('before')\n1 / 0")
    assert words.startswith("Tool call failure\nreason: \n") and "ZeroDivisionError" in words
    words = await rollout.call("while True: pass")
    assert words.startswith("Tool call failure\nreason: worker_timeout\n")
    assert float(words.rpartition("execution time: ")[2].removesuffix("s")) >= 4
    assert "Tool call success\nexecution time" in await rollout.call("if __name__ == '__main__':\n    y = 1")


async def test_cells_that_are_replayed_are_silent_and_leave_their_names(rollout: RolloutClient) -> None:
    words = await rollout.call("print('noise')\na = 5", "raise ValueError('of then')", "a * 2")
    assert words.startswith("Tool call success\nstdout: 10\n\nexecution")


async def test_the_judges_own_client_reads_every_field(port: int) -> None:
    client = GradingClient(port)
    assert await asyncio.to_thread(client.ping) == "pong"
    assert await asyncio.to_thread(client.status) == Status(queue=0, num_workers=2)
    submissions = [
        Submission("same id", "python", "print(input())", "1", " 1 \n"),
        Submission("same id", "python", "print(input())", "1", "2"),
        Submission(None, "python", "print('anything')"),
        Submission("fails", "python", "import sys; print(1); sys.exit(3)", None, "1"),
        Submission("math", "math", "\\boxed{\\frac{1}{2}}", None, "0.5"),
    ]
    judged = await asyncio.to_thread(client.judge, submissions)
    assert [(result.success, result.run_success, result.reason) for result in judged] == [
        (True, True, ""),
        (False, True, ""),
        (True, True, ""),
        (False, False, ""),
        (True, True, ""),
    ]
    assert [result.sub_id for result in judged if result.sub_id != judged[2].sub_id] == ["same id"] * 2 + [
        "fails",
        "math",
    ]
    assert judged[2].sub_id and all(result.stdout is None and result.stderr is None for result in judged)
    run = await asyncio.to_thread(client.judge, submissions[2:4], "/run/long-batch")
    assert [(result.stdout, result.stderr) for result in run] == [("anything\n", ""), ("1\n", "")]


async def test_fields_that_only_some_clients_send_are_taken_or_passed_over(port: int, rollout: RolloutClient) -> None:
    one = {"type": "python", "solution": "print(1)", "options": {"timeout": "3"}, "language": "py", "sub_id": "x"}
    [result, _] = await rollout.send([one, {"type": "python", "solution": "print(2)", "sub_id": ""}])
    assert result["success"] and result["sub_id"] == "x"


async def test_a_long_batch_that_takes_its_time_is_not_silent_and_still_json(
    port: int, rollout: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_KEEP_ALIVE_S", 0.05)
    slow = Submission("s", "python", "import time; time.sleep(0.4); print('é')", None, "é")
    judged, words = await asyncio.gather(
        asyncio.to_thread(GradingClient(port).judge, [slow, slow]),
        rollout.call("import time; time.sleep(0.3)\n'done'"),
    )
    assert [result.success for result in judged] == [True, True] and "stdout: 'done'" in words
