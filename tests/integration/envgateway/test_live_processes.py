"""Processes that live on between calls. Hostile cells are bounded by themselves as well, in time, processes and bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.common.config.envgateway import LiveConfig
from services.common.errors import CapacityError
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.live import CellResult, LiveProcess
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG
from tests.integration.envgateway.sandbox_state import assert_clean, kill_supervisor
from tests.waiting import until

S = RunStatus
Run = Callable[[str], Awaitable[CellResult]]

LIVE = LiveConfig(cell_time_s=10.0, cpu_time_s=20.0, lifetime_s=60.0, memory_bytes=128 << 20, output_bytes=10_000)


def _short(**changes: float) -> LiveConfig:
    return LIVE.model_copy(update=changes)


@pytest.fixture
async def process(pool: SandboxPool) -> AsyncIterator[LiveProcess]:
    """A live process; its place and processes are gone afterwards."""
    started = await LiveProcess.start(pool.live, LIVE, "")
    yield started
    await started.close()
    await _gone(pool)
    await assert_clean(pool)


@pytest.fixture
async def hasty(pool: SandboxPool) -> AsyncIterator[LiveProcess]:
    """A process with little time for its cells."""
    started = await LiveProcess.start(pool.live, _short(cell_time_s=1.5), "")
    yield started
    await started.close()
    await _gone(pool)
    await assert_clean(pool)


async def _gone(pool: SandboxPool) -> None:
    await until(lambda: not pool.live.gauges["live_processes"])


async def _cells(process: LiveProcess, *codes: str) -> CellResult:
    """The last one's result."""
    for code in codes:
        result = await process.run(code)
    return result


KEPT = [
    (["x = 41", "x + 1"], b"42\n"),
    (["import math\ndef f(n):\n    return math.factorial(n)", "print(f(5))\nf(4)"], b"120\n24\n"),
    (["class A:\n    b = 1", "A.b", "_ + 1"], b"2\n"),
    (["open('f', 'w').write('kept')", "open('f').read()"], b"'kept'\n"),
    (["1/0", "x", "'still here'"], b"'still here'\n"),
    (["x = 5\nimport sys\nsys.exit()", "x"], b"5\n"),
    (["from __future__ import annotations\nx: undefined = 1", "x"], b"1\n"),
    (["None", "pass", ""], b""),
    (["import sys\nsys.stdout.write('no newline')"], b"no newline10\n"),
    (["import os\nos.write(1, b'raw ')\nprint('text')"], b"raw text\n"),
    (["a = [", "a = [1]\na"], b"[1]\n"),
    (["__name__"], b"'__main__'\n"),
    (["s = 'é\\ud83d\\ude00'\nlen(s)", "'é'"], "'é'\n".encode()),
]
RAISED = [
    (["def f():\n    return 1 / 0", "f()"], b'File "<cell 1>", line 2, in f\n    return 1 / 0'),
    (["x ="], b"SyntaxError"),
    (["return 1"], b"'return' outside function"),
    (["input()"], b"EOFError"),
    (["import sys\nsys.exit('told')"], b"told"),
    (["raise KeyboardInterrupt"], b"KeyboardInterrupt"),
    (["def f(): f()\nf()"], b"RecursionError"),
    (["!pip install x"], b"SyntaxError"),
    (["import torch"], b"ModuleNotFoundError"),
]


async def _fresh(pool: SandboxPool, *cells: str) -> CellResult:
    """The last cell's result, in a process of its own."""
    process = await LiveProcess.start(pool.live, LIVE, "")
    result = await _cells(process, *cells)
    assert result.alive and (await process.run("'goes on'")).stdout == b"'goes on'\n", cells
    await process.close()
    await _gone(pool)
    return result


async def test_the_state_is_kept_between_cells(pool: SandboxPool) -> None:
    for cells, printed in KEPT:
        result = await _fresh(pool, *cells)
        assert (result.status, result.stdout) == (S.OK, printed), cells
    await assert_clean(pool)


