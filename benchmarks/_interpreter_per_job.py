"""The simplest judge over Redis: a list of jobs, workers that start one interpreter per job, a list for each answer.

    python _interpreter_per_job.py worker REDIS_URI
    python _interpreter_per_job.py api REDIS_URI PORT NUM_WORKERS

Implements the part of Code Judge's schema that the benchmark needs, without limits and without isolation.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from aiohttp import web

_JOBS = "jobs"
_LIMIT_S = 10
_ANSWER_S = 300  # as long as the caller waits; redis-py gives up sooner, which a batch on slow cores outlasts


def work(redis_uri: str) -> None:
    # It waits for work without a deadline, which redis-py would otherwise set: it is idle while other judges are measured.
    client = redis.Redis.from_url(redis_uri, socket_timeout=None)
    while True:
        reply: Any = client.blpop([_JOBS], timeout=0)
        job = json.loads(reply[1])
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "source.py"
            source.write_text(job["solution"])
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, str(source)], input=job["input"], capture_output=True, text=True, cwd=directory,
                timeout=_LIMIT_S, check=False,
            )  # fmt: skip
            cost = time.perf_counter() - began
        right = job["expected_output"] is None or done.stdout.strip() == job["expected_output"].strip()
        ran = done.returncode == 0
        result = {
            "sub_id": job["id"], "success": ran and right, "run_success": ran, "cost": cost,
            "stdout": done.stdout[:1000], "stderr": done.stderr[:1000], "reason": "",
        }  # fmt: skip
        client.rpush(job["id"], json.dumps(result))


class Api:
    def __init__(self, redis_uri: str, num_workers: int) -> None:
        self._redis = redis.asyncio.Redis.from_url(redis_uri, socket_timeout=_ANSWER_S)
        self._num_workers = num_workers

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 28)
        application.add_routes(
            [web.get("/status", self._status), web.post("/run", self._run), web.post("/run/long-batch", self._batch)]
        )
        return application

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"queue": await self._redis.llen(_JOBS), "num_workers": self._num_workers})

    async def _run(self, request: web.Request) -> web.Response:
        [result] = await self._results([await request.json()])
        return web.json_response(result)

    async def _batch(self, request: web.Request) -> web.Response:
        results = await self._results((await request.json())["submissions"])
        return web.json_response({"sub_id": uuid.uuid4().hex, "results": results})

    async def _results(self, submissions: list[dict[str, Any]]) -> list[Any]:
        jobs = [
            {"solution": one["solution"], "input": one.get("input") or "", "expected_output": one.get("expected_output"),
             "id": uuid.uuid4().hex}
            for one in submissions
        ]  # fmt: skip
        await self._redis.rpush(_JOBS, *(json.dumps(job) for job in jobs))
        answers = [await self._redis.blpop([job["id"]], timeout=0) for job in jobs]
        return [json.loads(answer[1]) for answer in answers]


async def serve(redis_uri: str, port: int, num_workers: int) -> None:
    runner = web.AppRunner(Api(redis_uri, num_workers).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(sys.argv[2])
    else:
        asyncio.run(serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
