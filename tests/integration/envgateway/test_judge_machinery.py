"""The sandbox and the judge when callers leave and processes die; the start of a sandbox, and its refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, JudgeRequest, StdinCase, StdinTests
from services.envgateway.sandbox.bare import procfs
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests.integration.envgateway.conftest import CONFIG, SLEEP_LONG, Execute, long_programs
from tests.integration.envgateway.sandbox_state import (
    assert_clean,
    children_of,
    kill_fork_server_at_its_next_fork,
    kill_supervisor,
    processes_of,
    processes_of_slots,
    slot_dirs,
    supervisor_of,
    until_programs_run,
)
from tests.running import is_running
from tests.waiting import until, wait_until

V = RunStatus
SQUARES = StdinTests(cases=tuple(StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(4)))
SLEEP = "import time; time.sleep(30)"


async def test_numpy_and_sympy_are_warm_and_draw_their_own_numbers(pool: SandboxPool) -> None:
    code = "import numpy, os, threading\nprint(numpy.random.rand(), threading.active_count())"
    outputs = {(await pool.run(ExecutionRequest(code=code))).stdout for _ in range(3)}
    assert len(outputs) == 3 and all(out.endswith(b" 1\n") for out in outputs)
    result = await pool.run(
        ExecutionRequest(code="from sympy import symbols, integrate\nx = symbols('x')\nprint(integrate(x, x))")
    )
    assert (result.status, result.stdout) == (V.OK, b"x**2/2\n")
    result = await pool.run(
        ExecutionRequest(code="import numpy, os\nfor _ in range(3):\n  if os.fork() == 0: os._exit(0)\nprint(1)")
    )
    assert result.stdout == b"1\n"  # pages shared with the fork server count once


async def test_other_packages_of_the_gateway_are_not_there(pool: SandboxPool) -> None:
    for name in ("grpc", "pydantic", "services", "pytest"):
        result = await pool.run(ExecutionRequest(code=f"import {name}"))
        assert result.status is V.RUNTIME_ERROR and b"ModuleNotFoundError" in result.stderr


@long_programs
async def test_cancelling_a_judgement_kills_it_and_frees_the_slot(judge: Judge, pool: SandboxPool) -> None:
    tests = AssertTests(tests="for n in [1]:\n    assert f(n) == 1")
    requests = [
        JudgeRequest(code=SLEEP_LONG, tests=SQUARES),
        JudgeRequest(code="import time\ndef f(n): time.sleep(500)", tests=tests),
    ]
    running = [asyncio.create_task(judge.judge(request)) for request in requests]
    await until(lambda: pool.gauges["sandbox_busy_slots"], "one runs")
    await asyncio.sleep(0.5)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: not pool.gauges["sandbox_busy_slots"])
    await assert_clean(pool)


@pytest.mark.parametrize("num_rounds", range(5))
async def test_a_caller_that_leaves_at_any_moment_of_connecting_leaves_the_sandbox_usable(
    pool: SandboxPool, num_rounds: int
) -> None:
    for killed in (False, True):  # the first connection, and that to a new supervisor
        if killed:
            kill_supervisor(pool)
            assert (await pool.run(ExecutionRequest(code="print(0)"))).status in (V.INFRA_ERROR, V.OK)
        leaving = asyncio.create_task(pool.run(ExecutionRequest(code="print(1)")))
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert (await pool.run(ExecutionRequest(code="print(2)"))).stdout == b"2\n"
    await assert_clean(pool)


async def test_a_dead_supervisor_does_not_change_a_verdict(judge: Judge, pool: SandboxPool) -> None:
    """The case is run once more: infrastructure is never the program's fault."""
    code = "import time, os\nif os.fork() == 0: time.sleep(20)\ntime.sleep(1)\nprint(1)"
    tests = StdinTests(cases=(StdinCase(expected="1"),))
    running = asyncio.create_task(judge.judge(JudgeRequest(code=code, tests=tests)))
    await until_programs_run(pool, at_least=2)
    kill_supervisor(pool)
    assert (await running).verdict is V.OK
    assert pool.counts["restarts"] == 1
    await assert_clean(pool)


