"""Programs of good and indifferent will: output, input, exit status, limits."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests import needs
from tests.integration.envgateway.conftest import CONFIG, LONG_S, SLEEP_LONG, Execute, long_programs, shared_pool

S = RunStatus
pytestmark = pytest.mark.asyncio(loop_scope="module")
pool = shared_pool


async def test_a_program_prints_and_the_result_has_its_usage(execute: Execute, pool: SandboxPool) -> None:
    result = await execute("print(47*38)")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (S.OK, 0, b"1786\n", b"")
    assert 0 < result.wall_s < CONFIG.wall_time_s and result.peak_memory_bytes > 1 << 20
    assert result.tier == pool.tier


ECHOED = {
    "x = 3\nx + 4": b"7\n",
    "'a'": b"'a'\n",
    "None": b"",
    "x = 1": b"",
    "print(2)": b"2\n",
    "": b"",
    "from __future__ import annotations\ndef f(x: nowhere): return x\nf(5)": b"5\n",
}


async def test_a_trailing_expression_is_printed_where_that_is_asked_for(execute: Execute) -> None:
    for code, stdout in ECHOED.items():
        result = await execute(code, echo=True)
        assert (result.status, result.stdout) == (S.OK, stdout), code
    assert (await execute("3 + 4")).stdout == b""


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


SCRIPTS = (
    _BUFFERED,
    f"{_BUFFERED}sys.stdout.flush()",
    "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('é')",
    "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')\nprint(1)",
    "import io, sys\nsys.stderr = io.TextIOWrapper(sys.stderr.buffer, 'utf-8')\nprint(1)",
    "import sys\nprint(sys.stdout.buffer.seekable(), sys.stderr.buffer.raw.seekable())",
    "import sys\nprint(1)\nsys.stdout.close()",
    "import sys\nprint(1)\nsys.stdout = None",
    "import sys\nclass Out:\n    write = sys.stdout.write\nsys.stdout = Out()\nprint(1)",
    "import sys\nprint(1, flush=True)\nsys.stdout.detach()",
    "class A:\n    def __del__(self): print(seen)\nseen = 1\na = A()",
    "class A:\n    def __del__(self): print(seen)\na = A()\na.me = a\nseen = 1",
    "import io, sys\nclass A:\n    def __del__(self): print(1)\na = A()\nsys.stdout = io.StringIO()",
    "import atexit\natexit.register(print, 'atexit')\nclass A:\n  def __del__(self): print('del')\na = A()",
    "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "import os\nprint(len(os.path.abspath(__file__)) > 0)",
    "from resource import *\nsetrlimit(RLIMIT_STACK, (1 << 29, getrlimit(RLIMIT_STACK)[1]))",
    *(f"print('kept', flush=True)\n{end}" for end in ("import sys; sys.exit()", "exit(0)", "quit(3)", "raise SystemExit('sorry')",
      "import sys; sys.exit(256)", "import os; os._exit(7)", "import os; os.abort()", "import ctypes; ctypes.string_at(0)", "1 / 0",
      "def f(): f()\nf()", "import nowhere_at_all", "exec('def')")),
    "import sys; print(repr(sys.stdin.read()))",
    "print(input())",
    "print('unread')",
    "open('/dev/stdout', 'w').write(open('/dev/stdin').read())",
    r"import os; os.write(1, b'\xff\x00\x1b[1m\n')",
    "import json, uuid, random, statistics, asyncio, sqlite3, decimal, csv, threading; print(sqlite3.__name__, csv.__name__)",
)  # fmt: skip


async def test_a_program_ends_as_a_script_of_the_interpreter_does(execute: Execute, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    for code in SCRIPTS:
        script.write_text(code, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(script)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        printed, errors = await asyncio.wait_for(process.communicate(b"one\ntwo"), LONG_S)
        result = await execute(code, stdin=b"one\ntwo")
        ended = result.exit_code if result.signal is None else -result.signal
        assert (ended, result.stdout) == (process.returncode, printed), (code, result.stderr)
        assert (result.status is S.OK) is (ended == 0), code
        if ended == 1:  # the program's own error, or what it leaves with
            assert result.stderr.splitlines()[-1:] == errors.splitlines()[-1:], code


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


async def test_a_source_that_is_no_program_is_its_own_error(execute: Execute) -> None:
    for code in ("def", "x = '\0'", "(" * 1_000_000, "print(1)\nreturn 5"):
        result = await execute(code)
        assert (result.status, result.exit_code, result.stdout) == (
            S.COMPILE_ERROR,
            1,
            b"",
        ) and b"Error" in result.stderr
    assert (await execute("print('\ud800')")).status is S.INVALID_REQUEST


async def test_a_large_input_is_read_in_whole_or_not_at_all(execute: Execute) -> None:
    big = b"x" * 50_000_000
    assert (await execute("import sys; print(len(sys.stdin.read()))", stdin=big)).stdout == b"50000000\n"
    assert (await execute("print('unread')", stdin=big)).stdout == b"unread\n"


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
