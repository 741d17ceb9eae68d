"""The judge's own promises: per-case results, early stops, cancelling, machinery that dies, profiles, the RPCs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from services.common.pb import environment_pb2, judge_pb2_grpc
from services.common.pb import judge_pb2 as pb
from services.common.rpc.channel import channel
from services.common.rpc.server import Server
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    JudgeRequest,
    JudgeResult,
    Lane,
    StdinCase,
    StdinTests,
    Verdict,
)
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionStatus
from services.envgateway.servicer_judge import JudgeServicer

from .conftest import CONFIG
from .sandbox_state import assert_clean, processes_of_slots

V = Verdict
SQUARES = StdinTests(cases=tuple(StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(4)))
SLEEP = "import time; time.sleep(30)"


@pytest.fixture
def judge(pool: SandboxPool) -> Judge:
    return Judge(pool)


def verdicts(result: JudgeResult) -> list[Verdict]:
    return [case.verdict for case in result.cases]


async def test_every_case_has_its_own_verdict(judge: Judge) -> None:
    code = "n = int(input())\nif n == 1: raise ValueError\nif n == 2:\n    while True: pass\nprint(n * n)"
    result = await judge.judge(JudgeRequest(code=code, tests=SQUARES, limits=ExecutionLimits(wall_s=0.3)))
    assert verdicts(result) == [V.OK, V.RUNTIME_ERROR, V.TIME_LIMIT, V.OK]
    assert (result.verdict, result.num_passed, result.num_cases) == (V.RUNTIME_ERROR, 2, 4)
    assert result.detail.startswith("case 1")


async def test_an_early_stop_ends_at_the_first_failure(judge: Judge) -> None:
    result = await judge.judge(JudgeRequest(code="print(0)", tests=SQUARES, stop_early=True))
    assert verdicts(result) == [V.OK, V.WRONG_ANSWER] and result.num_cases == 4


async def test_a_case_without_an_expected_output_only_has_to_end_well(judge: Judge) -> None:
    tests = StdinTests(cases=(StdinCase(), StdinCase(stdin="x")))
    result = await judge.judge(JudgeRequest(code="if input(): print('any')", tests=tests))
    assert verdicts(result) == [V.RUNTIME_ERROR, V.OK]


async def test_an_answer_longer_than_the_usual_output_is_judged(judge: Judge) -> None:
    tests = StdinTests(cases=(StdinCase(expected="x" * 300_000),))
    assert (await judge.judge(JudgeRequest(code="print('x' * 300_000)", tests=tests))).verdict is V.OK
    assert (await judge.judge(JudgeRequest(code="print('x' * 900_000)", tests=tests))).verdict is V.OUTPUT_LIMIT


async def test_calls_see_plain_data_and_give_it_back(judge: Judge) -> None:
    tests = CallTests(
        entry_point="f",
        cases=(
            CallCase(args=([1, 2], {"a": (1,)}), expected=[[1, 2], {"a": (1,)}, None]),
            CallCase(args=(2**80, b"\xff"), kwargs={"c": {1}}, expected=[2**80, b"\xff", {1}]),
            CallCase(args=(1.5, float("inf")), expected=(1.5, float("inf"), None)),
            CallCase(args=("é\n", True), expected=["é\n", 1, None]),
            CallCase(args=("a", "b"), expected=["a", "c", None]),
        ),
    )
    result = await judge.judge(JudgeRequest(code="def f(a, b, c=None): return [a, b, c]", tests=tests))
    assert verdicts(result) == [V.OK] * 4 + [V.WRONG_ANSWER]
    assert result.detail == "case 4: expected ['a', 'c', None], got ['a', 'b', None]"


async def test_a_call_that_raises_shows_its_own_lines(judge: Judge) -> None:
    tests = CallTests(entry_point="f", cases=(CallCase(args=(0,)),))
    result = await judge.judge(JudgeRequest(code="def f(n):\n    return 1 / n", tests=tests))
    error = result.cases[0].stderr
    assert (
        result.verdict is V.RUNTIME_ERROR
        and "line 2, in f" in error
        and "return 1 / n" in error
        and "bare" not in error
    )


async def test_calls_share_nothing(judge: Judge) -> None:
    tests = CallTests(entry_point="f", cases=(CallCase(args=(1,), expected=[1]), CallCase(args=(2,), expected=[2])))
    code = "seen = []\ndef f(n):\n    seen.append(n)\n    return seen"
    assert (await judge.judge(JudgeRequest(code=code, tests=tests))).verdict is V.OK


NODES = """
class Solution:
    def reverse(self, head: Optional[ListNode]) -> Optional[ListNode]:
        last = None
        while head: head.next, last, head = last, head, head.next
        return last
    def mirror(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root: root.left, root.right = self.mirror(root.right), self.mirror(root.left)
        return root
"""


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("assert is_same_list(Solution().reverse(list_node([1, 2, 3])), list_node([3, 2, 1]))", V.OK),
        ("assert is_same_list(Solution().reverse(list_node([1, 2, 3])), list_node([1, 2, 3]))", V.WRONG_ANSWER),
        ("assert is_same_tree(Solution().mirror(tree_node([1, 2, None, 3])), tree_node([1, None, 2, None, 3]))", V.OK),
        ("x = Solution()\nassert is_same_list(x.reverse(list_node([1, 2])), list_node([2, 1]))", V.OK),
    ],
)
async def test_lists_and_trees_of_nodes_are_data(judge: Judge, test: str, verdict: Verdict) -> None:
    assert (await judge.judge(JudgeRequest(code=NODES, tests=AssertTests(tests=test)))).verdict is verdict


COUNTER = """
class Counter:
    def __init__(self, start): self.value = start
    def add(self, n):
        if n < 0: raise ValueError('negative')
        self.value += n
        return self.value
def make(start): return Counter(start)
"""
COUNTER_TESTS = """
import math
counter = make(5)
assert counter.add(2) == 7
for n in range(3):
    assert counter.add(n) >= 7
assert counter.value == 10
try:
    counter.add(-1)
    assert False, 'no error'
except ValueError as error:
    assert 'negative' in str(error)
assert math.isclose(counter.add(0.5), 10.5)
assert counter.add(1) == 1
"""


async def test_tests_that_have_to_be_run_may_hold_the_programs_objects(judge: Judge) -> None:
    result = await judge.judge(JudgeRequest(code=COUNTER, tests=AssertTests(tests=COUNTER_TESTS)))
    assert verdicts(result) == [V.OK] * 5 + [V.WRONG_ANSWER], result
    assert "case 5" in result.detail


RUN_TESTS = "def check(candidate):\n    values = [1, 2, 3]\n    for n in values:\n        assert candidate(n) == n * n\n    assert candidate(5) == 25\n    assert candidate(values[0]) == 1\n"  # fmt: skip


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return n * n", [V.OK, V.OK, V.OK]),
        ("return n * n if n < 5 else 0", [V.OK, V.WRONG_ANSWER, V.OK]),
        ("return n * n if n < 5 else 1 / 0", [V.OK, V.RUNTIME_ERROR, V.OK]),
        ("\n    while n == 2: pass\n    return n * n", [V.TIME_LIMIT, V.OK, V.OK]),
        ("\n    import os\n    if n == 5: os._exit(0)\n    return n * n", [V.OK, V.WRONG_ANSWER, V.OK]),
        ("\n    import os\n    if n == 5: os.kill(os.getpid(), 9)\n    return n * n", [V.OK, V.RUNTIME_ERROR, V.OK]),
        ("\n    if n == 5: x = bytearray(b'1' * (300 << 20))\n    return n * n", [V.OK, V.MEMORY_LIMIT, V.OK]),
    ],
)
async def test_a_program_that_dies_in_a_test_is_started_again_for_the_next(
    judge: Judge, pool: SandboxPool, body: str, wanted: list[Verdict]
) -> None:
    tests = AssertTests(tests=RUN_TESTS, entry_point="f")
    limits = ExecutionLimits(wall_s=1.0)
    result = await judge.judge(JudgeRequest(code=f"def f(n): {body}", tests=tests, limits=limits))
    assert verdicts(result) == wanted, result
    await assert_clean(pool)


async def test_helpers_come_from_the_preamble_and_not_from_the_program(judge: Judge) -> None:
    """A program that redefines the helper of a round trip gains nothing."""
    preamble = "def encode(text): return text[::-1]\ndef decode(text):\n    pass\n"
    tests = "def check(candidate):\n    for text in ['abc', 'xyz']:\n        assert candidate(encode(text)) == text\n"
    cheat = "def encode(text): return text\ndef decode(text): return text"
    honest = "def decode(text): return text[::-1]"
    request = AssertTests(tests=tests, entry_point="decode", preamble=preamble)
    assert (await judge.judge(JudgeRequest(code=cheat, tests=request))).verdict is V.WRONG_ANSWER
    assert (await judge.judge(JudgeRequest(code=honest, tests=request))).verdict is V.OK


@pytest.mark.parametrize(
    "tests",
    [
        AssertTests(
            tests="def check(candidate):\n    for n in undefined_name:\n        assert candidate(n)", entry_point="f"
        ),
        AssertTests(tests="assert candidate(1) == 1"),
        AssertTests(tests="import nowhere\nfor n in [1]:\n    assert f(n) == 1"),
        AssertTests(tests="x = 1", entry_point="f"),
        AssertTests(tests="", entry_point="f"),
        CallTests(entry_point="f(", cases=(CallCase(),)),
    ],
)
async def test_tests_that_test_nothing_are_never_passed(judge: Judge, tests: AssertTests | CallTests) -> None:
    result = await judge.judge(JudgeRequest(code="def f(*args): return 1", tests=tests))
    assert result.verdict in (V.INVALID_REQUEST, V.WRONG_ANSWER, V.RUNTIME_ERROR), result


async def test_numpy_and_sympy_are_warm_and_draw_their_own_numbers(pool: SandboxPool) -> None:
    pytest.importorskip("numpy")
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


@pytest.mark.skipif(os.getuid() != 0, reason="slot users need root")
@pytest.mark.parametrize("tier", ["2", "1"])
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


# -- the RPCs ---------------------------------------------------------------------------------------------------------


class _Direct:
    """The judge without a queue."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.calls: list[tuple[Lane, float]] = []

    async def run(self, job: JudgeRequest, *, lane: Lane, request_id: str, deadline_s: float) -> JudgeResult:
        self.calls.append((lane, deadline_s))
        return await self._judge.judge(job)


@pytest.fixture
async def stub(judge: Judge) -> AsyncIterator[tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Direct]]:
    direct = _Direct(judge)
    server = Server(service="envgateway", instance_id="test", host="127.0.0.1", port=0, run_id="")
    server.add(judge_pb2_grpc.add_JudgeServiceServicer_to_server, JudgeServicer(direct), "millrace.v1.JudgeService")
    port = await server.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        yield judge_pb2_grpc.JudgeServiceStub(connection), direct
    await server.stop()


