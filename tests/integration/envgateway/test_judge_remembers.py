"""With and without memory a verdict is the same; a program with varying output is run every time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from services.common.config.processes.envgateway import EnvGatewayConfig, JudgeMemoryConfig
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.app import Gateway
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, JudgeResult, StdinCase, StdinTests
from services.envgateway.memory.verdicts import JudgeMemory
from services.envgateway.queue.embedded import EmbeddedQueue
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from tests.waiting import WAIT_S

from .conftest import CONFIG

NUM_PROGRAMS = 40
_TERMS = ("a", "b", "2", "a * b", "len(set(map(str, (a, b))))", "max(a, b)", "sum(x for x in (a, b))", "f(a)", "1 // (a - 3)",
          "int('x')", "missing", "[a][1]", "max((a, b), key=f)", "sorted((b, a))[0]")  # fmt: skip
_ENDS = (
    "print(%s)",
    "print('{}'.format(%s))",
    "print(f'{%s}', file=sys.stderr)",
    "sys.exit(%s)",
    "print((%s)",
    "assert %s > 4",
)


@pytest.fixture
def queues(pool: SandboxPool) -> tuple[EmbeddedQueue, EmbeddedQueue]:
    """One that remembers, one that does not."""
    both = tuple(EmbeddedQueue(pool, Judge(pool), num_slots=2, queue_size=1000) for _ in range(2))
    both[0].verdicts = JudgeMemory(JudgeMemoryConfig(), CONFIG, lambda: pool.tier, both[0].counts)
    return both[0], both[1]


def generated(rng: random.Random) -> JudgeRequest:
    """A program that may be right, wrong, fail or be none, on one to three inputs."""
    whole = " + ".join(rng.choices(_TERMS, k=rng.randint(1, 2)))
    code = f"import sys\ndef f(x):\n    return x % 3\na, b = map(int, input().split())\n{rng.choice(_ENDS) % whole}"
    pairs = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
    cases = tuple(StdinCase(stdin=f"{a} {b}", expected=rng.choice((None, str(a), str(a + b)))) for a, b in pairs)
    return JudgeRequest(code=code, tests=StdinTests(cases=cases), stop_early=rng.random() < 0.5)


def said(result: JudgeResult) -> list[object]:
    cases = [(case.index, case.verdict, case.detail, case.stdout, case.stderr, case.exit_code) for case in result.cases]
    return [result.verdict, result.detail, result.num_cases, result.tier, *cases]


async def judged(queue: EmbeddedQueue, request: JudgeRequest) -> JudgeResult:
    return await queue.run(request, lane=Lane.BATCH, request_id="", deadline_s=60.0)


async def test_generated_programs_have_the_same_verdicts_with_and_without_memory(
    queues: tuple[EmbeddedQueue, EmbeddedQueue],
) -> None:
    remembering, forgetting = queues
    rng = random.Random(15)
    requests = [generated(rng) for _ in range(NUM_PROGRAMS)]
    alone = [said(await judged(forgetting, request)) for request in requests]
    # at once, so that some join, and then again
    for _ in range(2):
        told = await asyncio.gather(*(judged(remembering, request) for request in requests for _ in range(2)))
        assert [said(result) for result in told[::2]] == alone
        assert [said(result) for result in told[1::2]] == alone
    counts = remembering.counts
    assert counts["joined"] > NUM_PROGRAMS / 2 and counts["remembered"] > NUM_PROGRAMS
    assert len({str(verdict[0]) for verdict in alone}) >= 4


@pytest.mark.parametrize("code", ["print(*set(input().split()))", "print(id([]))", "def f(): pass\nprint(f)"])
async def test_a_program_that_shows_chance_is_run_every_time(
    queues: tuple[EmbeddedQueue, EmbeddedQueue], code: str
) -> None:
    request = JudgeRequest(code=code, tests=StdinTests(cases=(StdinCase(stdin="a b c d"),)))
    for _ in range(3):
        assert (await judged(queues[0], request)).verdict is RunStatus.OK
    assert not queues[0].counts


async def test_a_limit_is_found_anew(queues: tuple[EmbeddedQueue, EmbeddedQueue]) -> None:
    request = JudgeRequest(code="print('x' * 10**6)", tests=StdinTests(cases=(StdinCase(expected="x"),)))
    for _ in range(2):
        assert (await judged(queues[0], request)).verdict is RunStatus.OUTPUT_LIMIT
    assert not queues[0].counts


async def test_the_leader_that_is_killed_leaves_the_others_their_verdict(
    queues: tuple[EmbeddedQueue, EmbeddedQueue],
) -> None:
    code = "import time\ntime.sleep(1)\nprint(int(input()))"
    request = JudgeRequest(code=code, tests=StdinTests(cases=(StdinCase(stdin="5", expected="5"),)))
    leader = asyncio.create_task(judged(queues[0], request))
    others = [asyncio.create_task(judged(queues[0], request)) for _ in range(2)]
    async with asyncio.timeout(WAIT_S):
        while not queues[0].gauges["queue_batch_running"]:
            await asyncio.sleep(0)
    leader.cancel()
    assert [result.verdict for result in await asyncio.gather(*others)] == [RunStatus.OK] * 2
    assert leader.cancelled()


@pytest.fixture(params=[0, 64])
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    config = EnvGatewayConfig(port=0, sandbox=CONFIG, judge=JudgeMemoryConfig(verdicts=request.param))
    started = Gateway(config, SandboxPool.start_before_threads(CONFIG))
    await started.start()
    yield started
    await started.stop()


async def test_a_gateway_remembers_as_its_setting_says(gateway: Gateway) -> None:
    request = JudgeRequest(code="print(3)", tests=StdinTests(cases=(StdinCase(expected="3"),)))
    results = [await gateway.queue.run(request, lane=Lane.BATCH, request_id="", deadline_s=60.0) for _ in range(2)]
    assert [result.verdict for result in results] == [RunStatus.OK] * 2
    remembered = gateway.queue.gauges.get("queue_remembered", 0)
    assert remembered == (1 if gateway.queue.verdicts else 0)
