"""With and without memory a tool call prints the same; a program with varying output is run every time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from services.common.config.processes.envgateway import EnvGatewayConfig, RunMemoryConfig
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.app import Gateway
from services.envgateway.judge.judge import Judge
from services.envgateway.memory.runs import RunMemory
from services.envgateway.queue.embedded import EmbeddedQueue
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult
from services.envgateway.tools.registry import ToolBox
from services.envgateway.tools.session import ToolSession

from .conftest import CONFIG

NUM_PROGRAMS = 40
_TERMS = ("12 * 12", "7 / 2", "2 ** 0.5", "'a' * 3", "[x for x in range(3)]", "{'b': 1, 'a': [2]}", "f(3)", "1 // 0",
          "int('x')", "missing", "len({1, 2})", "print(1)", "None", "print", "sorted('ba')", "f'{1:03}'", "f(")  # fmt: skip


@pytest.fixture
def queues(pool: SandboxPool) -> tuple[EmbeddedQueue, EmbeddedQueue]:
    """One that remembers, one that does not."""
    both = tuple(EmbeddedQueue(pool, Judge(pool), num_slots=2, queue_size=1000) for _ in range(2))
    both[0].runs = RunMemory(RunMemoryConfig(), CONFIG, lambda: pool.tier, both[0].counts)
    return both[0], both[1]


def generated(rng: random.Random, term: str) -> ExecutionRequest:
    """A tool call that may print, show a value, fail or be no program."""
    body = rng.choice(("%s", "print(%s)", "x = %s\nx", "import sys\nprint(%s, file=sys.stderr)"))
    return ExecutionRequest(code=f"def f(x):\n    return x % 2\n{body % term}", echo=rng.random() < 0.7)


def said(result: ExecutionResult) -> tuple[object, ...]:
    return result.status, result.exit_code, result.stdout, result.stderr, result.truncated, result.tier, result.detail


async def executed(queue: EmbeddedQueue, request: ExecutionRequest) -> ExecutionResult:
    return await queue.run(request, lane=Lane.INTERACTIVE, request_id="", deadline_s=60.0)


async def test_generated_programs_print_the_same_with_and_without_memory(
    queues: tuple[EmbeddedQueue, EmbeddedQueue],
) -> None:
    remembering, forgetting = queues
    rng = random.Random(15)
    requests = [generated(rng, _TERMS[number % len(_TERMS)]) for number in range(NUM_PROGRAMS)]
    alone = [said(await executed(forgetting, request)) for request in requests]
    for _ in range(2):  # at once, so that some join, and then again
        told = await asyncio.gather(*(executed(remembering, request) for request in requests for _ in range(2)))
        assert [said(result) for result in told[::2]] == alone
        assert [said(result) for result in told[1::2]] == alone
    assert remembering.counts["joined_runs"] > NUM_PROGRAMS / 2
    assert remembering.counts["remembered_runs"] > NUM_PROGRAMS
    assert len({verdict[0] for verdict in alone}) == 3


@pytest.mark.parametrize(
    "code", ["set('abcdefgh')", "id([])", "def f(): pass\nf", "import os\nos.getpid()", "import time\ntime.time_ns()"]
)
async def test_a_program_that_shows_chance_is_run_every_time(
    queues: tuple[EmbeddedQueue, EmbeddedQueue], code: str
) -> None:
    for _ in range(3):
        assert (await executed(queues[0], ExecutionRequest(code=code, echo=True))).status is RunStatus.OK
    assert not queues[0].counts


async def test_a_file_that_a_call_leaves_is_no_state_of_the_next(queues: tuple[EmbeddedQueue, EmbeddedQueue]) -> None:
    code = "import os\nopen('left', 'a').write('x')\nprint(os.path.getsize('left'))"
    for _ in range(2):
        assert (await executed(queues[0], ExecutionRequest(code=code))).stdout == b"1\n"
    assert not queues[0].counts


async def test_a_limit_is_found_anew(queues: tuple[EmbeddedQueue, EmbeddedQueue]) -> None:
    for _ in range(2):
        result = await executed(queues[0], ExecutionRequest(code="print('x' * 10**6)"))
        assert result.status is RunStatus.OUTPUT_LIMIT
    assert not queues[0].counts


@pytest.fixture(params=[0, 64])
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    config = EnvGatewayConfig(port=0, sandbox=CONFIG, runs=RunMemoryConfig(results=request.param))
    started = Gateway(config, SandboxPool.start_before_threads(CONFIG))
    await started.start()
    yield started
    await started.stop()


async def test_a_gateway_remembers_calls_of_the_python_tool_as_its_setting_says(gateway: Gateway) -> None:
    box: ToolBox = gateway.tools
    for _ in range(2):  # of two trajectories
        session = ToolSession(box, ["python"])
        assert (await session.call("python", {"code": "12*12"})).text.strip() == "144"
        await session.close()
    assert gateway.queue.gauges.get("queue_remembered_runs", 0) == (1 if gateway.queue.runs else 0)
    assert gateway.sandbox.counts["OK"] == (1 if gateway.queue.runs else 2)


async def test_calls_that_share_a_state_are_never_remembered(gateway: Gateway) -> None:
    session = ToolSession(gateway.tools, ["jupyter_code"])
    await session.call("jupyter_code", {"code": "x = 1"})
    told = [(await session.call("jupyter_code", {"code": "x = x + 1\nprint(x)"})).text.strip() for _ in range(2)]
    await session.close()
    assert told == ["2", "3"]
    assert "queue_remembered_runs" not in gateway.queue.gauges
