"""Programs of good and indifferent will: output, input, exit status, limits."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from pathlib import Path

import pytest

from services.common.config.envgateway import SandboxConfig
from services.common.errors import CapacityError
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from services.envgateway.scheduler import Scheduler
from tests import needs
from tests.integration.envgateway.conftest import CONFIG, LONG_S, SLEEP_LONG, Execute, long_programs
from tests.waiting import until

S = RunStatus


async def test_a_program_prints_and_the_result_has_its_usage(execute: Execute, pool: SandboxPool) -> None:
    result = await execute("print(47*38)")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (S.OK, 0, b"1786\n", b"")
    assert 0 < result.wall_s < CONFIG.wall_time_s and result.peak_memory_bytes > 1 << 20
    assert result.tier == pool.tier


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("x = 3\nx + 4", b"7\n"),
        ("'a'", b"'a'\n"),
        ("None", b""),
        ("x = 1", b""),
        ("print(2)", b"2\n"),
        ("", b""),
        ("from __future__ import annotations\ndef f(x: nowhere): return x\nf(5)", b"5\n"),
    ],
)
async def test_echo_prints_a_trailing_expression(execute: Execute, code: str, stdout: bytes) -> None:
    result = await execute(code, echo=True)
    assert (result.status, result.stdout) == (S.OK, stdout)


_FRESH = """
import ctypes, os, signal, sys
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)
print(oct(os.umask(0)), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0), sys.argv, sys.getrecursionlimit(), "solution" in sys.modules)
print([fd for fd in range(64) if fd not in (0, 1, 2, 3, 4, 7) and os.path.exists(f"/proc/self/fd/{fd}")], os.getsid(0) == os.getpid())
print(sorted(name for name in globals() if not name.startswith("__")))
"""


async def test_a_program_finds_a_fresh_process(execute: Execute) -> None:
    result = await execute(_FRESH)
    fresh = ["set() True", "0o77 1 ['<program>'] 1000 False", "[] True", "['ctypes', 'os', 'signal', 'sys']"]
    assert (result.stdout.decode().splitlines(), result.stderr) == (fresh, b"")


async def test_without_echo_a_trailing_expression_is_silent(execute: Execute) -> None:
    assert (await execute("3 + 4")).stdout == b""


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("import sys; sys.exit()", 0, b""),
        ("exit(0)", 0, b""),
        ("quit(3)", 3, b""),
        ("raise SystemExit('sorry')", 1, b"sorry\n"),
        ("import sys; sys.exit(256)", 0, b""),
        ("import os; os._exit(7)", 7, b""),
    ],
)
async def test_exit_status_is_the_interpreters(execute: Execute, code: str, exit_code: int, stderr: bytes) -> None:
    result = await execute(f"print('kept', flush=True)\n{code}")
    expected = S.OK if exit_code == 0 else S.RUNTIME_ERROR
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (expected, exit_code, b"kept\n", stderr)


_BUFFERED = """
import io, os, sys
class Out(io.IOBase):
    def __init__(self): self.buffer = io.BytesIO()
    def write(self, text): self.buffer.write(text.encode())
    def flush(self):
        os.write(1, self.buffer.getvalue())
        self.buffer.truncate(0), self.buffer.seek(0)
