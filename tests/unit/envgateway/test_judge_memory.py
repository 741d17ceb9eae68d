"""Verdicts that are remembered, and judgements that join: never another verdict, and no caller waits for a failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from services.common.config.processes.envgateway import JudgeMemoryConfig, SandboxConfig
from services.common.errors import CapacityError
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    CaseResult,
    Comparison,
    ComparisonMode,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.memory.verdicts import JudgeMemory
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits

SUM = "print(sum(map(int, input().split())))"
REQUEST = JudgeRequest(code=SUM, tests=StdinTests(cases=(StdinCase(stdin="1 2", expected="3"),)), stop_early=True)
CASE = CaseResult(index=0, verdict=RunStatus.OK, wall_s=0.001, cpu_s=0.001, peak_memory_bytes=1 << 20)
PASSED = JudgeResult(verdict=RunStatus.OK, cases=(CASE,), num_cases=1, tier="2")


class World:
    """A judge that answers when the test allows, and counts."""

    def __init__(self, result: JudgeResult = PASSED, **config: int) -> None:
        self.counts: Counter[str] = Counter()
        self.tier = "2"
        self.memory = JudgeMemory(JudgeMemoryConfig(**config), SandboxConfig(), lambda: self.tier, self.counts)
        self.result: JudgeResult | Exception = result
        self.judged = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def judge(self) -> JudgeResult:
        self.judged += 1
        result = self.result
        await self.gate.wait()
        if isinstance(result, Exception):
            raise result
        return result

    async def ask(self, request: JudgeRequest = REQUEST, lane: Lane = Lane.BATCH, client: str = "") -> JudgeResult:
        return await self.memory.run(request, lane, client, self.judge)

    async def start(self, *arguments: Any) -> asyncio.Task[JudgeResult]:
        task = asyncio.create_task(self.ask(*arguments))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


async def test_a_known_verdict_is_not_found_again() -> None:
    world = World()
    first = await world.ask()
    again = await world.ask(replace(REQUEST, request_id="r2", lane=Lane.INTERACTIVE))
    assert first == PASSED and again == replace(PASSED, request_id="r2")
    assert world.judged == 1 and world.counts == {"remembered": 1}


OTHERS = {
    "program": {"code": SUM + " "},
    "input": {"tests": StdinTests(cases=(StdinCase(stdin="1 3", expected="3"),))},
    "expected": {"tests": StdinTests(cases=(StdinCase(stdin="1 2", expected="4"),))},
    "no expected": {"tests": StdinTests(cases=(StdinCase(stdin="1 2"),))},
    "mode": {"comparison": Comparison(mode=ComparisonMode.TOKENS)},
    "tolerance": {"comparison": Comparison(tolerance=1.0)},
    "limits": {"limits": ExecutionLimits(wall_s=1.0)},
    "every case": {"stop_early": False},
    "language": {"language": "cpp"},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
async def test_another_judgement_is_judged(change: dict[str, Any]) -> None:
    world = World()
    await world.ask()
    await world.ask(replace(REQUEST, **change))
    assert world.judged == 2


async def test_a_sandbox_of_another_tier_judges_anew() -> None:
    world = World()
    await world.ask()
    world.tier = "U"
    await world.ask()
    assert world.judged == 2


async def test_numbers_of_other_types_are_other_judgements() -> None:
    world = World()
    for value in (1, 1.0, True, "1"):
        tests = CallTests(entry_point="f", cases=(CallCase(args=(value,), expected=1),))
        await world.ask(replace(REQUEST, code="def f(x): return x", tests=tests))
    assert world.judged == 4


FINAL = (RunStatus.OK, RunStatus.WRONG_ANSWER, RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR)
NEAR_LIMITS = {
    "time": {"wall_s": 1.3},
    "CPU time": {"cpu_s": 1.3},
    "memory": {"peak_memory_bytes": 300 << 20},
    "output": {"truncated": True},
    "a signal": {"verdict": RunStatus.RUNTIME_ERROR, "signal": 9},
    **{verdict.value: {"verdict": verdict} for verdict in RunStatus if verdict not in FINAL},
}


@pytest.mark.parametrize("change", NEAR_LIMITS.values(), ids=NEAR_LIMITS.keys())
async def test_a_verdict_in_which_a_limit_or_machinery_had_a_part_is_found_again(change: dict[str, Any]) -> None:
    case = replace(CASE, **change)
    world = World(replace(PASSED, verdict=case.verdict, cases=(CASE, case)))
    await world.ask()
    await world.ask()
    assert world.judged == 2 and not len(world.memory)


@pytest.mark.parametrize("verdict", FINAL)
async def test_a_verdict_about_the_program_is_remembered(verdict: RunStatus) -> None:
    world = World(replace(PASSED, verdict=verdict, cases=(replace(CASE, verdict=verdict),)))
    assert await world.ask() == await world.ask()
    assert world.judged == 1


UNSURE = {
    "a set's order": replace(REQUEST, code="print(list(set(input())))"),
    "an address": replace(REQUEST, code="print(id(1))"),
    "an undefined function": replace(REQUEST, tests=CallTests(entry_point="id", cases=(CallCase(args=(1,)),))),
    "a set as an argument": replace(
        REQUEST,
        code="def f(x): return list(x)",
        tests=CallTests(entry_point="f", cases=(CallCase(args=([{"a", "b"}],)),)),
    ),
    "tests that are code": replace(
        REQUEST,
        code="def f(x): return x",
        tests=AssertTests(tests="import random\nassert f(random.random()) < 0.5", entry_point="f"),
    ),
}


@pytest.mark.parametrize("request_", UNSURE.values(), ids=UNSURE.keys())
async def test_a_program_whose_answer_may_vary_is_judged_every_time(request_: JudgeRequest) -> None:
    world = World()
    for _ in range(3):
        await world.ask(request_)
    world.gate.clear()
    waiting = [await world.start(replace(request_, stop_early=False)) for _ in range(2)]
    assert world.judged == 5
    world.gate.set()
    await asyncio.gather(*waiting)
    assert not world.counts


async def test_asserts_on_plain_values_are_remembered() -> None:
    world = World()
    tests = AssertTests(tests="assert f(2) == 4\nassert f([1]) == 3", entry_point="f")
    for _ in range(2):
        await world.ask(replace(REQUEST, code="def f(x): return x * 2", tests=tests))
    assert world.judged == 1


async def test_equal_judgements_in_flight_are_one() -> None:
    world = World()
    world.gate.clear()
    waiting = [await world.start(replace(REQUEST, request_id=str(n))) for n in range(4)]
    assert world.judged == 1
    world.gate.set()
    assert [result.request_id for result in await asyncio.gather(*waiting)] == ["", "1", "2", "3"]
    assert world.counts == {"joined": 3}


async def test_a_judgement_joins_none_of_another_lane_or_client() -> None:
    world = World()
    world.gate.clear()
    waiting = [
        await world.start(REQUEST, *where) for where in ((Lane.BATCH, "a"), (Lane.BATCH, "b"), (Lane.INTERACTIVE, "a"))
    ]
    assert world.judged == 3
    world.gate.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("failure", [CapacityError("full"), replace(PASSED, verdict=RunStatus.INFRA_ERROR, cases=())])
async def test_a_failure_of_the_first_is_not_that_of_the_others(failure: Any) -> None:
    world = World()
    world.gate.clear()
    world.result = failure
    first, second = await world.start(), await world.start()
    world.result = PASSED
    world.gate.set()
    await asyncio.wait([first])
    assert await second == PASSED and world.judged == 2
    assert first.exception() is failure if isinstance(failure, Exception) else first.result() == failure


async def test_others_go_on_when_the_first_is_cancelled_and_when_one_of_them_is() -> None:
    world = World()
    world.gate.clear()
    first, second, third = [await world.start() for _ in range(3)]
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled() and not first.done()
    first.cancel()
    await asyncio.wait([first])
    world.gate.set()
    assert await third == PASSED and world.judged == 2
    assert await world.ask() == PASSED


async def test_the_least_recently_used_go_first() -> None:
    world = World(verdicts=2)
    a, b, c = (replace(REQUEST, code=f"print({n})") for n in range(3))
    for request in (a, b, a, c, a, b):
        await world.ask(request)
    assert world.judged == 4 and len(world.memory) == 2


async def test_verdicts_take_no_more_bytes_than_allowed() -> None:
    case = replace(CASE, stdout="x" * 2000)
    world = World(replace(PASSED, cases=(case,) * 4), verdict_bytes=100_000)
    for n in range(20):
        await world.ask(replace(REQUEST, code=f"print({n})"))
        assert world.memory.num_bytes <= 100_000
    assert 1 < len(world.memory) < 20


@pytest.mark.parametrize("tests", [
    StdinTests(cases=(StdinCase(stdin="1" * 100_000, expected="1"),)),
    StdinTests(cases=(StdinCase(stdin="\ud800", expected="1"),)),
    CallTests(entry_point="f", cases=(CallCase(args=(object(),)),)),
    CallTests(entry_point="f", cases=(CallCase(args=(10**5000,)),)),
])  # fmt: skip
async def test_odd_tests_reach_the_judge(tests: Any) -> None:
    world = World()
    await world.ask(replace(REQUEST, tests=tests))
    assert world.judged == 1


@pytest.mark.parametrize("values", [{"verdicts": -1}, {"verdicts": 1.5}, {"verdict_bytes": -1}, {"verdict": 1}])
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        JudgeMemoryConfig(**values)


async def test_arguments_that_are_no_data_are_judged_each_time_also_at_once() -> None:
    world = World(replace(PASSED, verdict=RunStatus.INVALID_TESTS, cases=()))
    request = replace(REQUEST, tests=CallTests(entry_point="f", cases=(CallCase(args=(object(),)),)))
    world.gate.clear()
    waiting = [await world.start(request) for _ in range(2)]
    world.gate.set()
    await asyncio.gather(*waiting)
    assert world.judged == 2 and not world.counts
