"""Runs that are remembered, and equal runs that join: the same output, and never that of a limit or of chance."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.common.config.processes.envgateway import RunMemoryConfig, SandboxConfig
from services.common.errors import CapacityError
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.memory.runs import RunMemory
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult

REQUEST = ExecutionRequest(code="print(12*12)")
DONE = ExecutionResult(
    status=RunStatus.OK,
    exit_code=0,
    stdout=b"144\n",
    wall_s=0.001,
    cpu_s=0.001,
    peak_memory_bytes=1 << 20,
    tier="2",
)


class World:
    """A sandbox that answers when the test allows, and counts."""

    def __init__(self, result: ExecutionResult = DONE, **config: int) -> None:
        self.counts: Counter[str] = Counter()
        self.tier = "2"
        self.memory = RunMemory(RunMemoryConfig(**config), SandboxConfig(), lambda: self.tier, self.counts)
        self.result: ExecutionResult | Exception = result
        self.num_run = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def execute(self) -> ExecutionResult:
        self.num_run += 1
        result = self.result
        await self.gate.wait()
        if isinstance(result, Exception):
            raise result
        return result

    async def ask(
        self, request: ExecutionRequest = REQUEST, lane: Lane = Lane.INTERACTIVE, client: str = ""
    ) -> ExecutionResult:
        return await self.memory.run(request, lane, client, self.execute)

    async def start(self, *arguments: Any) -> asyncio.Task[ExecutionResult]:
        task = asyncio.create_task(self.ask(*arguments))
        await asyncio.sleep(0)
        return task


async def test_a_known_run_is_not_made_again() -> None:
    world = World()
    assert [await world.ask() for _ in range(3)] == [DONE] * 3
    assert world.num_run == 1 and world.counts == {"remembered_runs": 2}


OTHERS = {
    "program": {"code": "print(12*12) "},
    "input": {"stdin": b"1"},
    "limits": {"limits": ExecutionLimits(wall_s=1.0)},
    "echo": {"echo": True},
    "language": {"language": "cpp"},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
async def test_another_run_is_made(change: dict[str, Any]) -> None:
    world = World()
    await world.ask()
    await world.ask(replace(REQUEST, **change))
    assert world.num_run == 2


async def test_a_sandbox_of_another_tier_runs_anew() -> None:
    world = World()
    await world.ask()
    world.tier = "U"
    await world.ask()
    assert world.num_run == 2


NOT_FINAL = {
    "time": {"wall_s": 2.6},
    "CPU time": {"cpu_s": 2.6},
    "memory": {"peak_memory_bytes": 300 << 20},
    "output": {"truncated": True},
    "a signal": {"status": RunStatus.RUNTIME_ERROR, "exit_code": None, "signal": 9},
    "no exit code": {"exit_code": None},
    "a limit of the supervisor": {"status": RunStatus.RUNTIME_ERROR, "detail": "disk quota: bytes"},
    **{
        status.value: {"status": status}
        for status in RunStatus
        if status not in (RunStatus.OK, RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR)
    },
}


@pytest.mark.parametrize("change", NOT_FINAL.values(), ids=NOT_FINAL.keys())
async def test_a_run_in_which_a_limit_or_machinery_had_a_part_is_made_again(change: dict[str, Any]) -> None:
    world = World(replace(DONE, **change))
    for _ in range(2):
        await world.ask(replace(REQUEST, limits=ExecutionLimits(wall_s=10.0, cpu_s=10.0, memory_bytes=512 << 20)))
    assert world.num_run == 2 and not len(world.memory)


@pytest.mark.parametrize("status", [RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR])
async def test_an_error_of_the_program_is_remembered(status: RunStatus) -> None:
    world = World(replace(DONE, status=status, exit_code=1, stdout=b"", stderr=b"Traceback"))
    assert await world.ask() == await world.ask()
    assert world.num_run == 1


CHANCE = {
    "time": "import time\nprint(time.time())",
    "a random number": "import random\nprint(random.random())",
    "an address": "id([])",
    "a hash": "hash('a')",
    "the order of a set": "set('ab')",
    "a process id": "import os\nos.getpid()",
    "a file": "open('/proc/uptime').read()",
    "a function's address": "def f(): pass\nf",
    "a lambda's address": "lambda: 0",
    "an iterator's address": "map(int, '1')",
    "an object's address": "object()",
    "a class": "class A: pass\nA()",
    "memory": "try:\n    x = [0] * 10**12\nexcept MemoryError:\n    print(1)",
    "depth": "def f(n):\n    try:\n        return f(n + 1)\n    except RecursionError:\n        return n\nprint(f(0))",
}


@pytest.mark.parametrize("code", CHANCE.values(), ids=CHANCE.keys())
async def test_a_program_whose_output_may_vary_is_run_every_time(code: str) -> None:
    world = World()
    request = ExecutionRequest(code=code, echo=True)
    for _ in range(3):
        await world.ask(request)
    world.gate.clear()
    waiting = [await world.start(replace(request, stdin=b"x")) for _ in range(2)]
    assert world.num_run == 5
    world.gate.set()
    await asyncio.gather(*waiting)
    assert not world.counts


async def test_equal_runs_in_flight_are_one() -> None:
    world = World()
    world.gate.clear()
    waiting = [await world.start() for _ in range(4)]
    assert world.num_run == 1
    world.gate.set()
    assert await asyncio.gather(*waiting) == [DONE] * 4
    assert world.counts == {"joined_runs": 3}


async def test_a_run_joins_none_of_another_lane_or_client() -> None:
    world = World()
    world.gate.clear()
    places = ((Lane.INTERACTIVE, "a"), (Lane.INTERACTIVE, "b"), (Lane.BATCH, "a"))
    waiting = [await world.start(REQUEST, *place) for place in places]
    assert world.num_run == 3
    world.gate.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("failure", [CapacityError("full"), replace(DONE, status=RunStatus.INFRA_ERROR)])
async def test_a_failure_of_the_first_is_not_that_of_the_others(failure: Any) -> None:
    world = World()
    world.gate.clear()
    world.result = failure
    first, second = await world.start(), await world.start()
    world.result = DONE
    world.gate.set()
    await asyncio.wait([first])
    assert await second == DONE and world.num_run == 2
    assert first.exception() is failure if isinstance(failure, Exception) else first.result() == failure


async def test_the_others_go_on_when_the_first_is_cancelled() -> None:
    world = World()
    world.gate.clear()
    first, second = await world.start(), await world.start()
    first.cancel()
    await asyncio.wait([first])
    world.gate.set()
    assert await second == DONE and world.num_run == 2


async def test_results_take_no_more_room_than_allowed() -> None:
    world = World(replace(DONE, stdout=b"x" * 10_000), results=4, result_bytes=100_000)
    for number in range(8):
        await world.ask(replace(REQUEST, code=f"print({number})"))
    assert len(world.memory) == 4
    world = World(replace(DONE, stdout=b"x" * 10_000), result_bytes=50_000)
    for number in range(20):
        await world.ask(replace(REQUEST, code=f"print({number})"))
        assert world.memory.num_bytes <= 50_000
    assert 1 < len(world.memory) < 20


ODD: list[Callable[[], ExecutionRequest]] = [
    lambda: ExecutionRequest(code="print(1)#" + "x" * 3000),
    lambda: ExecutionRequest(code="print(1)", stdin=b"x" * 100_000),
    lambda: ExecutionRequest(code="print('\ud800')"),
]


@pytest.mark.parametrize("request_", ODD, ids=["long", "much input", "no text"])
async def test_odd_programs_are_run_every_time(request_: Callable[[], ExecutionRequest]) -> None:
    world = World()
    for _ in range(2):
        await world.ask(request_())
    assert world.num_run == 2 and not world.counts


@pytest.mark.parametrize("values", [{"results": -1}, {"results": 1.5}, {"result_bytes": -1}, {"result": 1}])
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        RunMemoryConfig(**values)
