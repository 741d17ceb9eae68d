"""The launch scripts of the judge as people use them: several APIs on one port, a worker, and kill -9 of each in mid-batch."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from extras.code_judge.tests.judge_clients import GradingClient, RolloutClient, Status
from extras.farm.tests.processes import ROOT, Process, World, children, serves_connection
from extras.farm.tests.redis_server import RedisServer
from services.common.telemetry.logs import LogEvent
from tests.ports import free_port
from tests.running import is_running
from tests.waiting import until

pytestmark = pytest.mark.slow

NUM_APIS = 2


async def test_batches_over_http_are_complete_and_right_after_any_kill(world: World, redis_server: RedisServer) -> None:
    port = free_port()
    api = world.start_api(NUM_APIS, port)
    worker = world.start_worker(slots=3)
    await until(lambda: api.log.read_text().count(LogEvent.SERVER_READY) == NUM_APIS, "every API serves")
    await until(
        lambda: api.log.read_text().count("slots=3 workers=1") == NUM_APIS, "each knows of the worker", timeout_s=60
    )
    assert await asyncio.to_thread(GradingClient(port).status) == Status(queue=0, num_workers=3)

    async with RolloutClient(port) as client, asyncio.timeout(120):
        batches = [asyncio.create_task(client.send(_submissions(n))) for n in range(12)]
        # The kernel chooses the API of each connection, so only one that serves some can break a request.
        serving = partial(_serving_apis, api.pid, port)
        await until(serving, "an API serves a batch")
        os.kill(serving()[-1], signal.SIGKILL)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(worker.kill)
        world.start_worker(slots=3)
        await asyncio.sleep(0.8)
        await asyncio.to_thread(redis_server.kill)
        await asyncio.to_thread(redis_server.start)
        results = [await batch for batch in batches]
    for n, outcomes in enumerate(results):
        assert [outcome["stdout"] for outcome in outcomes] == [f"{n * 100 + k}\n" for k in range(12)]
        assert [outcome["success"] for outcome in outcomes] == [k % 3 != 0 for k in range(12)]
    assert client.broken >= 1
    await until(lambda: api.log.read_text().count(LogEvent.SERVER_READY) == NUM_APIS + 1, "the killed API is back")
    living = children(api.pid)
    assert await asyncio.to_thread(api.stop) == 0
    await until(lambda: not any(is_running(pid) for pid in living), "the APIs have ended")


async def test_a_script_that_is_killed_leaves_no_api_behind(world: World) -> None:
    api = world.start_api(NUM_APIS, free_port())
    await until(lambda: api.log.read_text().count(LogEvent.SERVER_READY) == NUM_APIS, "every API serves")
    living = children(api.pid)
    await asyncio.to_thread(api.kill)
    await until(lambda: not any(is_running(pid) for pid in living), "they have ended")


def _serving_apis(script_pid: int, port: int) -> list[int]:
    return [pid for pid in children(script_pid) if serves_connection(pid, port)]


def _submissions(n: int) -> list[dict[str, Any]]:
    return [
        {"type": "python", "input": str(n * 100 + k), "expected_output": "wrong" if k % 3 == 0 else str(n * 100 + k),
         "solution": "import time; time.sleep(0.05); print(input())"}
        for k in range(12)
    ]  # fmt: skip


def test_the_scripts_name_missing_parts(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, str], str]] = [
        ("judge_api.sh", {"REDIS_URI": ""}, "set REDIS_URI"),
        ("judge_worker.sh", {"REDIS_URI": ""}, "set REDIS_URI"),
        ("judge_api.sh", {"REDIS_URL": "redis://127.0.0.1:1", "CODE_JUDGE_PORT": "http", "API_PROCESSES": "2"},
         "CODE_JUDGE_PORT is 'http'"),
        ("judge_worker.sh", {"REDIS_URL": "redis://127.0.0.1:1", "MAX_EXECUTION_TIME": "4s"},
         "MAX_EXECUTION_TIME is '4s'"),
        ("judge_worker.sh", {"REDIS_URI": "redis://10.9.8.7:6379"}, "ALLOW_PLAIN_REDIS=1"),
        ("judge_worker.sh", {"REDIS_URI": "http://127.0.0.1:1"}, "is no URI of Redis"),
        ("judge_api.sh", {"REDIS_URI": "redis://:secret@10.9.8.7:6379", "API_PROCESSES": "1"}, "redis://10.9.8.7:6379"),
        ("judge_api.sh", {"REDIS_URI": "redis://127.0.0.1:port", "API_PROCESSES": "1"}, "is no URI of Redis"),
        ("judge_api.sh", {"REDIS_URI": "redis://127.0.0.1:1", "API_PROCESSES": "many"}, "API_PROCESSES is 'many'"),
        ("judge_api.sh", {"REDIS_URI": "redis://127.0.0.1:1", "API_PROCESSES": "1", "RUN_WORKERS": "some"},
         "RUN_WORKERS is 'some'"),
    ]  # fmt: skip
    for script, variables, words in cases:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        process = Process([str(ROOT / "deploy/launch" / script)], log, **variables)
        assert process.wait() == 1 and words in log.read_text(), log.read_text()
        assert "sandbox.ready" not in log.read_text(), "refused before a sandbox started"


async def test_run_workers_starts_a_worker_that_is_started_again_and_ends_with_the_script(world: World) -> None:
    port = free_port()
    api = world.start_api(NUM_APIS, port, RUN_WORKERS="1", MAX_WORKERS="3", MAX_QUEUE_WAIT_TIME="60")
    await until(lambda: "slots=3 workers=1" in api.log.read_text(), "an API knows of the worker", timeout_s=60)
    assert "MAX_QUEUE_WAIT_TIME of Code Judge has no effect" in api.log.read_text()
    async with RolloutClient(port) as client, asyncio.timeout(60):
        outcomes = await client.send(_submissions(0))
    assert [outcome["success"] for outcome in outcomes] == [k % 3 != 0 for k in range(12)]

    def workers() -> list[int]:
        found = []
        for child in children(api.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # one, such as the script's sleep, has just ended
                found += [p for p in children(child) if b"extras.farm" in Path(f"/proc/{p}/cmdline").read_bytes()]
        return found

    (first,) = workers()
    os.kill(first, signal.SIGKILL)
    await until(lambda: bool(workers()) and workers() != [first], "another worker", timeout_s=60)
    (second,) = workers()
    assert await asyncio.to_thread(api.stop) == 0
    await until(lambda: not is_running(second), "the worker has ended")
