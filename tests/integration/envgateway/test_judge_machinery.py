"""What holds when callers leave and machinery dies; fork servers: what is warm in them, and how they are replaced."""

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
from services.envgateway.judge.records import (
    AssertTests,
    JudgeRequest,
    StdinCase,
    StdinTests,
    Verdict,
)
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult, ExecutionStatus

from .conftest import CONFIG
from .sandbox_state import assert_clean, processes_of_slots

V = Verdict
SQUARES = StdinTests(cases=tuple(StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(4)))
SLEEP = "import time; time.sleep(30)"


@pytest.fixture
def judge(pool: SandboxPool) -> Judge:
    return Judge(pool)


async def test_numpy_and_sympy_are_warm_and_draw_their_own_numbers(pool: SandboxPool) -> None:
    code = "import numpy, os, threading\nprint(numpy.random.rand(), threading.active_count())"
    outputs = {(await pool.run(ExecutionRequest(code=code))).stdout for _ in range(3)}
    assert len(outputs) == 3 and all(out.endswith(b" 1\n") for out in outputs)
    result = await pool.run(
        ExecutionRequest(code="from sympy import symbols, integrate\nx = symbols('x')\nprint(integrate(x, x))")
    )
    assert (result.status, result.stdout) == (ExecutionStatus.OK, b"x**2/2\n")
    result = await pool.run(
        ExecutionRequest(code="import numpy, os\nfor _ in range(3):\n  if os.fork() == 0: os._exit(0)\nprint(1)")
    )
    assert result.stdout == b"1\n"  # pages shared with the fork server count once


async def test_other_packages_of_the_gateway_are_not_there(pool: SandboxPool) -> None:
    for name in ("grpc", "pydantic", "services", "pytest"):
        result = await pool.run(ExecutionRequest(code=f"import {name}"))
        assert result.status is ExecutionStatus.RUNTIME_ERROR and b"ModuleNotFoundError" in result.stderr


async def test_cancelling_a_judgement_kills_it_and_frees_the_slot(judge: Judge, pool: SandboxPool) -> None:
    tests = AssertTests(tests="for n in [1]:\n    assert f(n) == 1")
    requests = [
        JudgeRequest(code=SLEEP, tests=SQUARES, limits=ExecutionLimits(wall_s=9.0)),
        JudgeRequest(code="import time\ndef f(n): time.sleep(30)", tests=tests, limits=ExecutionLimits(wall_s=9.0)),
    ]
    started = time.monotonic()
    running = [asyncio.create_task(judge.judge(request)) for request in requests]
    await asyncio.sleep(0.5)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    async with asyncio.timeout(5):
        while pool.gauges["sandbox_busy_slots"]:
            await asyncio.sleep(0.01)
    assert time.monotonic() - started < 6
    await assert_clean(pool)


async def test_a_supervisor_that_dies_costs_a_judgement_nothing(judge: Judge, pool: SandboxPool) -> None:
    """The case is run once more: infrastructure is never the program's fault."""
    assert pool._supervisor is not None
    code = "import time, os\nif os.fork() == 0: time.sleep(20)\ntime.sleep(0.5)\nprint(1)"
    tests = StdinTests(cases=(StdinCase(expected="1"),))
    running = asyncio.create_task(judge.judge(JudgeRequest(code=code, tests=tests)))
    await asyncio.sleep(0.2)
    pool._supervisor.process.kill()
    assert (await running).verdict is V.OK
    assert pool.counts["restarts"] == 1
    await assert_clean(pool)


async def test_machinery_that_keeps_dying_is_an_infrastructure_error(judge: Judge, pool: SandboxPool) -> None:
    tests = StdinTests(cases=(StdinCase(expected="1"),))
    running = asyncio.create_task(judge.judge(JudgeRequest(code="import time; time.sleep(5)", tests=tests)))
    killed = 0
    while not running.done():
        supervisor = pool._supervisor
        if supervisor is not None and supervisor.process.poll() is None and pool.counts["restarts"] == killed:
            await asyncio.sleep(0.3)
            supervisor.process.kill()
            killed += 1
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
    print('RUNNING', pool._supervisor.process.pid, pool._launcher._base_dir, *pool._launcher._users.uids, flush=True)
    await running