async def test_a_cell_that_raises_shows_its_traceback_without_our_frames(pool: SandboxPool) -> None:
    for cells, told in RAISED:
        result = await _fresh(pool, *cells)
        assert result.status is S.RUNTIME_ERROR and told in result.stderr, cells
        assert b"cells.py" not in result.stderr
    await assert_clean(pool)


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(60)", "sum(1 for _ in iter(int, 1))"])
async def test_a_cell_that_takes_too_long_is_interrupted_and_the_state_kept(hasty: LiveProcess, code: str) -> None:
    result = await _cells(hasty, "x = 7", f"print('before', flush=True)\n{code}")
    assert (result.status, result.stdout, result.alive) == (S.TIME_LIMIT, b"before\n", True)
    assert b"KeyboardInterrupt" in result.stderr and result.wall_s >= 1.5
    assert (await hasty.run("x")).stdout == b"7\n"


IGNORING = "import time\nend = time.time() + 30\nwhile time.time() < end:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"
BLOCKING = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nimport time\ntime.sleep(30)"
IN_C = "import itertools\nsum(itertools.repeat(1, 10**11))"
STOPPED = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("code", [IGNORING, BLOCKING, IN_C, STOPPED])
async def test_a_cell_that_cannot_be_interrupted_is_killed(hasty: LiveProcess, code: str) -> None:
    result = await hasty.run(f"print('before', flush=True)\n{code}")
    assert (result.status, result.stdout, result.alive) == (S.TIME_LIMIT, b"before\n", False)
    assert hasty.ended is not None


@pytest.mark.parametrize(
    "code",
    [
        "print('x' * 500_000)",
        "import os\nfor _ in range(500): os.write(1, b'y' * 1000)",
        "import sys\nfor _ in range(5000): print('z' * 99, file=sys.stderr)",
    ],
)
async def test_a_flood_is_cut_at_the_cap_and_the_state_kept(process: LiveProcess, code: str) -> None:
    result = await _cells(process, "x = 3", code)
    assert (result.status, result.alive) == (S.OUTPUT_LIMIT, True)
    assert len(result.stdout) <= 10_000 and len(result.stderr) <= 10_000
    assert (await process.run("x")).stdout == b"3\n"  # and nothing of the flood


async def test_a_flood_without_end_is_bounded(process: LiveProcess) -> None:
    code = "import os, time\nend = time.time() + 30\nwhile time.time() < end:\n    try:\n        os.write(1, b'x' * 4096)\n    except BaseException:\n        pass"
    result = await process.run(code)
    assert (result.status, result.alive, len(result.stdout)) == (S.OUTPUT_LIMIT, False, 10_000)


async def test_memory_is_bounded_over_all_cells(process: LiveProcess) -> None:
    grow = "held = globals().get('held', [])\nheld.append(bytearray(b'x') * (40 << 20))"
    for _ in range(4):
        result = await process.run(grow)
        if not result.alive:
            break
    assert (result.status, result.alive) == (S.MEMORY_LIMIT, False)


async def test_an_allocation_that_is_refused_ends_the_cell_only(process: LiveProcess) -> None:
    result = await _cells(process, "x = 1", "bytearray(1 << 40)")
    assert (result.status, result.alive, result.error) == (S.MEMORY_LIMIT, True, "MemoryError")
    assert (await process.run("x")).stdout == b"1\n"


async def test_a_fork_bomb_is_held(process: LiveProcess) -> None:
    code = """
import os, time
end = time.time() + 5
made = 0
for _ in range(200):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        while time.time() < end:
            time.sleep(0.05)
        os._exit(0)
    made += 1
"""
    result = await process.run(f"{code}\nprint(made)")
    assert result.status in (S.OK, S.RUNTIME_ERROR)
    if result.status is S.OK:
        assert int(result.stdout) < CONFIG.num_processes + 1


async def test_a_forked_child_cannot_answer(process: LiveProcess) -> None:
    result = await process.run("import os\npid = os.fork()\nx = 'child' if pid == 0 else 'parent'\nx")
    again = await process.run("x")
    said = result.stdout + again.stdout  # the child prints at any time until it ends
    assert (result.status, again.status) == (S.OK, S.OK)
    assert said.count(b"'parent'\n") == 2 and said.count(b"'child'\n") <= 1 and b"'parent'\n" in again.stdout