sys.stdout = Out()
print(6)
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "stdout"),
    [
        (_BUFFERED, 0, b"6\n"),
        (f"{_BUFFERED}sys.stdout.flush()", 0, b"6\n"),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('é')", 0, "é\n".encode()),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')\nprint(1)", 0, b"1\n"),
        ("import io, sys\nsys.stderr = io.TextIOWrapper(sys.stderr.buffer, 'utf-8')\nprint(1)", 0, b"1\n"),
        ("import sys\nprint(sys.stdout.buffer.seekable(), sys.stderr.buffer.raw.seekable())", 0, b"False False\n"),
        ("import sys\nprint(1)\nsys.stdout.close()", 0, b"1\n"),
        ("import sys\nprint(1)\nsys.stdout = None", 0, b"1\n"),
        ("import sys\nclass Out:\n    write = sys.stdout.write\nsys.stdout = Out()\nprint(1)", 120, b"1\n"),
        ("import sys\nprint(1, flush=True)\nsys.stdout.detach()", 120, b"1\n"),
        ("class A:\n    def __del__(self): print(seen)\nseen = 1\na = A()", 0, b"1\n"),
        ("class A:\n    def __del__(self): print(seen)\na = A()\na.me = a\nseen = 1", 0, b"1\n"),
        ("import io, sys\nclass A:\n    def __del__(self): print(1)\na = A()\nsys.stdout = io.StringIO()", 0, b"1\n"),
        ("import os\nprint(len(os.path.abspath(__file__)) > 0)", 0, b"True\n"),
        ("from resource import *\nsetrlimit(RLIMIT_STACK, (1 << 29, getrlimit(RLIMIT_STACK)[1]))", 0, b""),
    ],
)
async def test_a_program_ends_as_a_script_of_the_interpreter_does(
    execute: Execute, code: str, exit_code: int, stdout: bytes, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(script), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(process.communicate(), LONG_S)
    assert (process.returncode, printed) == (exit_code, stdout)
    result = await execute(code)
    assert (result.exit_code, result.stdout) == (exit_code, stdout), result.stderr


async def test_a_program_may_lift_the_limit_of_its_stack(execute: Execute) -> None:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    result = await execute(f"from resource import *\nsetrlimit(RLIMIT_STACK, (1 << 20, {hard}))\nprint(1)")
    assert (result.exit_code, result.stdout) == (0, b"1\n"), result.stderr


async def test_an_error_shows_the_programs_own_lines_and_numbers(execute: Execute) -> None:
    result = await execute("def f():\n    return 1/0\n\nf()")
    assert (result.status, result.exit_code) == (S.RUNTIME_ERROR, 1)
    text = result.stderr.decode()
    assert "line 2, in f" in text and "return 1/0" in text and text.endswith("ZeroDivisionError: division by zero\n")
    assert "bare" not in text


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("def", S.COMPILE_ERROR),
        ("x = '\0'", S.COMPILE_ERROR),
        ("(" * 1_000_000, S.COMPILE_ERROR),
        ("print(1)\nreturn 5", S.COMPILE_ERROR),
        ("import nowhere_at_all", S.RUNTIME_ERROR),
        ("exec('def')", S.RUNTIME_ERROR),
    ],
)
async def test_a_broken_program_is_its_own_error(execute: Execute, code: str, status: S) -> None:
    result = await execute(code)
    assert (result.status, result.exit_code, result.stdout) == (status, 1, b"")
    assert b"Error" in result.stderr


async def test_unencodable_text_is_an_invalid_request(execute: Execute) -> None:
    assert (await execute("print('\ud800')")).status is S.INVALID_REQUEST


async def test_a_signal_is_reported(execute: Execute) -> None:
    result = await execute("import ctypes; ctypes.string_at(0)")
    assert (result.status, result.exit_code, result.signal) == (S.RUNTIME_ERROR, None, signal.SIGSEGV)
    result = await execute("import os; os.abort()")
    assert (result.status, result.signal) == (S.RUNTIME_ERROR, signal.SIGABRT)


async def test_unlimited_recursion_is_the_programs_error(execute: Execute) -> None:
    result = await execute("def f(): f()\nf()")
    assert result.status is S.RUNTIME_ERROR and b"RecursionError" in result.stderr


async def test_stdin_is_read_in_whole_in_part_and_not_at_all(execute: Execute) -> None:
    big = b"x" * 50_000_000
    assert (await execute("import sys; print(len(sys.stdin.read()))", stdin=big)).stdout == b"50000000\n"
    assert (await execute("print(input())", stdin=b"one\ntwo")).stdout == b"one\n"
    assert (await execute("print('unread')", stdin=big)).stdout == b"unread\n"
    assert (await execute("import sys; print(repr(sys.stdin.read()))")).stdout == b"''\n"


async def test_stdin_and_stdout_have_their_device_names(execute: Execute) -> None:
    code = "open('/dev/stdout', 'w').write(open('/dev/stdin').read())"
    assert (await execute(code, stdin=b"in\n")).stdout == b"in\n"


async def test_bytes_of_output_are_kept_as_they_are(execute: Execute) -> None:
    result = await execute(r"import os; os.write(1, b'\xff\x00\x1b[1m\n')")
    assert (result.status, result.stdout) == (S.OK, b"\xff\x00\x1b[1m\n")


async def test_output_at_exit_is_included(execute: Execute) -> None:
    code = "import atexit\natexit.register(print, 'atexit')\nclass A:\n  def __del__(self): print('del')\na = A()"
    assert (await execute(code)).stdout == b"atexit\ndel\n"


async def test_a_thread_may_end_after_the_program(execute: Execute) -> None:
    code = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    result = await execute(code)
    assert (result.status, result.stdout) == (S.OK, b"late\n")


