"""Measures the throughput of the judge and of the public one, on one machine, with four workers and Redis on both sides.

Three judges serve Code Judge's HTTP interface at once, and are loaded in turns:

    ours        one gateway, one worker with four slots, Redis
    embedded    one gateway that runs programs itself, four slots
    theirs      code-judge 0.0.5 from the checkout that --peer or CODE_JUDGE_DIR names (one API process, four workers,
                Redis; CODE_JUDGE_PYTHON or its .venv runs it); without one, workers of our own that start an
                interpreter per job over Redis. The JSON says which (key peer). Programs run under this interpreter in
                all of them.

    single      programs that print their input, each a POST /run of its own, from 32 connections
    batch       the same in one POST /run/long-batch
    sympy       a batch of programs that import sympy and print one of its numbers
    algebra     a batch of programs that import sympy and expand a square

Every answer is checked. Four workers on fewer cores take turns, on both sides alike. ``ours`` and ``theirs`` are jobs
per second of the batch, ``ratio`` is the smallest of the ratios on trivial programs; ``sympy_ratio`` and
``algebra_ratio`` are beside the main ratio. Figures are medians of interleaved repeats.

Then the lanes: p99 of an interactive call (POST /run) on an idle gateway, and while 10,000 batch jobs that sleep
50 ms wait; ``added_p99_ms`` is the difference, for ours over Redis and embedded.

Then the cost of our judge, in milliseconds of CPU over the gateway and all of its sandbox: ``cpu_ms_per_case``, the
dearer of two kinds of passed cases (stdin and calls) of programs with ten of them, and ``cpu_ms_per_reward`` of
completions for recipes/quickstart-code.

    python benchmarks/judge_throughput.py [--quick] [--peer DIR] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks._bench import median_and_spread, report, report_nothing, why_not
from extras.farm.tests.processes import ROOT
from extras.farm.tests.redis_server import RedisServer
from services.common.system.child import DIE_WITH_PARENT
from tests.ports import free_port

# --- Judges that speak Code Judge's HTTP schema, each with four workers: ours over Redis, ours embedded, the public one,
# or one of our own that starts an interpreter per job.


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
            [sys.executable, "-m", "extras.farm"],
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


# --- The benchmark itself.


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


_COST_SCRIPT = str(Path(__file__).resolve().parent / "_judge_cost.py")
_CONNECTIONS = 32  # as many rollouts have a tool call under way
_SYMPY = "import sympy\nprint(sympy.Integer(input()) + 1)"
_ALGEBRA = "import sympy\nx = sympy.Symbol('x')\nprint(sympy.expand((x + int(input())) ** 2))"
_NUM_WAITING = 10_000
_PAUSE_S = 0.01  # between interactive calls: they are tool calls, not a flood


class Load:
    """Requests to one judge; every answer is checked."""

    def __init__(self, arm: Arm) -> None:
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{arm.port}",
            # given up sooner than any server does, so that none is closed in the moment of its use
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS + 2, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=300),
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(self, path: str, body: Any) -> Any:
        async with self._session.post(path, json=body) as response:
            response.raise_for_status()
            return await response.json()

    async def single(self, num_jobs: int) -> float:
        """Jobs per second."""
        numbers = iter(range(num_jobs))

        async def connection() -> None:
            for number in numbers:
                check([await self.post("/run", _trivial(number))])

        began = time.perf_counter()
        await asyncio.gather(*(connection() for _ in range(_CONNECTIONS)))
        return num_jobs / (time.perf_counter() - began)

    async def batch(self, submissions: list[dict[str, Any]]) -> float:
        """Jobs per second."""
        began = time.perf_counter()
        answer = await self.post("/run/long-batch", {"type": "batch", "submissions": submissions})
        seconds = time.perf_counter() - began
        check(answer["results"])
        return len(submissions) / seconds

    async def interactive(self, num_calls: int) -> list[float]:
        """Milliseconds of each call, one after the other."""
        took_ms = []
        for number in range(num_calls):
            began = time.perf_counter()
            check([await self.post("/run", _trivial(number))])
            took_ms.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(_PAUSE_S)
        return took_ms

    async def num_waiting(self) -> int:
        async with self._session.get("/status") as response:
            return int((await response.json())["queue"])


def check(results: list[dict[str, Any]]) -> None:
    wrong = [result for result in results if not (result["success"] and result["run_success"])]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(results)} answers are wrong, such as {wrong[0]}")


def _trivial(number: int) -> dict[str, Any]:
    return {"type": "python", "solution": "print(input())", "input": str(number), "expected_output": str(number)}


def _sympy(number: int) -> dict[str, Any]:
    return {"type": "python", "solution": _SYMPY, "input": str(number), "expected_output": str(number + 1)}


def _algebra(number: int) -> dict[str, Any]:
    expanded = f"x**2 + {2 * number}*x + {number**2}"
    return {"type": "python", "solution": _ALGEBRA, "input": str(number), "expected_output": expanded}


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def throughput(arms: list[Arm], repeats: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Jobs per second by workload and arm. Each measurement lasts about ``seconds``, by the rates of a first short one."""
    loads = {arm.name: Load(arm) for arm in arms}
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    workloads = {
        "single": lambda load, num: load.single(num),
        "batch": lambda load, num: load.batch([_trivial(number) for number in range(num)]),
        "sympy": lambda load, num: load.batch([_sympy(number) for number in range(num)]),
        "algebra": lambda load, num: load.batch([_algebra(number + 2) for number in range(num)]),
    }
    sizes: dict[tuple[str, str], int] = {}
    for workload, run in workloads.items():
        for name, load in loads.items():
            rate = await run(load, 4 * NUM_WORKERS)  # warms up as well
            sizes[workload, name] = max(4 * NUM_WORKERS, int(rate * seconds))
    for _ in range(repeats):
        for workload, run in workloads.items():
            for name, load in loads.items():
                rates[workload][name].append(await run(load, sizes[workload, name]))
    for load in loads.values():
        await load.close()
    return rates


