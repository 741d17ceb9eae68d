"""Measures the CPU time of a tool run, in all processes of the gateway and in its event loop.

A gateway process with two slots serves 16 callers, as many rollouts whose turns wait for a tool. Each call is a program
of the calculator task, and every answer is checked.

    execute  ExecuteCode, as in the calculator of recipes/quickstart
    batch    ExecuteCodes, as a replica sends the calls of rollouts whose turns end in one decoding step: all of the 16
             callers' in one message, and each waits for the slowest
    step     StepEpisode of the environment `tools` with the tool `python`, as in the mathematical recipes; creating and closing the episode (one for every four calls) is included

Every call is run, and none remembered. Figures with ``remembered_`` are those of a gateway that knows all of the calls.

Each way is measured in several interleaved rounds. CPU time is user and system time of the gateway, the sandbox's
supervisor, its fork servers and the programs together; that of the event loop is the time of the gateway's first
thread. The client is not counted. ``cpu_ms_per_tool_run`` and ``event_loop_ms_per_tool_run`` are the medians over the
rounds of the dearer way; figures of each way stand beside them.

    python benchmarks/tool_runs.py [--quick] [--calls 600] [--rounds 5] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks._gateway import gateway
from benchmarks._processes import thread_cpu_s, tree_cpu_s
from benchmarks._report import report_facts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.rpc.client.channel import channel

WAYS = ("execute", "batch", "step")
KNOWN = 64  # calls that a gateway that remembers is asked again
CALLERS = 16
CALLS_OF_AN_EPISODE = 4
TIMEOUT_S = 60.0
SETTINGS = {"sandbox.num_slots": 2, "sandbox.wall_time_s": 5, "runs.results": 0}
REMEMBERING = {**SETTINGS, "runs.results": 4096}
TASK = orjson.dumps({"environment": {"tools": ["python"]}})
OPERATORS = ("+", "-", "*")

Caller = Callable[[list[str]], Awaitable[None]]


def expressions(count: int, draw: random.Random) -> list[str]:
    """Two-digit arithmetic; the programs of a run are all there are, so none is stored for the next call."""
    return [f"{draw.randrange(10, 100)}{draw.choice(OPERATORS)}{draw.randrange(10, 100)}" for _ in range(count)]


def checked(expression: str, said: str) -> None:
    expected = str(eval(expression))  # our own arithmetic
    if said.strip() != expected:
        raise AssertionError(f"{expression} is {expected}, and the gateway said {said!r}")


def by_execution(stub: pb_grpc.CodeExecutionServiceAsyncStub) -> Caller:
    async def call(todo: list[str]) -> None:
        while todo:
            expression = todo.pop()
            request = pb.ExecuteCodeRequest(
                request_id=os.urandom(16).hex(), language="python", code=f"print({expression})"
            )
            answer = await stub.ExecuteCode(request, timeout=TIMEOUT_S)
            checked(expression, answer.stdout)

    return call


def by_batches(stub: pb_grpc.CodeExecutionServiceAsyncStub) -> Caller:
    async def call(todo: list[str]) -> None:
        while todo:
            asked = [todo.pop() for _ in range(min(CALLERS, len(todo)))]
            requests = [
                pb.ExecuteCodeRequest(request_id=os.urandom(16).hex(), language="python", code=f"print({expression})")
                for expression in asked
            ]
            async for part in stub.ExecuteCodes(pb.ExecuteCodesRequest(requests=requests), timeout=TIMEOUT_S):
                for answer in part.answers:
                    checked(asked[answer.index], answer.response.stdout)

    return call


def by_steps(stub: pb_grpc.EnvironmentServiceAsyncStub) -> Caller:
    async def call(todo: list[str]) -> None:
        while todo:
            begin = pb.CreateEpisodeRequest(request_id=os.urandom(16).hex(), environment="tools", task_json=TASK)
            episode_id = (await stub.CreateEpisode(begin, timeout=TIMEOUT_S)).episode_id
            for turn in range(1, CALLS_OF_AN_EPISODE + 1):
                if not todo:
                    break
                expression = todo.pop()
                action = orjson.dumps({"name": "python", "arguments": {"code": expression}}).decode()
                step = pb.StepEpisodeRequest(episode_id=episode_id, turn=turn, action=action)
                checked(expression, (await stub.StepEpisode(step, timeout=TIMEOUT_S)).observation)
            await stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=episode_id), timeout=TIMEOUT_S)

    return call


async def measure(calls: int, rounds: int, seed: int) -> None:
    draw = random.Random(seed)
    figures = await _measured(SETTINGS, lambda: expressions(calls, draw), calls, rounds)
    known = expressions(KNOWN, draw)
    again = await _measured(REMEMBERING, lambda: draw.choices(known, k=calls), calls, rounds, known)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    report_facts(
        "tool_runs",
        cpu_ms_per_tool_run=max(medians[f"{way}_cpu_ms"] for way in WAYS),
        event_loop_ms_per_tool_run=max(medians[f"{way}_event_loop_ms"] for way in WAYS),
        **medians,
        **{f"remembered_{name}": statistics.median(values) for name, values in again.items()},
        cpu_ms_of_rounds={way: figures[f"{way}_cpu_ms"] for way in WAYS},
        runs=len(WAYS) * rounds * calls,
        seed=seed,
    )


async def _measured(
    settings: Mapping[str, Any], draw: Callable[[], list[str]], calls: int, rounds: int, known: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Figures of each round, by name. ``known``: calls that were made before, twice."""
    figures: dict[str, list[float]] = defaultdict(list)
    async with gateway(settings) as (address, pid):
        connection = channel(address)
        execution, environments = (
            pb_grpc.CodeExecutionServiceStub(connection),
            pb_grpc.EnvironmentServiceStub(connection),
        )
        ways = dict(zip(WAYS, (by_execution(execution), by_batches(execution), by_steps(environments)), strict=True))
        for call in ways.values():  # connections, imports, caches
            await _played(call, [*known, *known] or draw()[:64], CALLERS)
        for number in range(rounds):
            for way, call in ways.items() if number % 2 else reversed(ways.items()):
                todo = draw()
                before, loop_before, began = tree_cpu_s(pid), thread_cpu_s(pid), time.perf_counter()
                await _played(call, todo, 1 if way == "batch" else CALLERS)
                figures[f"{way}_wall_ms"].append(1e3 * (time.perf_counter() - began) / calls)
                figures[f"{way}_cpu_ms"].append(1e3 * (tree_cpu_s(pid) - before) / calls)
                figures[f"{way}_event_loop_ms"].append(1e3 * (thread_cpu_s(pid) - loop_before) / calls)
            print(f"round {number}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in figures.items()))
        await connection.close()
    return figures


async def _played(call: Caller, todo: list[str], callers: int) -> None:
    await asyncio.gather(*(call(todo) for _ in range(callers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of 300 calls: under a minute")
    parser.add_argument("--calls", type=int, default=600, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the programs")
    arguments = parser.parse_args()
    calls, rounds = (300, 3) if arguments.quick else (arguments.calls, arguments.rounds)
    asyncio.run(measure(calls, rounds, arguments.seed))


if __name__ == "__main__":
    main()
