"""The HTTP interface as clients of Code Judge use it, over a whole gateway with its own sandbox."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from extras.code_judge import server as gateway_http
from extras.code_judge.settings import HttpConfig
from extras.code_judge.tests.judge_clients import GradingClient, RolloutClient, Status, Submission
from services.common.config.envgateway import EnvGatewayConfig, ScorerConfig
from services.common.errors import ConfigError
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG, LONG, SLEEP_LONG
from tests.waiting import until

RUN_KEYS = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}
JUDGE_KEYS = RUN_KEYS - {"stdout", "stderr"}
BRIEF, QUITE_BRIEF = (CONFIG.model_copy(update={"wall_time_s": time_s}) for time_s in (2.0, 3.0))


class Client:
    def __init__(self, session: aiohttp.ClientSession, gateway: Gateway) -> None:
        self._session = session
        self.gateway = gateway
        assert gateway.http is not None
        self.port = gateway.http.port

    async def get(self, path: str) -> Any:
        async with self._session.get(path) as response:
            assert response.status == 200
            return await response.json()

    async def post(self, path: str, body: object, status: int = 200) -> Any:
        data = io.BytesIO(json.dumps(body).encode())
        async with self._session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def run(self, solution: str, path: str = "/run", **more: Any) -> Any:
        return await self.post(path, {"type": "python", "solution": solution, **more})


@pytest.fixture
async def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr(gateway_http, "QUEUE_WAIT_S", 1.0)
    sandbox = getattr(request, "param", CONFIG)
    config = EnvGatewayConfig(
        port=0, sandbox=sandbox, math=ScorerConfig(num_workers=1, timeout_s=3.0),
        http=HttpConfig(port=0),
    )  # fmt: skip
    gateway = Gateway(config, SandboxPool.start_before_threads(sandbox))
    await gateway.start()
    assert gateway.http is not None
    async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.http.port}") as session:
        yield Client(session, gateway)
    await gateway.stop()


async def test_a_run_has_exactly_the_fields_that_clients_know(client: Client) -> None:
    result = await client.run("print(input())", input="a", expected_output=" a\n", sub_id="mine")
    assert set(result) == RUN_KEYS
    assert (result["sub_id"], result["success"], result["run_success"], result["reason"]) == ("mine", True, True, "")
    assert (result["stdout"], result["stderr"]) == ("a\n", "") and 0 < result["cost"] < CONFIG.wall_time_s
    result = await client.run("print(input())", path="/judge", input="a", expected_output="b")
    assert set(result) == JUDGE_KEYS and result["sub_id"]
    assert (result["success"], result["run_success"], result["reason"]) == (False, True, "")


async def test_a_failing_program_is_no_success_even_without_an_expected_output(client: Client) -> None:
    result = await client.run("print('x' * 5000); raise ValueError('no')", expected_output="")
    assert (result["success"], result["run_success"], result["reason"]) == (False, False, "")
    assert len(result["stdout"]) == 1000 and "ValueError: no" in result["stderr"]
    result = await client.run("input()", input=None, expected_output="")
    assert not result["run_success"] and "EOFError" in result["stderr"]


@pytest.mark.parametrize("client", [BRIEF], indirect=True, ids=["brief"])
async def test_reasons(client: Client) -> None:
    slow = await client.run("import time; time.sleep(30)")
    assert (slow["reason"], slow["run_success"]) == ("worker_timeout", False) and 2 <= slow["cost"] < 10
    assert (await client.run("x" * (2 << 20)))["reason"] == "invalid_input"
    hungry = await client.run("x = b'x' * (1 << 29)")
    assert hungry["reason"] == "" and not hungry["run_success"] and hungry["stderr"]


async def test_an_output_beyond_the_usual_cap_is_still_compared(client: Client) -> None:
    long = "y" * (2 * CONFIG.output_bytes)
    assert (await client.run(f"print('y' * {len(long)})", expected_output=long))["success"]
    result = await client.run(f"print('y' * {len(long) - 1})", expected_output=long)
    assert (result["success"], result["run_success"], len(result["stdout"])) == (False, True, 1000)


@pytest.mark.needs("C++ compiler")
async def test_cpp(client: Client) -> None:
    source = '#include <cstdio>\nint main() { printf("a"); return 0; }'
    result = await client.post("/run", {"type": "cpp", "solution": source, "expected_output": "a"})
    assert result["success"]
    result = await client.post("/run", {"type": "cpp", "solution": "int main() { return x; }"})
    assert (result["success"], result["run_success"], result["reason"]) == (False, False, "") and result["stderr"]


async def test_a_batch_comes_back_in_its_order(client: Client) -> None:
    submissions = [
        {"type": "python", "solution": f"import time; time.sleep({0.2 if n == 0 else 0}); print({n})",
         "expected_output": str(n % 3), "sub_id": f"s{n}"}
        for n in range(9)
    ]  # fmt: skip
    for path in ("/run/batch", "/run/long-batch", "/judge/batch", "/judge/long-batch"):
        answer = await client.post(path, {"type": "batch", "sub_id": "b", "submissions": submissions})
        assert set(answer) == {"sub_id", "results"} and answer["sub_id"] == "b"
        assert [result["sub_id"] for result in answer["results"]] == [f"s{n}" for n in range(9)]
        assert [result["success"] for result in answer["results"]] == [n < 3 for n in range(9)]
        assert all(set(result) == (RUN_KEYS if "run" in path else JUDGE_KEYS) for result in answer["results"])


async def test_a_batch_larger_than_the_queue_is_not_refused(client: Client) -> None:
    submissions = [{"type": "python", "solution": f"print({n})", "expected_output": str(n)} for n in range(400)]
    answer = await client.post("/run/long-batch", {"submissions": submissions})
    assert sum(result["success"] for result in answer["results"]) == 400


@pytest.mark.parametrize("client", [QUITE_BRIEF], indirect=True, ids=["quite brief"])
async def test_a_caller_without_a_slot_in_time_gets_an_error(client: Client) -> None:
    """It waits for 1 s and the time of a program, 3 s; the programs before it take 6 s."""
    hogs = {"submissions": [{"type": "python", "solution": "import time; time.sleep(2.0)"}] * 3}
    long_batch = asyncio.create_task(client.post("/run/long-batch", hogs))
    await until(lambda: client.gateway.sandbox.gauges["sandbox_busy_slots"], "they run")
    quick = {"type": "python", "solution": "1"}
    late = (await client.post("/run/batch", {"submissions": [quick] * 2}))["results"]
    assert [(outcome["reason"], outcome["success"]) for outcome in late] == [("queue_timeout", False)] * 2
    [only] = (await client.post("/run/long-batch", {"submissions": [quick]}))["results"]  # a rollout's tool call
    assert only["success"] and not long_batch.done()
    assert [outcome["reason"] for outcome in (await long_batch)["results"]] == [""] * 3


async def test_a_body_of_another_schema_is_refused_with_the_field(client: Client) -> None:
    refused = await client.post("/run", {"type": "perl", "solution": "1"}, status=422)
    assert refused["detail"][0]["loc"] == ["body", "type"]
    assert (await client.post("/judge/batch", {"submissions": []}, status=422))["detail"]
    assert (await client.post("/judge/batch", "nonsense", status=422))["detail"]


@pytest.mark.parametrize("client", [LONG], indirect=True, ids=["long"])
async def test_a_client_that_leaves_takes_its_jobs_with_it(client: Client) -> None:
    def num_jobs() -> float:
        return sum(n for name, n in client.gateway.queue.gauges.items() if name.endswith(("waiting", "running")))

    for path in ("/run", "/run/long-batch"):
        one = {"type": "python", "solution": SLEEP_LONG}
        body = one if path == "/run" else {"submissions": [one] * 50}
        call = asyncio.create_task(client.post(path, body))
        await until(num_jobs, "its jobs are there")
        call.cancel()
        await until(
            lambda: not num_jobs() and not client.gateway.sandbox.gauges["sandbox_busy_slots"], "its jobs are gone"
        )


async def test_only_loopback_and_a_free_port_will_do() -> None:
    pool = SandboxPool.start_before_threads(CONFIG)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway = Gateway(EnvGatewayConfig(port=0, sandbox=CONFIG, http=HttpConfig(port=port)), pool)
        with pytest.raises(ConfigError, match=r"http\.port"):
            await gateway.start()
        await gateway.stop()


# Code Judge's clients, with their oddities


@pytest.fixture
async def rollout(client: Client) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(client.port) as connected:
        yield connected


@pytest.mark.parametrize("client", [BRIEF], indirect=True, ids=["brief"])
async def test_a_rollouts_tool_calls_read_as_with_code_judge(rollout: RolloutClient) -> None:
    words = await rollout.call("x = 20\nx + 1")
    assert re.match(r"Tool call success\nstdout: 21\n\nexecution time: \d\.", words), words
    assert "stdout: from stdin\n" in await rollout.call("print(input())", stdin="from stdin")
    assert "stdout: é€😀\n" in await rollout.call("print('é€😀')")
    words = await rollout.call("print('before')\n1 / 0")
    assert words.startswith("Tool call failure\nreason: \n") and "ZeroDivisionError" in words
    words = await rollout.call("import time; time.sleep(30)")
    assert words.startswith("Tool call failure\nreason: worker_timeout\n")
    assert float(words.rpartition("execution time: ")[2].removesuffix("s")) >= 2
    assert "Tool call success\nexecution time" in await rollout.call("if __name__ == '__main__':\n    y = 1")


async def test_cells_that_are_replayed_are_silent_and_leave_their_names(rollout: RolloutClient) -> None:
    words = await rollout.call("print('noise')\na = 5", "raise ValueError('of then')", "a * 2")
    assert words.startswith("Tool call success\nstdout: 10\n\nexecution")


async def test_the_judges_own_client_reads_every_field(client: Client) -> None:
    grading = GradingClient(client.port)
    assert await asyncio.to_thread(grading.ping) == "pong"
    assert await asyncio.to_thread(grading.status) == Status(queue=0, num_workers=2)
    submissions = [
        Submission("same id", "python", "print(input())", "1", " 1 \n"),
        Submission("same id", "python", "print(input())", "1", "2"),
        Submission(None, "python", "print('anything')"),
        Submission("fails", "python", "import sys; print(1); sys.exit(3)", None, "1"),
        Submission("math", "math", "\\boxed{\\frac{1}{2}}", None, "0.5"),
    ]
    judged = await asyncio.to_thread(grading.judge, submissions)
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
    run = await asyncio.to_thread(grading.judge, submissions[2:4], "/run/long-batch")
    assert [(result.stdout, result.stderr) for result in run] == [("anything\n", ""), ("1\n", "")]


async def test_fields_that_only_some_clients_send_are_taken_or_passed_over(rollout: RolloutClient) -> None:
    one = {"type": "python", "solution": "print(1)", "options": {"timeout": "3"}, "language": "py", "sub_id": "x"}
    [result, _] = await rollout.send([one, {"type": "python", "solution": "print(2)", "sub_id": ""}])
    assert result["success"] and result["sub_id"] == "x"


async def test_a_long_batch_that_takes_its_time_is_not_silent_and_still_json(
    client: Client, rollout: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_http, "_KEEP_ALIVE_S", 0.05)
    slow = Submission("s", "python", "import time; time.sleep(0.4); print('é')", None, "é")
    judged, words = await asyncio.gather(
        asyncio.to_thread(GradingClient(client.port).judge, [slow, slow]),
        rollout.call("import time; time.sleep(0.3)\n'done'"),
    )
    assert [result.success for result in judged] == [True, True] and "stdout: 'done'" in words