@pytest.mark.parametrize(
    "module", ["json", "uuid", "random", "statistics", "asyncio", "sqlite3", "decimal", "csv", "threading"]
)
async def test_the_standard_library_is_there(execute: Execute, module: str) -> None:
    result = await execute(f"import {module}; print({module}.__name__)")
    assert (result.status, result.stdout) == (S.OK, f"{module}\n".encode()), result.stderr


async def test_wall_time_is_limited(execute: Execute) -> None:
    result = await execute("import time; print('before', flush=True); time.sleep(60)", wall_s=1.5)
    assert (result.status, result.detail, result.stdout) == (S.TIME_LIMIT, "wall time", b"before\n")
    assert 1.5 <= result.wall_s < CONFIG.wall_time_s


async def test_cpu_time_is_limited_over_all_processes(execute: Execute) -> None:
    # Four processes, half of what a user may have: the kernel still counts the end of the program before.
    code = "import os, time\nend = time.time() + 20\nfor _ in range(2): os.fork()\nwhile time.time() < end: pass"
    result = await execute(code, cpu_s=0.5, wall_s=10.0)
    assert (result.status, result.detail) == (S.TIME_LIMIT, "CPU time"), result.stderr
    assert result.cpu_s >= 0.5


async def test_limits_above_the_configs_are_cut(execute: Execute) -> None:
    assert (await execute("print('x' * 30_000)", output_bytes=1 << 30)).status is S.OUTPUT_LIMIT


async def test_many_callers_share_the_slots_and_all_are_answered(execute: Execute) -> None:
    results = await asyncio.gather(*(execute(f"print({n} * 2)") for n in range(60)))
    assert [int(r.stdout) for r in results] == [n * 2 for n in range(60)]


@long_programs
async def test_a_slow_program_holds_up_no_other_slot(execute: Execute) -> None:
    slow = asyncio.create_task(execute(SLEEP_LONG, wall_s=LONG_S))
    quick = [await execute("print(1)") for _ in range(20)]
    assert not slow.done() and all(r.status is S.OK for r in quick)
    slow.cancel()
    await asyncio.wait([slow])


@long_programs
async def test_cancelling_the_caller_kills_the_program_and_frees_the_slot(execute: Execute, pool: SandboxPool) -> None:
    running = [asyncio.create_task(execute(SLEEP_LONG, wall_s=LONG_S)) for _ in range(2)]
    await until(lambda: pool.gauges["sandbox_busy_slots"] == 2, "both run")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert (await execute("print(1)")).status is S.OK
    await until(lambda: not pool.gauges["sandbox_busy_slots"])


async def test_a_full_queue_says_when_to_come_back() -> None:
    config = SandboxConfig(allow_tier_0=True, num_slots=1, wall_time_s=2.0)
    pool = SandboxPool.start_before_threads(config)
    pool.scheduler = Scheduler(num_slots=1, batch_slots=1, lane_size=1)
    try:

        async def lease(timeout_s: float = 60.0) -> None:
            async with pool.lease(wait_s=timeout_s):
                pass

        async with pool.lease():
            assert pool.gauges["sandbox_busy_slots"] == 1
            waiting = asyncio.create_task(lease())
            await asyncio.sleep(0)
            with pytest.raises(CapacityError) as full:
                await lease()
            assert full.value.retry_after_s is not None and full.value.retry_after_s > 0
            assert not waiting.done()
        await waiting
        async with pool.lease():
            with pytest.raises(CapacityError, match="executions are waiting"):
                await lease(0.2)
            cancelled = asyncio.create_task(lease())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        await lease()
        assert (await pool.run(ExecutionRequest(code="print(4)"))).stdout == b"4\n"
        assert pool.gauges["sandbox_busy_slots"] == pool.gauges["sandbox_queued"] == 0
    finally:
        await pool.close()


async def test_cpp_is_compiled_by_a_recent_standard(pool: SandboxPool) -> None:
    if not pool.has_cpp:
        needs.unmet("C++ compiler", "there is no g++ here")
    source = """#include <algorithm>
#include <iostream>
#include <ranges>
#include <vector>
int main() { std::vector<int> v{3, 1, 2}; std::ranges::sort(v); for (int n : v | std::views::reverse) std::cout << n; }"""
    result = await pool.run(ExecutionRequest(code=source, language="cpp"))
    assert (result.status, result.stdout) == (S.OK, b"321"), result.stderr