asyncio.run(main())
"""


@pytest.mark.needs("root")  # slot users
@pytest.mark.parametrize("tier", [pytest.param(tier, marks=pytest.mark.needs(f"sandbox tier {tier}")) for tier in "21"])
def test_what_a_killed_gateway_leaves_is_swept_by_the_next(tier: str, repository: Path) -> None:
    gateway = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHANING), tier], stdout=subprocess.PIPE, text=True, cwd=repository
    )
    try:
        assert gateway.stdout is not None
        line = next(line for line in gateway.stdout if line.startswith("RUNNING"))
        _, supervisor, base_dir, *uids = line.split()
        for pid in (int(supervisor), gateway.pid):  # at once, so that neither cleans up after the other
            os.kill(pid, signal.SIGKILL)
    finally:
        gateway.kill()
        gateway.wait()
        if gateway.stdout is not None:
            gateway.stdout.close()
    started = SandboxPool.start_before_threads(CONFIG)
    try:
        end = time.monotonic() + 5
        while (left := _alive_of(uids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == []
        assert not os.path.exists(base_dir)
        assert processes_of_slots(started) == []
    finally:
        asyncio.run(started.close())


def _alive_of(uids: list[str]) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            if "State:\tZ" not in status and status.split("Uid:")[1].split()[0] in uids:
                found.append(entry.name)
    return found


async def test_fork_servers_are_replaced_without_anybody_noticing() -> None:
    pool = SandboxPool.start_before_threads(CONFIG.model_copy(update={"fork_server_runs": 4}))
    try:
        assert pool._supervisor is not None
        before = _children(pool._supervisor.process.pid)
        running = asyncio.create_task(pool.run(ExecutionRequest(code="import time; time.sleep(0.5); print('slow')")))
        results = [await pool.run(ExecutionRequest(code="print(1)")) for _ in range(20)]
        assert {r.stdout for r in results} == {b"1\n"} and (await running).stdout == b"slow\n"
        assert pool.counts["infra_error".upper()] == 0
        after = _children(pool._supervisor.process.pid)
        assert len(after) <= len(before) + 2 and after != before  # at tier 2 the slots' rooms are there as well
    finally:
        await pool.close()


def _children(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.needs("sandbox tier 2")  # no other has such processes
async def test_a_slot_whose_first_process_dies_is_infrastructure_and_is_mended(pool: SandboxPool) -> None:
    assert pool._supervisor is not None
    running = asyncio.create_task(pool.run(ExecutionRequest(code=SLEEP)))
    await asyncio.sleep(0.3)
    supervisor = pool._supervisor.process.pid
    for child in _children(supervisor):
        if os.readlink(f"/proc/{child}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            os.kill(int(child), signal.SIGKILL)
    assert (await running).status is ExecutionStatus.INFRA_ERROR
    await assert_clean(pool)


def test_a_dead_gateways_directory_of_any_depth_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "millrace-sandbox-4194304-dead"  # above the largest pid
    left.mkdir()
    top = os.open(left, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=top)
        inner = os.open("d", os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = inner
    os.close(top)
    started = SandboxPool.start_before_threads(CONFIG)
    asyncio.run(started.close())
    assert list(tmp_path.iterdir()) == []


CPP = '#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * n << "\\n"; }'


@pytest.mark.needs("C++ compiler")
async def test_cpp_is_compiled_once_and_run_for_each_case(pool: SandboxPool, judge: Judge) -> None:
    result = await pool.run(ExecutionRequest(code=CPP, language="cpp", stdin=b"7"))
    assert (result.status, result.stdout) == (ExecutionStatus.OK, b"49\n")
    before = sum(pool.counts.values())
    assert (await judge.judge(JudgeRequest(code=CPP, language="cpp", tests=SQUARES))).num_passed == 4
    assert sum(pool.counts.values()) - before == 5


async def test_without_a_compiler_cpp_is_an_invalid_request(pool: SandboxPool, judge: Judge) -> None:
    pool._has_cpp = False
    result = await pool.run(ExecutionRequest(code=CPP, language="cpp"))
    assert result.status is ExecutionStatus.INVALID_REQUEST and "no C++ compiler" in result.detail
    judged = await judge.judge(JudgeRequest(code=CPP, language="cpp", tests=SQUARES))
    assert judged.verdict is V.INVALID_REQUEST and "no C++ compiler" in judged.detail
    other = await judge.judge(JudgeRequest(code="x", language="rust", tests=SQUARES))
    assert other.verdict is V.INVALID_REQUEST and "rust" in other.detail


async def test_programs_that_are_sent_ahead_wait_for_a_slot_and_leave_one_to_the_urgent(pool: SandboxPool) -> None:
    def sent(code: str, patient: bool) -> asyncio.Task[ExecutionResult]:
        return asyncio.create_task(pool.run(ExecutionRequest(code=code), patient=patient, ahead=True))

    slow, waiting, cancelled = (sent(f"import time; time.sleep({s})", patient=True) for s in (1.5, 0, 0))
    await asyncio.sleep(0.1)
    assert (await sent("print(1)", patient=False)).stdout == b"1\n"
    assert not slow.done() and not waiting.done()  # two slots: the second is not for the patient
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    assert [(await task).status for task in (slow, waiting)] == [ExecutionStatus.OK] * 2
    assert (await waiting).wall_s < 1.4  # its time runs from the fork, not from the sending
    assert pool.gauges["sandbox_busy_slots"] == 0 and pool.gauges["sandbox_cancelled"] == 1


async def test_judgements_of_the_batch_lane_leave_a_slot_to_the_interactive(pool: SandboxPool) -> None:
    case = StdinTests(cases=(StdinCase(stdin="", expected="1"),))
    slow = JudgeRequest(code="import time; time.sleep(1.2); print(1)", tests=case)
    batch = [asyncio.create_task(Judge(pool).judge(slow)) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert (await pool.run(ExecutionRequest(code="print(2)"))).stdout == b"2\n"
    assert not any(task.done() for task in batch)
    assert [result.verdict for result in await asyncio.gather(*batch)] == [Verdict.OK] * 2