async def test_cpu_time_counts_over_all_cells_and_between_them(pool: SandboxPool) -> None:
    process = await LiveProcess.start(pool.live, _short(cpu_time_s=1.0), "")
    burner = "import threading, time\nend = time.time() + 20\ndef burn():\n    while time.time() < end: pass\nthreading.Thread(target=burn, daemon=True).start()"
    assert (await process.run(burner)).status is S.OK
    await until(lambda: process.ended is not None)
    assert process.ended.status is S.TIME_LIMIT and process.ended.detail == "CPU time"
    await process.close()
    await _gone(pool)
    await assert_clean(pool)


async def test_its_life_is_bounded(pool: SandboxPool) -> None:
    process = await LiveProcess.start(pool.live, _short(lifetime_s=3.0), "")
    assert (await process.run("1")).status is S.OK
    await until(lambda: process.ended is not None)
    assert process.ended.status is S.TIME_LIMIT
    await process.close()
    await _gone(pool)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import os\nos._exit(0)", "the code ended its process"),
        ("import os\nos._exit(3)", "the process ended"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("import ctypes\nctypes.string_at(0)", "signal 11"),
        ("import os\nos.write(6, b'\\0\\0\\0\\2{}')", "own channel"),
        ("import os\nos.write(6, b'\\0\\0\\0\\4nope')", "own channel"),
        ("import os\nos.write(6, b'x' * 8000)", ""),
    ],
)
async def test_a_cell_that_ends_or_confuses_its_process_loses_it(process: LiveProcess, code: str, detail: str) -> None:
    result = await process.run(f"print('before', flush=True)\n{code}")
    assert not result.alive and result.stdout.startswith(b"before\n") and detail in result.detail
    assert result.status in (S.RUNTIME_ERROR, S.OUTPUT_LIMIT)


@pytest.mark.parametrize(
    "answer",
    [
        "'[' * 4000",
        "'{\"a\":' * 800",
        '\'{"cell":1,"outcome":"raised","error":"\\\\ud800"}\'',
        "'{\"cell\":1,\"outcome\":\"raised\",\"error\":' + '[' * 1990 + ']' * 1990 + '}'",
        '\'{"cell":1,"outcome":"raised","error":1}\'',
        '\'{"cell":1,"outcome":"ok"}\'',
        '\'{"cell":1,"outcome":{},"error":""}\'',
        "'{\"cell\":' + '9' * 4050 + '}'",
        "'{\"cell\":1e999}'",
        "'null'",
    ],
)
async def test_an_answer_that_the_harness_never_writes_is_the_codes_error(process: LiveProcess, answer: str) -> None:
    result = await process.run(
        f"import os, time\ntext = {answer}\nos.write(6, len(text).to_bytes(4) + text.encode())\ntime.sleep(9)"
    )
    assert (result.status, result.alive, result.error) == (S.RUNTIME_ERROR, False, "")
    assert result.detail == "the code wrote to the process's own channel"


@pytest.mark.parametrize("code", [r"b'\0'", r"b'\0\0\0\7'", r"b'\0\0\0\7half'", r"b'\0\0\x0f\0'", r"b'\0\0\0'"])
async def test_half_an_answer_does_not_end_the_time_limit(hasty: LiveProcess, code: str) -> None:
    result = await hasty.run(f"import os, time\nos.write(6, {code})\ntime.sleep(30)")
    assert not result.alive and result.status in (S.TIME_LIMIT, S.RUNTIME_ERROR)
    assert result.wall_s < 25


async def test_half_an_answer_of_a_cell_that_ends_is_its_own_error(hasty: LiveProcess) -> None:
    result = await hasty.run("import os\nos.write(6, b'\\0\\0\\x0f\\0')")
    assert not result.alive and result.status is S.TIME_LIMIT


@pytest.mark.parametrize("what", [r"b'\0\0\0\0'", r"b'\0\0\0\2{}'", r"b'\xff' * 4"])
async def test_a_process_that_speaks_between_cells_is_ended(process: LiveProcess, what: str) -> None:
    code = f"import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), os.write(6, {what}))).start()"
    assert (await process.run(code)).status is S.OK
    await until(lambda: process.ended is not None, "its end")
    result = await process.run("print(1)")
    assert not result.alive and (result.status, result.detail) == (
        S.RUNTIME_ERROR,
        "the code wrote to the process's own channel",
    )


