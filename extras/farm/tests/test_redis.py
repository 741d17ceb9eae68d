"""Jobs over a real Redis: lanes, leases, re-delivery, poison, withdrawal, and a Redis that loses everything."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from extras.farm.queue import connect
from extras.farm.tests.conftest import Farm
from services.common.errors import DeadlineError
from services.common.telemetry.metrics import Lane
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests
from services.envgateway.queue import Job, JobResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.waiting import until


async def test_jobs_of_both_kinds_come_back_from_workers(farm: Farm) -> None:
    farm.add_worker()
    assert (await farm.execute("hello")).stdout == b"hello"
    request = JudgeRequest(code="judged", tests=StdinTests(cases=(StdinCase(stdin="", expected=""),)))
    result = await farm.queue.run(request, lane=Lane.BATCH, request_id="", deadline_s=60)
    assert result.verdict is RunStatus.OK and result.detail == "judged"


async def test_many_jobs_over_several_workers_are_each_answered_once(farm: Farm) -> None:
    for _ in range(3):
        farm.add_worker()
    codes = [f"sleep 0.00{n % 10} {n}" for n in range(500)]
    results = await asyncio.gather(*(farm.execute(code) for code in codes))
    assert [result.stdout.decode() for result in results] == codes
    assert Counter(farm.programs.started) == Counter(codes)
    assert farm.queue.gauges["queue_unanswered"] == 0 and farm.queue.gauges["queue_answered"] == 500


async def test_an_interactive_job_does_not_wait_for_batch_jobs(farm: Farm) -> None:
    farm.add_worker(num_slots=2)
    batch = [asyncio.create_task(farm.execute(f"sleep 1 {n}")) for n in range(40)]
    await until(lambda: bool(farm.programs.started), "a batch job runs")
    result = await farm.execute("now", Lane.INTERACTIVE)
    assert result.stdout == b"now" and len(farm.programs.ended) < 5
    for task in batch:
        task.cancel()


async def test_a_long_job_keeps_its_lease(farm: Farm) -> None:
    farm.add_worker()
    farm.add_worker()
    await farm.execute(f"sleep {3 * farm.lease_s}")
    assert len(farm.programs.started) == 1


class Poison:
    """A runner that kills its worker at a poison job."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self.attempts = 0
        self.beside: list[list[str]] = []
        self.running: list[str] = []

    async def __call__(self, job: Job, lane: Lane, wait_s: float | None) -> JobResult:
        self.running.append(job.code)
        try:
            if job.code == "poison":
                self.attempts += 1
                await asyncio.sleep(0.05)
                self.beside.append([code for code in self.running if code != "poison"])
                dead = next(worker for worker in reversed(self._farm.workers))
                self._farm.add_worker(self)
                self._farm.kill(dead)
                await asyncio.sleep(30)
            return await self._farm.programs(job, lane, wait_s)
        finally:
            self.running.remove(job.code)


async def test_a_job_that_kills_its_workers_is_given_up_after_n_attempts_and_spares_its_neighbours(farm: Farm) -> None:
    poison = Poison(farm)
    farm.add_worker(poison)
    neighbours = [asyncio.create_task(farm.execute(f"sleep 0.1 {n}")) for n in range(6)]
    poisoned = asyncio.create_task(farm.execute("poison"))
    result = await poisoned
    assert result.status is RunStatus.INFRA_ERROR and "3 workers" in result.detail
    assert poison.attempts == 3 and poison.beside[-1] == []
    assert {(await task).status for task in neighbours} == {RunStatus.OK}


async def test_a_failing_machine_is_retried_elsewhere_then_reported(farm: Farm) -> None:
    farm.add_worker()
    result = await farm.execute("broken")
    assert result.status is RunStatus.INFRA_ERROR and result.detail == "the machine broke"
    assert farm.programs.started == ["broken"] * 3


async def test_a_withdrawn_job_is_killed_where_it_runs(farm: Farm) -> None:
    worker = farm.add_worker()
    running = asyncio.create_task(farm.execute("hang"))
    await until(lambda: bool(farm.programs.started), "it runs")
    running.cancel()
    await until(lambda: farm.programs.killed == ["hang"], "it is killed")
    await until(lambda: not worker.held, "its slot is free")
    assert (await farm.execute("next")).stdout == b"next"
    await assert_streams_empty(farm)


async def test_a_withdrawn_job_that_has_not_begun_never_begins(farm: Farm) -> None:
    with pytest.raises(DeadlineError):
        await farm.execute("never", deadline_s=0.3)
    farm.add_worker()
    assert (await farm.execute("next")).stdout == b"next"
    assert farm.programs.started == ["next"]


async def test_a_stopping_worker_gives_back_jobs_that_it_cannot_end(farm: Farm) -> None:
    leaving = farm.add_worker(drain_s=2.0)
    jobs = [asyncio.create_task(farm.execute(code)) for code in ("sleep 0.3", "hang")]
    await until(lambda: len(farm.programs.started) == 2, "both run")
    await farm.stop(leaving)
    assert farm.programs.ended == ["sleep 0.3"] and farm.programs.killed == ["hang"]
    farm.programs.release.set()
    farm.add_worker()
    assert [(await job).status for job in jobs] == [RunStatus.OK] * 2


@pytest.mark.slow
@pytest.mark.parametrize("keeps_data", [False, True])
async def test_a_redis_that_is_killed_and_comes_back_loses_no_job_and_doubles_no_answer(
    farm: Farm, keeps_data: bool
) -> None:
    """Empty, or with its data of a moment ago; with the data alone comes what a worker held that died meanwhile."""
    if keeps_data:
        farm.server.keeps_data = True
        await asyncio.to_thread(farm.server.kill)
        await asyncio.to_thread(farm.server.start)
    farm.add_worker()
    farm.add_worker()
    codes = [f"sleep 0.05 {n}" for n in range(120)]
    jobs = [asyncio.create_task(farm.execute(code)) for code in codes]
    for attempt in range(2):
        done = len(farm.programs.ended)
        await until(lambda done=done: len(farm.programs.ended) > done + 5, "some are done")
        await asyncio.to_thread(farm.server.kill)
        if attempt:
            farm.kill(farm.workers[0])
            farm.add_worker()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(farm.server.start)
    async with asyncio.timeout(60):
        results = await asyncio.gather(*jobs)
    assert [result.stdout.decode() for result in results] == codes
    assert farm.queue.gauges["queue_unanswered"] == 0
    assert farm.queue.gauges["queue_answered"] == len(codes)


async def test_jobs_of_a_gateway_that_is_gone_are_dropped(farm: Farm) -> None:
    client = connect(farm.server.uri, allow_plain=False)
    fields: dict[Any, Any] = {"id": "j", "gateway": "gone"}
    await client.xadd("rollmill:jobs:batch", fields)
    worker = farm.add_worker()
    await until(lambda: worker.counts["dropped"] == 1, "it is dropped")
    await client.aclose()
    await assert_streams_empty(farm)


async def assert_streams_empty(farm: Farm) -> None:
    client = connect(farm.server.uri, allow_plain=False)
    for lane in Lane:
        assert await client.xlen(f"rollmill:jobs:{lane.value}") == 0
        assert (await client.xpending(f"rollmill:jobs:{lane.value}", "workers"))["pending"] == 0
    await client.aclose()