async def test_machinery_that_keeps_dying_is_an_infrastructure_error(judge: Judge, pool: SandboxPool) -> None:
    tests = StdinTests(cases=(StdinCase(expected="1"),))
    running = asyncio.create_task(judge.judge(JudgeRequest(code="import time; time.sleep(5)", tests=tests)))
    killed = set()
    while not running.done():
        supervisor = pool.supervisor_pid
        if supervisor is not None and supervisor not in killed and any(map(children_of, children_of(supervisor))):
            killed.add(supervisor)  # in the middle of the program
            kill_supervisor(pool)
        await asyncio.sleep(0.02)
    result = await running
    assert result.verdict is V.INFRA_ERROR and not result.verdict.is_about_the_program


ORPHANING = """
import asyncio, sys
from services.common.config.envgateway import SandboxConfig
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
async def main():
    pool = SandboxPool.start_before_threads(SandboxConfig(num_slots=1, tier=sys.argv[1], prewarm_scientific=False))
    code = "import os, time\\nfor _ in range(2):\\n  if os.fork() == 0: os.setsid()\\ntime.sleep(30)"
    running = asyncio.create_task(pool.run(ExecutionRequest(code=code)))
    await asyncio.sleep(0.5)
    print('RUNNING', pool.supervisor_pid, pool.base_dir, *pool.user_ids, flush=True)
    await running
asyncio.run(main())
"""


@pytest.mark.needs("root")  # slot users
@pytest.mark.parametrize("tier", [pytest.param(tier, marks=pytest.mark.needs(f"sandbox tier {tier}")) for tier in "21"])
def test_processes_of_a_killed_gateway_are_swept_by_the_next(tier: str, repository: Path) -> None:
    gateway = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHANING), tier], stdout=subprocess.PIPE, text=True, cwd=repository
    )
    try:
        assert gateway.stdout is not None
        line = next(line for line in gateway.stdout if line.startswith("RUNNING"))
        _, supervisor, base_dir, *words = line.split()
        users = {int(word) for word in words}
        wait_until(lambda: len(processes_of(users)) >= 3, "the program has forked")
        left = processes_of(users)
        for pid in (int(supervisor), gateway.pid):  # at once, so that neither cleans up after the other
            os.kill(pid, signal.SIGKILL)
    finally:
        gateway.kill()
        gateway.wait()
        if gateway.stdout is not None:
            gateway.stdout.close()
    started = SandboxPool.start_before_threads(CONFIG)
    try:
        # these alone: programs of another sandbox may have the users by now
        wait_until(lambda: not any(is_running(pid) for pid in left), "no process is left")
        assert not os.path.exists(base_dir)
        assert processes_of_slots(started) == []
    finally:
        asyncio.run(started.close())


@pytest.mark.needs("sandbox tier 2")  # no other has such processes
async def test_a_slot_whose_first_process_dies_is_infrastructure_and_is_mended(pool: SandboxPool) -> None:
    running = asyncio.create_task(pool.run(ExecutionRequest(code=SLEEP)))
    await until_programs_run(pool)
    for child in children_of(supervisor_of(pool)):
        if os.readlink(f"/proc/{child}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            os.kill(child, signal.SIGKILL)
    assert (await running).status is V.INFRA_ERROR
    await assert_clean(pool)


SLOW = "import time\ntime.sleep(0.6)\n"  # whatever else the machine has to do


async def stand_still(pool: SandboxPool) -> None:
    """Stop the sandbox and this process for longer than a program has, as when their machine or container is paused."""
    await asyncio.sleep(0.3)
    stopped = procfs.descendants([supervisor_of(pool)])
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)  # noqa: ASYNC251 - the event loop is to stand still
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.needs("root")  # to stop programs
@pytest.mark.parametrize("pool", [CONFIG.model_copy(update={"wall_time_s": 1.8})], indirect=True)
async def test_a_time_in_which_the_machine_stood_still_is_no_programs(pool: SandboxPool, judge: Judge) -> None:
    assert (await pool.run(ExecutionRequest(code="print(1)"))).status is V.OK
    one, _ = await asyncio.gather(pool.run(ExecutionRequest(code=f"{SLOW}print(2)")), stand_still(pool))
    assert (one.status, one.stdout) == (V.OK, b"2\n") and one.wall_s < 1.8
    request = JudgeRequest(code=f"{SLOW}print(int(input()) ** 2)", tests=SQUARES)
    several, _ = await asyncio.gather(judge.judge(request), stand_still(pool))
    assert several.verdict is V.OK, several.detail
    late = await pool.run(ExecutionRequest(code=SLEEP))
    assert late.status is V.TIME_LIMIT


