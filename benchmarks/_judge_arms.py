"""Judges that speak Code Judge's HTTP schema, each with four workers: ours over Redis, ours embedded, the public one,
or one of our own that starts an interpreter per job.

Each arm is a few processes of its own and a port. No measurement here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from services.common.system.child import DIE_WITH_PARENT
from tests.integration.envgateway.queue.processes import ROOT
from tests.integration.envgateway.queue.redis_server import RedisServer
from tests.ports import free_port

NUM_WORKERS = 4
TIME_LIMIT_S = 10
_START_S = 60.0
_HERE = Path(__file__).resolve().parent


class Arm:
    """A judge; ``start`` waits until all of its workers are there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = free_port()
        self._dir = Path(tempfile.mkdtemp(prefix=f"judge-{name}-"))
        self._redis: RedisServer | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def start_redis(self) -> str:
        self._redis = RedisServer(self._dir)
        self._redis.start()
        return self._redis.uri

    def start_process(self, arguments: list[str], cwd: Path = ROOT, **variables: str) -> None:
        """In a session of its own, so that all its children can be ended with the session."""
        left_out = ("REDIS_URI", "REDIS_URL", "MAX_WORKERS", "CODE_JUDGE_PORT", "ENVGATEWAY_PORT", "PYTHONPATH")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        with (self._dir / "log").open("ab") as log:
            process = subprocess.Popen(
                arguments, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**kept, "OMP_NUM_THREADS": "1", "MAX_EXECUTION_TIME": str(TIME_LIMIT_S), "MAX_MEMORY": "512",
                     DIE_WITH_PARENT: str(os.getpid()), **variables},
            )  # fmt: skip
        self._processes.append(process)

    async def wait_until_ready(self) -> Arm:
        end = time.monotonic() + _START_S
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as session:
            while time.monotonic() < end:
                try:
                    async with session.get("/status") as response:
                        if (await response.json())["num_workers"] >= NUM_WORKERS:
                            return self
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        raise TimeoutError(
            f"{self.name} did not start within {_START_S:g} s:\n{(self._dir / 'log').read_text()[-2000:]}"
        )

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                pass  # killed below, with what it started
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self._redis is not None:
            self._redis.kill()
        shutil.rmtree(self._dir, ignore_errors=True)


async def ours(over_redis: bool) -> Arm:
    arm = Arm("ours" if over_redis else "embedded")
    gateway = {"CODE_JUDGE_PORT": str(arm.port), "ENVGATEWAY_PORT": "0", "ALLOW_TIER_0": "1"}
    if over_redis:
        redis_uri = arm.start_redis()
        gateway["REDIS_URI"] = redis_uri
        arm.start_process(
            [sys.executable, "-m", "services.envgateway.worker"],
            REDIS_URI=redis_uri, MAX_WORKERS=str(NUM_WORKERS), ALLOW_TIER_0="1",
        )  # fmt: skip
    arm.start_process([sys.executable, "-m", "services.envgateway"], MAX_WORKERS=str(NUM_WORKERS), **gateway)
    return await arm.wait_until_ready()


def peer_python(checkout: Path) -> str:
    """The interpreter of the peer itself: its own environment, if any. Programs run under ours in either case."""
    own = checkout / ".venv" / "bin" / "python"
    return os.environ.get("CODE_JUDGE_PYTHON") or (str(own) if own.exists() else sys.executable)


async def code_judge(checkout: Path) -> Arm:
    """The public judge, started as in its README, with one API process as ours."""
    arm = Arm("code-judge")
    variables: dict[str, Any] = {
        "REDIS_URI": arm.start_redis(), "MAX_WORKERS": str(NUM_WORKERS), "PYTHON_EXECUTOR_PATH": sys.executable,
    }  # fmt: skip
    python = peer_python(checkout)
    arm.start_process([python, "run_workers.py"], checkout, **variables)
    arm.start_process(
        [python, "-m", "uvicorn", "app.main:app", "--port", str(arm.port), "--log-level", "warning"],
        checkout, **variables,
    )  # fmt: skip
    return await arm.wait_until_ready()


async def interpreter_per_job() -> Arm:
    arm = Arm("interpreter-per-job")
    redis_uri = arm.start_redis()
    script = str(_HERE / "_interpreter_per_job.py")
    for _ in range(NUM_WORKERS):
        arm.start_process([sys.executable, script, "worker", redis_uri])
    arm.start_process([sys.executable, script, "api", redis_uri, str(arm.port), str(NUM_WORKERS)])
    return await arm.wait_until_ready()