async def test_others_files_memory_and_network_are_closed(isolated_pool: SandboxPool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("planted")
    secret.chmod(0o600)
    first, second = [await LiveProcess.start(isolated_pool.live, LIVE, "") for _ in range(2)]
    where = (await first.run("open('mine', 'w').write('private')\nimport os\nprint(os.getcwd())")).stdout
    directory = where.decode().split("\n")[-2]
    code = f"""
import os, socket
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return 'refused'
print(attempt(lambda: open({str(secret)!r}).read()))
print(attempt(lambda: open('/etc/shadow').read()))
print(attempt(lambda: open('/proc/{os.getpid()}/environ').read()))
print(attempt(lambda: socket.socket()))
print(attempt(lambda: open('/dev/shm/x', 'w')))
print(attempt(lambda: os.execv('/bin/true', ['true'])))
print(attempt(lambda: os.kill({os.getpid()}, 0)))
print(attempt(lambda: open({directory!r} + '/mine').read()))
"""
    seen = (await second.run(code)).stdout.decode().split("\n")
    assert seen[:8] == ["refused"] * 8, seen
    for process in (first, second):
        await process.close()
    await _gone(isolated_pool)
    await assert_clean(isolated_pool)


async def test_a_full_house_is_an_error_and_places_come_back(pool: SandboxPool) -> None:
    processes = [await LiveProcess.start(pool.live, LIVE, "") for _ in range(3)]
    results = await asyncio.gather(*(process.run("1 + 1") for process in processes))
    assert {result.stdout for result in results} == {b"2\n"}
    with pytest.raises(CapacityError, match="all 3 live processes") as full:
        await LiveProcess.start(pool.live, LIVE, "")
    assert full.value.retry_after_s
    await processes[0].close()
    await processes[0].close()  # twice is fine, and gives one place back
    await until(lambda: pool.live.gauges["live_processes"] == 2)
    another = await LiveProcess.start(pool.live, LIVE, "")
    assert (await another.run("'fresh'")).status is S.OK
    with pytest.raises(CapacityError):
        await LiveProcess.start(pool.live, LIVE, "")
    for process in [*processes, another]:
        await process.close()
    await _gone(pool)
    await assert_clean(pool)


async def test_live_processes_take_no_slot_from_programs(
    pool: SandboxPool, execute: Callable[..., Awaitable[object]]
) -> None:
    processes = [await LiveProcess.start(pool.live, _short(cell_time_s=45.0), "") for _ in range(3)]
    busy = [asyncio.create_task(process.run("import time\ntime.sleep(40)")) for process in processes]
    await asyncio.gather(*(execute("print(1)") for _ in range(2)))
    assert not any(task.done() for task in busy)
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)
    for process in processes:
        await process.close()
    await _gone(pool)


async def test_cancelling_a_cell_ends_its_process(pool: SandboxPool) -> None:
    process = await LiveProcess.start(pool.live, LIVE, "")
    cell = asyncio.create_task(process.run("import time\ntime.sleep(30)"))
    await asyncio.sleep(0.3)
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    await _gone(pool)
    await assert_clean(pool)


async def test_a_supervisor_that_dies_is_no_fault_of_the_cell(pool: SandboxPool) -> None:
    process = await LiveProcess.start(pool.live, LIVE, "")
    cell = asyncio.create_task(process.run("import time\ntime.sleep(30)"))
    await asyncio.sleep(0.3)
    kill_supervisor(pool)
    result = await cell
    assert (result.status, result.alive) == (S.INFRA_ERROR, False)
    await process.close()
    await _gone(pool)
    again = await LiveProcess.start(pool.live, LIVE, "")
    assert (await again.run("1")).stdout == b"1\n"
    await again.close()
    await _gone(pool)


async def test_output_of_a_thread_between_cells_comes_with_the_next(process: LiveProcess) -> None:
    late = "import threading\ntimer = threading.Timer(0.1, lambda: print('late', flush=True))\ntimer.start()"
    assert (await process.run(late)).stdout == b""
    await asyncio.sleep(0.4)
    assert (await process.run("timer.join()\n1")).stdout == b"late\n1\n"  # joined, as the machine may be busy
