"""CPU time of the judge by kind of program: of this process and all descendants, sandbox and programs included.

    stdin, call      programs that pass ten cases
    reward           completions of recipes/quickstart-code, graded by the reward ``code``: right, wrong, no program

For ``judge_throughput``. Run as a script, it prints one JSON object; a process of its own because a sandbox starts
before threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.functions.steps import demonstrations, problems
from services.common.config.envgateway import SandboxConfig
from services.common.telemetry.metrics import Lane
from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import CallCase, CallTests, JudgeRequest, StdinCase, StdinTests
from services.envgateway.queue import local_queue
from services.envgateway.rewards.registry import CodeReward
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool

NUM_CASES = 10
_AT_ONCE = 16
_REPEATS = 3
_TICKS_PER_MS = os.sysconf("SC_CLK_TCK") / 1000
_STDIN = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{2 * n}") for n in range(NUM_CASES)))
_CALLS = CallTests(entry_point="f", cases=tuple(CallCase(args=(n,), expected=n * n) for n in range(NUM_CASES)))
_SUM = "print(sum(map(int, input().split())))"
PROGRAMS = {
    "stdin": JudgeRequest(code=_SUM, tests=_STDIN),
    "call": JudgeRequest(code="def f(x):\n    return x * x", tests=_CALLS),
}


def tree_cpu_ms(root: int) -> float:
    """CPU time of a process and of all descendants, reaped ones included, in milliseconds."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            data = Path(f"/proc/{name}/stat").read_bytes()
        except OSError:  # it has ended
            continue
        fields = data[data.rfind(b")") + 2 :].split()
        children[int(fields[1])].append(int(name))
        ticks[int(name)] = sum(map(int, fields[11:15]))
    pending, total = [root], 0
    while pending:
        pid = pending.pop()
        total += ticks.get(pid, 0)
        pending += children[pid]
    return total / _TICKS_PER_MS


async def _cost(one: Callable[[int], Awaitable[None]], times: int) -> float:
    """Milliseconds of CPU each, the median of repeats."""
    costs = []
    for _ in range(_REPEATS):
        before = tree_cpu_ms(os.getpid())
        waiting = iter(range(times))

        async def some(numbers: object = waiting) -> None:
            for number in numbers:  # type: ignore[attr-defined]
                await one(number)

        await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
        costs.append((tree_cpu_ms(os.getpid()) - before) / times)
    return statistics.median(costs)


async def measure(num_programs: int) -> dict[str, float]:
    """Milliseconds of CPU per passed case of each kind of program, and per reward."""
    pool = SandboxPool.start_before_threads(
        SandboxConfig(num_slots=4, prewarm_scientific=False, allow_tier_0=os.getuid() != 0)
    )
    try:
        queue = local_queue(pool, Judge(pool))

        async def judged(request: JudgeRequest, number: int = 0) -> None:
            own = replace(request, code=f"{request.code}\n# {number}")  # equal judgements at the same time are one
            result = await queue.run(own, lane=Lane.BATCH, request_id="", deadline_s=300.0)
            assert result.verdict is RunStatus.OK, result

        for request in PROGRAMS.values():  # warms up
            await judged(request)
        costs = {
            name: await _cost(lambda number, request=request: judged(request, number), num_programs) / NUM_CASES  # type: ignore[misc]
            for name, request in PROGRAMS.items()
        }
        costs["reward"] = await _cost(_reward(CodeReward(queue)), num_programs)
    finally:
        await pool.close()
    return costs


def _reward(grade: CodeReward) -> Callable[[int], Awaitable[None]]:
    """Grades a completion, as a policy writes them at the start: about a third is right, one in ten is no program."""
    rng = random.Random(0)
    rows = {row["messages"][0]["content"]: row for row in problems(0)}
    tasks = []
    for dialogue in islice(demonstrations(0), 400):
        asked, written = (message["content"] for message in dialogue["messages"])
        whole = rng.random() < 0.9
        tasks.append((rows[asked], written if whole else written[:-3] + "(", whole and dialogue["right"]))

    async def one(number: int) -> None:
        task, completion, right = tasks[number % len(tasks)]
        result = await grade(task, completion)
        assert (result.outcome is RewardOutcome.CORRECT) or not right, (completion, result)
        assert result.outcome in (RewardOutcome.CORRECT, RewardOutcome.WRONG), result

    return one


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1])))))