def _squares(code: str, **more: object) -> pb.JudgeRequest:
    cases = [pb.StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(3)]
    return pb.JudgeRequest(code=code, stdin_tests=pb.StdinTests(cases=cases), **more)  # type: ignore[arg-type]


async def test_judging_over_grpc(stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Direct], pool: SandboxPool) -> None:
    client, direct = stub
    answer = await client.Judge(_squares("print(int(input()) ** 2)", lane=pb.JUDGE_LANE_INTERACTIVE), timeout=20)
    assert (answer.verdict, answer.num_cases, answer.isolation_tier) == (pb.VERDICT_OK, 3, pool.tier)
    assert answer.cases[2].stdout == "4\n" and answer.cases[2].exit_code == 0 and not answer.cases[2].HasField("signal")
    assert direct.calls[0][0] is Lane.INTERACTIVE and 0 < direct.calls[0][1] <= 20
    call = pb.JudgeRequest(
        code="def f(a, b): return [a, b]",
        call_tests=pb.CallTests(
            entry_point="f", cases=[pb.CallCase(args_json=b"[1]", kwargs_json=b'{"b": 2}', expected_json=json.dumps([1, 2]).encode())]
        ),
    )  # fmt: skip
    assert (await client.Judge(call, timeout=20)).verdict == pb.VERDICT_OK
    asserts = pb.JudgeRequest(code="def f(a): return a", assert_tests=pb.AssertTests(tests="assert f(1) == 2"))
    assert (await client.Judge(asserts, timeout=20)).verdict == pb.VERDICT_WRONG_ANSWER