async def lanes(arm: Arm, num_calls: int) -> dict[str, float]:
    """Interactive latency without and beside a long batch, in ms."""
    load = Load(arm)
    idle = await load.interactive(num_calls)
    sleepers = [{"type": "python", "solution": "import time; time.sleep(0.05)"}] * _NUM_WAITING
    batch = asyncio.create_task(load.post("/run/long-batch", {"type": "batch", "submissions": sleepers}))
    await asyncio.sleep(1.0)
    if batch.done():
        raise AssertionError(f"the batch has ended too soon: {batch.result()}")
    beside = await load.interactive(num_calls)
    still = not batch.done()
    batch.cancel()  # the judge withdraws what waits
    await asyncio.gather(batch, return_exceptions=True)
    await load.close()
    assert still, "the batch ended while it was measured beside"
    return {
        "idle_p50_ms": statistics.median(idle), "idle_p99_ms": _p99(idle),
        "beside_batch_p50_ms": statistics.median(beside), "beside_batch_p99_ms": _p99(beside),
        "added_p99_ms": _p99(beside) - _p99(idle),
    }  # fmt: skip


async def cpu_costs(num_programs: int) -> dict[str, float]:
    """The figures of ``_judge_cost``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, _COST_SCRIPT, str(num_programs), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(process.communicate(), 300)
    if process.returncode:
        raise RuntimeError(f"{_COST_SCRIPT} ended with {process.returncode}")
    costs: dict[str, float] = json.loads(said.splitlines()[-1])
    return costs


async def measure(arguments: argparse.Namespace) -> None:
    repeats = 2 if arguments.quick else arguments.repeats
    seconds = 1.0 if arguments.quick else 2.0
    num_calls = 150 if arguments.quick else 400
    costs = await cpu_costs(100 if arguments.quick else 400)
    print("CPU ms: " + ", ".join(f"{name} {cost:.2f}" for name, cost in costs.items()))
    arms: list[Arm] = []
    try:
        arms.append(await ours(over_redis=True))
        arms.append(await code_judge(arguments.peer) if arguments.peer else await interpreter_per_job())
        arms.append(await ours(over_redis=False))
        redis, peer, embedded = arms
        rates = await throughput(arms, repeats, seconds)
        latencies = {arm.name: await lanes(arm, num_calls) for arm in (redis, embedded)}
    finally:
        for arm in arms:
            arm.close()

    medians = {
        workload: {name: median_and_spread(values) for name, values in by_arm.items()}
        for workload, by_arm in rates.items()
    }
    ratio = {workload: by_arm[redis.name][0] / by_arm[peer.name][0] for workload, by_arm in medians.items()}
    for workload, by_arm in medians.items():
        told = ", ".join(f"{name} {rate:,.0f}/s ±{spread:.0%}" for name, (rate, spread) in by_arm.items())
        print(f"{workload}: {told}: {ratio[workload]:.1f}x")
    for name, latency in latencies.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in latency.items()))
    report(
        "judge_throughput",
        ours=medians["batch"][redis.name][0],
        theirs=medians["batch"][peer.name][0],
        ratio=min(ratio["single"], ratio["batch"]),
        spread=max(medians["batch"][arm.name][1] for arm in (redis, peer)),
        peer="code-judge 0.0.5" if arguments.peer else "ours: one interpreter per job over Redis",
        single_ratio=ratio["single"],
        batch_ratio=ratio["batch"],
        sympy_ratio=ratio["sympy"],
        algebra_ratio=ratio["algebra"],
        jobs_per_s={
            workload: {name: rate for name, (rate, _) in by_arm.items()} for workload, by_arm in medians.items()
        },
        spreads={
            workload: {name: spread for name, (_, spread) in by_arm.items()} for workload, by_arm in medians.items()
        },
        lanes=latencies,
        added_p99_ms=max(latency["added_p99_ms"] for latency in latencies.values()),
        cpu_ms_per_case=max(costs["stdin"], costs["call"]),
        cpu_ms_per_reward=costs["reward"],
        num_workers=NUM_WORKERS,
    )


def _checkout(text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not (path / "run_workers.py").exists():
        raise argparse.ArgumentTypeError(f"{path} is no checkout of code-judge: it has no run_workers.py")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind (default 5)")
    parser.add_argument("--peer", type=_checkout, default=os.environ.get("CODE_JUDGE_DIR") or None, metavar="DIR",
                        help="a checkout of code-judge (also CODE_JUDGE_DIR)")  # fmt: skip
    options = parser.parse_args()
    if reason := why_not("redis-server"):
        report_nothing("judge_throughput", reason)
        return
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
