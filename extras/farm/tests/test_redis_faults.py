"""Faults between gateways and workers: invalid entries, a full Redis, broken machinery, overlooked dead workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from extras.farm import worker as worker_module
from extras.farm.codec import encode
from extras.farm.queue import GROUP, Keys, connect
from extras.farm.tests.conftest import Farm
from extras.farm.worker import Worker
from services.common.errors import InvalidRequestError
from services.common.telemetry.metrics import Lane
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests
from services.envgateway.queue import Job, JobResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult
from tests.waiting import until


async def test_entries_of_the_same_id_in_both_lanes_are_two_jobs(farm: Farm, redis: Any) -> None:
    for lane in Lane:
        await redis.set(f"rollmill:job:{lane}", encode(ExecutionRequest(code=f"sleep 0.1 {lane}")))
        await redis.xadd(f"rollmill:jobs:{lane}", {"id": f"{lane}", "gateway": "other"}, id="5-1")
    worker = farm.add_worker()
    await until(lambda: len(worker.held) == 2, "both are held")
    await until(lambda: worker.counts["answered"] == 2, "both are answered")
    await until(lambda: len(worker.held) == 0, "both are let go")
    answers = await redis.lrange("rollmill:results:other", 0, -1)
    assert {answer.split(b"[")[0] for answer in answers} == {f"{lane}".encode() for lane in Lane}
    assert (await farm.execute("next")).stdout == b"next"


async def test_a_burst_for_many_slots_needs_no_more_connections_than_there_are(farm: Farm) -> None:
    farm.add_worker(num_slots=100)
    await until(lambda: farm.queue.num_slots == 100, "the gateway knows of 100 slots")
    codes = [f"sleep 0.2 {n}" for n in range(200)]
    results = await asyncio.gather(*(farm.execute(code) for code in codes))
    assert [result.stdout.decode() for result in results] == codes
    assert Counter(farm.programs.started) == Counter(codes) and farm.workers[0].counts["taken_over"] == 0


async def test_jobs_of_dead_workers_do_not_wait_for_an_idle_worker(farm: Farm) -> None:
    dying = farm.add_worker()
    orphan = asyncio.create_task(farm.execute("sleep 0.3 orphan"))
    await until(lambda: bool(farm.programs.started), "it runs")
    farm.kill(dying)
    farm.add_worker()
    flood = [asyncio.create_task(farm.execute(f"sleep 0.05 {n}")) for n in range(400)]
    async with asyncio.timeout(60):
        await orphan
    assert not all(task.done() for task in flood)
    for task in flood:
        task.cancel()


async def test_the_search_for_the_dead_goes_on_behind_leases_that_are_renewed(farm: Farm, redis: Any) -> None:
    stream = "rollmill:jobs:batch"
    await redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
    for n in range(31):
        await redis.set(f"rollmill:job:{n}", encode(ExecutionRequest(code=f"job {n}")))
        await redis.xadd(stream, {"id": str(n), "gateway": "other"})
    [[_, entries]] = await redis.xreadgroup(GROUP, "dead", {stream: ">"}, count=31)
    *renewed, _ = [entry for entry, _ in entries]

    async def renew() -> None:
        while True:
            await redis.xclaim(stream, GROUP, "alive", 0, renewed, justid=True)
            await asyncio.sleep(farm.lease_s / 5)

    renewing = asyncio.create_task(renew())
    worker = farm.add_worker(num_slots=1)
    await until(lambda: worker.counts["answered"] == 1, "the last one is answered")
    renewing.cancel()
    assert farm.programs.started == ["job 30"]


async def test_an_entry_that_is_no_job_is_thrown_away(farm: Farm, redis: Any) -> None:
    await redis.xadd("rollmill:jobs:batch", {"what": "ever"})
    await redis.xadd("rollmill:jobs:batch", {"id": b"\xff", "gateway": "other"})
    farm.add_worker()
    assert (await farm.execute("next")).stdout == b"next"
    assert await redis.xlen("rollmill:jobs:batch") == 0


async def test_a_worker_report_of_another_version_is_ignored(farm: Farm, redis: Any) -> None:
    await redis.set("rollmill:worker:future", b'{"lanes": []}')  # before its name: a name alone is a dead worker's
    await redis.sadd("rollmill:workers", "future")
    farm.add_worker(num_slots=3)
    await until(lambda: farm.queue.gauges["queue_workers"] == 2, "both are counted")
    assert farm.queue.num_slots == 3
    await redis.rpush(f"rollmill:results:{farm.queue.gateway}", b"what ever")
    assert (await farm.execute("next")).stdout == b"next"


async def test_a_job_that_a_worker_cannot_read_is_an_infrastructure_failure_of_its_own_kind(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(payload: bytes) -> Job:
        raise InvalidRequestError("not of this version")

    monkeypatch.setattr(worker_module, "decode", unreadable)
    farm.add_worker(max_attempts=1)
    request = JudgeRequest(code="judged", tests=StdinTests(cases=(StdinCase(stdin="", expected=""),)))
    judged = await farm.queue.run(request, lane=Lane.BATCH, request_id="", deadline_s=10)
    assert judged.verdict is RunStatus.INFRA_ERROR and "not of this version" in judged.detail


async def test_a_redis_that_is_full_for_a_while_loses_no_job_and_doubles_none(farm: Farm, redis: Any) -> None:
    farm.add_worker()
    assert (await farm.execute("first")).stdout == b"first"
    await redis.config_set("maxmemory", 1)
    jobs = [asyncio.create_task(farm.execute(f"echo {n}")) for n in range(20)]
    await asyncio.sleep(0.5)
    assert not any(job.done() for job in jobs)
    await redis.config_set("maxmemory", 0)
    async with asyncio.timeout(60):
        assert [(await job).stdout.decode() for job in jobs] == [f"echo {n}" for n in range(20)]
    assert Counter(farm.programs.started) == Counter(["first", *(f"echo {n}" for n in range(20))])


async def test_a_second_answer_of_a_job_is_ignored(farm: Farm, redis: Any) -> None:
    farm.add_worker()
    job = asyncio.create_task(farm.execute("hang"))
    await until(lambda: bool(farm.programs.started), "it runs")
    [[_, fields]] = await redis.xrange("rollmill:jobs:batch")
    for text in (b"first", b"second"):
        answer = encode(ExecutionResult(status=RunStatus.OK, stdout=text))
        await redis.rpush(f"rollmill:results:{farm.queue.gateway}", fields[b"id"] + answer)
    assert (await job).stdout == b"first"
    await until(lambda: farm.queue.gauges.get("queue_answers_ignored", 0) == 1, "the second is ignored")


async def test_an_evicted_job_is_sent_again(farm: Farm, redis: Any) -> None:
    jobs = [asyncio.create_task(farm.execute(f"echo {n}")) for n in range(3)]
    await until(lambda: farm.queue.gauges.get("queue_sent", 0) == 3, "all are sent")
    [name] = [fields[b"id"] for _, fields in (await redis.xrange("rollmill:jobs:batch"))[1:2]]
    await redis.delete(b"rollmill:job:" + name)
    await until(lambda: farm.queue.gauges.get("queue_sent", 0) == 4, "one is sent again")
    farm.add_worker()
    assert [(await job).stdout.decode() for job in jobs] == [f"echo {n}" for n in range(3)]
    assert Counter(farm.programs.started) == Counter(f"echo {n}" for n in range(3))


class Sick:
    """A runner with broken machinery."""

    def __init__(self) -> None:
        self.spoiled = 0

    async def __call__(self, job: Job, lane: Lane, wait_s: float | None) -> JobResult:
        self.spoiled += 1
        return ExecutionResult(status=RunStatus.INFRA_ERROR, detail="no sandbox")


async def test_a_worker_that_spoils_every_job_leaves_them_to_others(farm: Farm) -> None:
    sick = Sick()
    farm.add_worker(sick)
    farm.add_worker()
    results = await asyncio.gather(*(farm.execute(f"sleep 0.05 {n}") for n in range(60)))
    assert {result.status for result in results} == {RunStatus.OK}
    assert 3 <= sick.spoiled < 30


async def test_a_bug_in_a_loop_ends_the_worker_rather_than_part_of_it(farm: Farm) -> None:
    client = connect(farm.server.uri, allow_plain=False)
    worker = Worker(client, Keys("rollmill"), farm.programs, num_slots=1, lease_s=0.6, max_attempts=3)

    async def broken(lane: Lane) -> None:
        raise TypeError("a bug")

    worker._renew = broken  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        with pytest.raises(TypeError, match="a bug"):
            await worker.run(drain_s=1.0)
    await client.aclose()


async def test_a_bug_in_a_loop_of_the_gateway_is_raised(farm: Farm) -> None:
    async def broken() -> None:
        raise TypeError("a bug")

    farm.queue._count_workers = broken  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        with pytest.raises(TypeError, match="a bug"):
            await farm.queue.failed()
