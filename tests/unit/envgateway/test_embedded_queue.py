"""Lanes, clients, deadlines, keys and back-pressure in front of the slots; no job is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import CapacityError, DeadlineError
from services.common.telemetry.metrics import Lane
from services.envgateway.judge.records import (
    CallCase,
    CallTests,
    Comparison,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.queue import JobQueue
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult
from services.envgateway.sandbox.scheduler import Scheduler, batch_share, on_behalf_of
from tests.waiting import WAIT_S


class Slots:
    """Runs programs until the test lets them end; counts how many run at once."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.running = 0
        self.most = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.status = RunStatus.OK

    async def run(self, code: str) -> ExecutionResult:
        self.started.append(code)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gates.setdefault(code, asyncio.Event()).wait()
        finally:
            self.running -= 1
        return ExecutionResult(status=self.status, stdout=code.encode())

    async def work(self, job: Any, lane: Lane) -> ExecutionResult | JudgeResult:
        result = await self.run(job.code)
        return JudgeResult(verdict=RunStatus.OK) if isinstance(job, JudgeRequest) else result

    def end(self, *names: str) -> None:
        for name in names:
            self.gates.setdefault(name, asyncio.Event()).set()


def queue_over(work: Callable[[Any, Lane], Awaitable[Any]], num_slots: int, lane_size: int = 100) -> JobQueue:
    """A queue whose jobs wait for a slot, as in a sandbox, and are then given to ``work``."""
    scheduler = Scheduler(num_slots=num_slots, batch_slots=batch_share(num_slots), lane_size=lane_size)

    async def run(job: Any, lane: Lane, wait_s: float | None) -> Any:
        await scheduler.take(lane, wait_s)
        try:
            return await work(job, lane)
        finally:
            scheduler.give(lane, 0.05)

    return JobQueue(run, scheduler)


class World:
    def __init__(self, num_slots: int = 2, queue_size: int = 100) -> None:
        self.slots = Slots()
        self.queue = queue_over(self.slots.work, num_slots, queue_size)

    async def submit(
        self, name: str, lane: Lane, deadline_s: float = 20.0, client: str = "", key: str = ""
    ) -> asyncio.Task[Any]:
        job = ExecutionRequest(code=name)
        with on_behalf_of(client):
            task = asyncio.create_task(self.queue.run(job, lane=lane, request_id=key, deadline_s=deadline_s))
        await settle()
        return task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_interactive_jobs_go_before_batch_jobs_that_came_first() -> None:
    world = World(num_slots=1)
    tasks = [
        await world.submit("b1", Lane.BATCH),
        await world.submit("b2", Lane.BATCH),
        await world.submit("i1", Lane.INTERACTIVE),
    ]
    world.slots.end("b1", "b2", "i1")
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    assert world.slots.started == ["b1", "i1", "b2"] and world.slots.most == 1


async def test_one_slot_is_never_given_to_batch() -> None:
    world = World(num_slots=3)
    tasks = [await world.submit(f"b{n}", Lane.BATCH) for n in range(5)]
    assert world.slots.started == ["b0", "b1"]
    tasks.append(await world.submit("i", Lane.INTERACTIVE))
    assert world.slots.started[-1] == "i" and world.slots.running == 3
    world.slots.end("i", *(f"b{n}" for n in range(5)))
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    assert world.slots.most == 3 and set(world.slots.started) == {"i", "b0", "b1", "b2", "b3", "b4"}


async def test_a_client_that_floods_leaves_others_their_share() -> None:
    world = World(num_slots=1, queue_size=10_000)
    flood = [await world.submit(f"flood{n}", Lane.BATCH, client="flood") for n in range(1000)]
    modest = [await world.submit(f"modest{n}", Lane.BATCH, client="modest") for n in range(10)]
    world.slots.end(*(f"flood{n}" for n in range(1000)), *(f"modest{n}" for n in range(10)))
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*modest)
    assert world.slots.started.index("modest9") <= 21  # turn by turn behind the one that ran
    for task in flood:
        task.cancel()


async def test_a_full_queue_returns_a_time_to_retry() -> None:
    world = World(num_slots=1, queue_size=2)
    tasks = [await world.submit(f"b{n}", Lane.BATCH) for n in range(3)]
    with pytest.raises(CapacityError) as refused:
        await world.queue.run(ExecutionRequest(code="x"), lane=Lane.BATCH, request_id="", deadline_s=1)
    assert refused.value.retry_after_s is not None and 0.5 <= refused.value.retry_after_s <= 30
    world.slots.end("b0", "b1", "b2", "i")
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks, await world.submit("i", Lane.INTERACTIVE))


async def test_a_full_lane_refuses_the_client_that_fills_it() -> None:
    world = World(num_slots=1, queue_size=4)
    flood = [await world.submit(f"flood{n}", Lane.BATCH, client="flood") for n in range(5)]
    modest = [await world.submit(f"modest{n}", Lane.BATCH, client="modest") for n in range(2)]
    assert [task.done() for task in flood] == [False, False, False, True, True]
    assert isinstance(flood[4].exception(), CapacityError) and not any(task.done() for task in modest)
    third = await world.submit("modest2", Lane.BATCH, client="modest")
    assert isinstance(third.exception(), CapacityError)
    world.slots.end("flood0", "flood1", "flood2", "modest0", "modest1")
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*flood[:3], *modest)


async def test_a_deadline_that_passes_takes_the_job_out_and_is_named() -> None:
    world = World(num_slots=1)
    first = await world.submit("b0", Lane.BATCH)
    late = await world.submit("b1", Lane.BATCH, deadline_s=0.02, key="k1")
    with pytest.raises(DeadlineError, match=r"execution k1 in the batch lane took longer than 0\.02 s"):
        await late
    world.slots.end("b0")
    await first
    assert world.slots.started == ["b0"] and world.queue.gauges["queue_batch_waiting"] == 0