async def test_repeating_a_request_gives_the_stored_result(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Direct],
) -> None:
    client, direct = stub
    request = _squares("print(1)", request_id="same")
    first, second = await asyncio.gather(client.Judge(request, timeout=20), client.Judge(request, timeout=20))
    assert first == second == await client.Judge(request, timeout=20)
    assert len(direct.calls) == 1


async def test_a_batch_streams_results_as_they_finish(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Direct],
) -> None:
    client, _ = stub
    slow = "import time; time.sleep(1.0); print(int(input()) ** 2)"
    broken = pb.JudgeRequest(code="print(1)", request_id="no tests")
    requests = [_squares(slow, request_id="slow"), _squares("print(int(input()) ** 2)", request_id="quick"), broken]
    arrived = [r async for r in client.JudgeBatch(pb.JudgeBatchRequest(requests=requests), timeout=30)]
    assert [r.request_id for r in arrived][-1] == "slow" and sorted(r.index for r in arrived) == [0, 1, 2]
    by_id = {r.request_id: r.result.verdict for r in arrived}
    assert by_id == {"slow": pb.VERDICT_OK, "quick": pb.VERDICT_OK, "no tests": pb.VERDICT_INVALID_REQUEST}


async def test_a_deadline_and_a_client_that_leaves_end_the_run(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Direct], pool: SandboxPool
) -> None:
    client, _ = stub
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await client.Judge(_squares(SLEEP), timeout=0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    batch = client.JudgeBatch(pb.JudgeBatchRequest(requests=[_squares(SLEEP)] * 4), timeout=30)
    await asyncio.sleep(0.3)
    batch.cancel()
    async with asyncio.timeout(5):
        while pool.gauges["sandbox_busy_slots"] or pool.gauges["sandbox_queued"]:
            await asyncio.sleep(0.01)
    await assert_clean(pool)


async def test_a_limit_that_nothing_keeps_is_refused(
    stub: tuple[judge_pb2_grpc.JudgeServiceAsyncStub, _Direct],
) -> None:
    client, _ = stub
    request = _squares("print(1)", limits=environment_pb2.ExecutionLimits(memory_bytes=0))
    with pytest.raises(grpc.aio.AioRpcError, match="memory_bytes"):
        await client.Judge(request, timeout=20)


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


async def test_a_slot_whose_first_process_dies_is_infrastructure_and_is_mended(pool: SandboxPool) -> None:
    if pool.tier != "2":
        pytest.skip("only tier 2 has such processes")
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