async def test_another_slots_directory_is_closed(isolated_pool: SandboxPool) -> None:
    slots = slot_dirs(isolated_pool)
    writer = "open('private', 'w').write('mine')\nimport time; time.sleep(0.7)"
    reader = f"""
import os, time
time.sleep(0.3)
mine = os.getcwd()
for path in {[str(s / "work") for s in slots]}:
    if path != mine:
        for attempt in (lambda: os.listdir(path), lambda: open(path + "/private").read(), lambda: open(path + "/x", "w")):
            try:
                print("open", attempt())
            except (PermissionError, FileNotFoundError):
                print("closed")
"""
    _, result = await asyncio.gather(
        isolated_pool.run(ExecutionRequest(code=writer)), isolated_pool.run(ExecutionRequest(code=reader))
    )
    # at tier 2 every work dir has the same name, and none is there but one's own
    expected = len(slots) - (0 if isolated_pool.tier == "2" else 1)
    assert result.stdout == b"closed\n" * 3 * expected, result


async def test_the_fork_servers_death_is_an_infrastructure_error_and_mends_itself(
    execute: Execute, pool: SandboxPool
) -> None:
    supervisor = supervisor_of(pool)
    running = asyncio.create_task(execute("import time; time.sleep(20)", wall_s=10.0))
    await until_programs_run(pool)
    (fork_server,) = (child for child in children_of(supervisor) if children_of(child))
    os.kill(fork_server, 9)
    result = await running
    assert (result.status, result.detail) == (V.INFRA_ERROR, "the fork server died")
    assert (await execute("print(1)")).stdout == b"1\n"
    assert pool.counts["restarts"] == 0
    await assert_clean(pool)


async def test_a_program_whose_fork_server_dies_at_the_programs_start_dies_as_well(
    execute: Execute, pool: SandboxPool
) -> None:
    # the program has no parent-death signal yet
    for _ in range(5):
        assert (await execute("print(1)")).stdout == b"1\n"
        killed = asyncio.create_task(asyncio.to_thread(kill_fork_server_at_its_next_fork, pool))
        result = await execute("import time; time.sleep(20)", wall_s=10.0)
        await killed
        assert (result.status, result.detail) == (V.INFRA_ERROR, "the fork server died")
        await assert_clean(pool)


async def test_closing_the_pool_leaves_no_process_and_no_file() -> None:
    pool = SandboxPool.start_before_threads(CONFIG)
    base = pool.base_dir
    running = asyncio.create_task(pool.run(ExecutionRequest(code="import os, time\nos.fork()\ntime.sleep(20)")))
    await until_programs_run(pool, at_least=2)
    await pool.close()
    assert (await running).status in (V.INFRA_ERROR, V.CANCELLED)
    assert not os.path.exists(base)
    assert processes_of_slots(pool) == []


@pytest.mark.needs("a user other than root")  # tier 0 would run code as root
async def test_tier_0_runs_when_the_config_says_so() -> None:
    pool = SandboxPool.start_before_threads(CONFIG, tiers=("0",))
    try:
        result = await pool.run(ExecutionRequest(code="print(47*38)"))
        assert (result.status, result.stdout, result.tier) == (V.OK, b"1786\n", "0")
    finally:
        await pool.close()


@pytest.mark.needs("root")
async def test_root_never_runs_code_as_root(pool: SandboxPool) -> None:
    result = await pool.run(ExecutionRequest(code="import os; print(os.getuid() != 0, os.getgroups())"))
    assert result.stdout == b"True []\n"