async def test_a_passed_deadline_kills_the_running_program() -> None:
    world = World(num_slots=1)
    with pytest.raises(DeadlineError):
        await world.queue.run(ExecutionRequest(code="a"), lane=Lane.BATCH, request_id="", deadline_s=0.02)
    assert world.slots.started == ["a"] and world.slots.running == 0


async def test_a_caller_that_leaves_while_waiting_or_running_frees_its_place() -> None:
    world = World(num_slots=1)
    running, waiting, last = [await world.submit(name, Lane.INTERACTIVE) for name in ("a", "b", "c")]
    waiting.cancel()
    await settle()
    running.cancel()
    await settle()
    assert world.slots.started == ["a", "c"]
    world.slots.end("c")
    async with asyncio.timeout(WAIT_S):
        await last
    assert sum(world.queue.gauges[f"queue_{lane}_running"] for lane in Lane) == 0


async def test_a_turn_given_to_a_leaving_caller_passes_to_the_next() -> None:
    world = World(num_slots=1)
    running, leaving, last = [await world.submit(name, Lane.BATCH) for name in ("a", "b", "c")]
    world.slots.end("a", "c")
    running.add_done_callback(lambda _: leaving.cancel())
    async with asyncio.timeout(WAIT_S):
        await last
    assert "c" in world.slots.started


async def test_the_same_job_under_the_same_key_runs_once() -> None:
    world = World()
    first, second = [await world.submit("a", Lane.INTERACTIVE, key="k") for _ in range(2)]
    world.slots.end("a")
    assert (await first) is (await second)
    assert world.slots.started == ["a"]


async def test_another_job_under_the_same_key_gets_its_own_result() -> None:
    world = World()
    tasks = [await world.submit(name, Lane.INTERACTIVE, key="k") for name in ("a", "b")]
    world.slots.end("a", "b")
    assert [result.stdout for result in await asyncio.gather(*tasks)] == [b"a", b"b"]


REQUEST = JudgeRequest(code="j", tests=StdinTests(cases=(StdinCase(stdin="", expected=""),)))


async def judge(
    world: World,
    request: JudgeRequest = REQUEST,
    lane: Lane = Lane.BATCH,
    client: str = "",
    key: str = "",
    deadline_s: float = WAIT_S,
) -> asyncio.Task[Any]:
    with on_behalf_of(client):
        task = asyncio.create_task(world.queue.run(request, lane=lane, request_id=key, deadline_s=deadline_s))
    await settle()
    return task


async def test_equal_judgements_that_wait_or_run_at_once_are_one_and_nothing_of_them_is_kept() -> None:
    world = World(num_slots=2)
    busy = await world.submit("busy", Lane.BATCH)
    tasks = [await judge(world, key=key) for key in ("", "", "a", "b")]
    assert world.slots.started == ["busy"]
    world.slots.end("busy", "j")
    assert {result.verdict for result in await asyncio.gather(*tasks)} == {RunStatus.OK}
    assert world.slots.started == ["busy", "j"] and world.queue.counts["joined"] == 3
    await asyncio.gather(busy, await judge(world))
    assert world.slots.started == ["busy", "j", "j"]


async def test_other_judgements_and_those_of_other_lanes_and_clients_are_judged() -> None:
    world = World(num_slots=20)
    call = CallTests(entry_point="f", cases=())
    others = [
        replace(REQUEST, tests=StdinTests(cases=(StdinCase(stdin="1", expected=""),))),
        replace(REQUEST, tests=StdinTests(cases=(StdinCase(stdin="", expected=None),))),
        replace(REQUEST, comparison=Comparison(tolerance=1.0)),
        replace(REQUEST, limits=ExecutionLimits(wall_s=1.0)),
        replace(REQUEST, stop_early=True),
        replace(REQUEST, language="cpp"),
        *(replace(REQUEST, tests=replace(call, cases=(CallCase(args=(one,)),))) for one in (1, 1.0, True, "1")),
    ]
    tasks = [await judge(world, request) for request in (REQUEST, *others)]
    tasks += [await judge(world, client="b"), await judge(world, lane=Lane.INTERACTIVE)]
    assert len(world.slots.started) == len(tasks) and not world.queue.counts["joined"]
    world.slots.end("j")
    await asyncio.gather(*tasks)


async def test_a_judgement_goes_on_for_the_others_when_the_first_caller_leaves() -> None:
    world = World()
    first, hasty, last = [await judge(world, deadline_s=deadline_s) for deadline_s in (WAIT_S, 0.02, WAIT_S)]
    first.cancel()
    with pytest.raises(DeadlineError):
        await hasty
    world.slots.end("j")
    assert (await last).verdict is RunStatus.OK and world.slots.started == ["j"]


async def test_the_last_caller_of_a_judgement_that_leaves_kills_the_program() -> None:
    world = World()
    tasks = [await judge(world) for _ in range(2)]
    for task in tasks:
        task.cancel()
    await settle()
    assert world.slots.started == ["j"] and world.slots.running == 0


async def test_equal_executions_are_run_each() -> None:
    world = World()
    tasks = [await world.submit("a", Lane.INTERACTIVE) for _ in range(2)]
    assert world.slots.started == ["a", "a"]
    world.slots.end("a")
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("value", [object(), 10**5000], ids=["object", "huge"])
async def test_tests_that_are_no_data_reach_the_judge(value: object) -> None:
    world = World()
    world.slots.end("j")
    request = replace(REQUEST, tests=CallTests(entry_point="f", cases=(CallCase(args=(value,)),)))
    await (await judge(world, request))
    assert world.slots.started == ["j"]
