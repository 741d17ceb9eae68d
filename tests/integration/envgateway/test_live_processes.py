"""Processes that live on between calls. Hostile cells are bounded by themselves as well, in time, processes and bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.config.envgateway import LiveConfig
from services.common.errors import CapacityError
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.live import CellResult, LiveProcess
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG, Execute, shared_pool
from tests.integration.envgateway.sandbox_state import assert_clean
from tests.waiting import accepted, until

S = RunStatus
pytestmark = pytest.mark.asyncio(loop_scope="module")
pool = shared_pool

LIVE = LiveConfig(cell_time_s=10.0, cpu_time_s=20.0, lifetime_s=60.0, memory_bytes=128 << 20, output_bytes=10_000)
HASTY = LIVE.model_copy(update={"cell_time_s": 1.5})
OWN_CHANNEL = "the code wrote to the process's own channel"


@asynccontextmanager
async def live(pool: SandboxPool, config: LiveConfig = LIVE) -> AsyncIterator[LiveProcess]:
    """A process in a place that comes free."""
    process = await accepted(lambda: LiveProcess.start(pool.live, config, ""), CapacityError)
    try:
        yield process
    finally:
        await process.close()


async def clean(pool: SandboxPool) -> None:
    """Assert that nothing of any process is left."""
    await until(lambda: not pool.live.gauges["live_processes"])
    await assert_clean(pool)


async def last_of(pool: SandboxPool, config: LiveConfig, *cells: str) -> tuple[CellResult, CellResult | None]:
    """The last cell's result in a process of its own, and that of ``x`` behind it in a process that lives on."""
    async with live(pool, config) as process:
        for cell in cells:
            result = await process.run(cell)
        assert result.alive == (process.ended is None)
        return result, await process.run("x") if result.alive else None


async def results_of(pool: SandboxPool, config: LiveConfig, *codes: str) -> list[tuple[CellResult, CellResult | None]]:
    """``last_of`` each, behind ``x = 7``, as many at once as there are places."""
    places = asyncio.Semaphore(CONFIG.num_live)

    async def one(code: str) -> tuple[CellResult, CellResult | None]:
        async with places:
            return await last_of(pool, config, "x = 7", code)

    results = await asyncio.gather(*map(one, codes))
    await clean(pool)
    return results


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


async def test_the_state_is_kept_between_cells_and_an_error_shows_its_own_frames(pool: SandboxPool) -> None:
    for cells, printed in KEPT:
        result, after = await last_of(pool, LIVE, *cells)
        assert (result.status, result.stdout) == (S.OK, printed) and after is not None, cells
    for cells, told in RAISED:
        result, after = await last_of(pool, LIVE, *cells)
        assert result.status is S.RUNTIME_ERROR and told in result.stderr and after is not None, cells
        assert b"cells.py" not in result.stderr
    await clean(pool)


BEFORE = "print('before', flush=True)\n"
INTERRUPTED = ("while True: pass", "import time\ntime.sleep(60)", "sum(1 for _ in iter(int, 1))")
KILLED = (
    "import time\nend = time.time() + 30\nwhile time.time() < end:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass",
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nimport time\ntime.sleep(30)",
    "import itertools\nsum(itertools.repeat(1, 10**11))",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
)


async def test_a_cell_that_takes_too_long_is_interrupted_or_else_killed(pool: SandboxPool) -> None:
    for result, after in await results_of(pool, HASTY, *(BEFORE + code for code in INTERRUPTED)):
        assert (result.status, result.stdout) == (S.TIME_LIMIT, b"before\n") and result.wall_s >= 1.5
        assert b"KeyboardInterrupt" in result.stderr and after is not None and after.stdout == b"7\n"
    for result, _ in await results_of(pool, HASTY, *(BEFORE + code for code in KILLED)):
        assert (result.status, result.stdout, result.alive) == (S.TIME_LIMIT, b"before\n", False)


FLOODS = (
    "print('x' * 500_000)",
    "import os\nfor _ in range(500): os.write(1, b'y' * 1000)",
    "import sys\nfor _ in range(5000): print('z' * 99, file=sys.stderr)",
)
ENDLESS = "import os, time\nend = time.time() + 30\nwhile time.time() < end:\n    try:\n        os.write(1, b'x' * 4096)\n    except BaseException:\n        pass"


async def test_a_flood_is_cut_at_the_cap_and_the_state_kept(pool: SandboxPool) -> None:
    for result, after in await results_of(pool, LIVE, *FLOODS):
        assert result.status is S.OUTPUT_LIMIT and len(result.stdout) <= 10_000 and len(result.stderr) <= 10_000
        assert after is not None and after.stdout == b"7\n"  # and nothing of the flood
    [(result, _)] = await results_of(pool, LIVE, ENDLESS)
    assert (result.status, result.alive, len(result.stdout)) == (S.OUTPUT_LIMIT, False, 10_000)


async def test_memory_is_bounded_over_all_cells_and_a_refused_allocation_ends_its_cell_only(pool: SandboxPool) -> None:
    [(result, after)] = await results_of(pool, LIVE, "bytearray(1 << 40)")
    assert (result.status, result.error) == (S.MEMORY_LIMIT, "MemoryError")
    assert after is not None and after.stdout == b"7\n"
    grow = "held = globals().get('held', [])\nheld.append(bytearray(b'x') * (40 << 20))"
    async with live(pool) as process:
        for _ in range(4):
            result = await process.run(grow)
            if not result.alive:
                break
    assert (result.status, result.alive) == (S.MEMORY_LIMIT, False)
    await clean(pool)


FORKS = """
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
print(made)
"""


async def test_a_fork_bomb_is_held_and_no_child_can_answer(pool: SandboxPool) -> None:
    [(result, _)] = await results_of(pool, LIVE, FORKS)
    assert result.status is S.RUNTIME_ERROR or (result.status is S.OK and int(result.stdout) < CONFIG.num_processes + 1)
    async with live(pool) as process:
        result = await process.run("import os\npid = os.fork()\nx = 'child' if pid == 0 else 'parent'\nx")
        again = await process.run("x")
        said = result.stdout + again.stdout  # the child prints at any time until it ends
        assert (result.status, again.status) == (S.OK, S.OK)
        assert said.count(b"'parent'\n") == 2 and said.count(b"'child'\n") <= 1 and b"'parent'\n" in again.stdout
    await clean(pool)


BURNER = "import threading, time\nend = time.time() + 20\ndef burn():\n    while time.time() < end: pass\nthreading.Thread(target=burn, daemon=True).start()"


@pytest.mark.parametrize(
    ("limit", "cell", "detail"), [({"cpu_time_s": 1.0}, BURNER, "CPU time"), ({"lifetime_s": 3.0}, "1", "wall time")]
)
async def test_cpu_time_and_life_count_over_all_cells_and_between_them(
    pool: SandboxPool, limit: dict[str, float], cell: str, detail: str
) -> None:
    async with live(pool, LIVE.model_copy(update=limit)) as process:
        assert (await process.run(cell)).status is S.OK
        await until(lambda: process.ended is not None)
        assert process.ended is not None and (process.ended.status, process.ended.detail) == (S.TIME_LIMIT, detail)
    await clean(pool)


LOST = {
    "import os\nos._exit(0)": "the code ended its process",
    "import os\nos._exit(3)": "the process ended",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": "signal 9",
    "import ctypes\nctypes.string_at(0)": "signal 11",
    "import os\nos.write(6, b'\\0\\0\\0\\2{}')": "own channel",
    "import os\nos.write(6, b'\\0\\0\\0\\4nope')": "own channel",
    "import os\nos.write(6, b'x' * 8000)": "",
}
NEVER_WRITTEN = (
    "'[' * 4000",
    "'{\"a\":' * 800",
    '\'{"cell":2,"outcome":"raised","error":"\\\\ud800"}\'',
    "'{\"cell\":2,\"outcome\":\"raised\",\"error\":' + '[' * 1990 + ']' * 1990 + '}'",
    '\'{"cell":2,"outcome":"raised","error":1}\'',
    '\'{"cell":2,"outcome":"ok"}\'',
    '\'{"cell":2,"outcome":{},"error":""}\'',
    "'{\"cell\":' + '9' * 4050 + '}'",
    "'{\"cell\":1e999}'",
    "'null'",
)
HALF = (r"b'\0'", r"b'\0\0\0\7'", r"b'\0\0\0\7half'", r"b'\0\0\x0f\0'", r"b'\0\0\0'")


async def test_a_cell_that_ends_or_confuses_its_process_loses_it(pool: SandboxPool) -> None:
    for (result, _), detail in zip(
        await results_of(pool, LIVE, *(BEFORE + code for code in LOST)), LOST.values(), strict=True
    ):
        assert not result.alive and result.stdout.startswith(b"before\n") and detail in result.detail
        assert result.status in (S.RUNTIME_ERROR, S.OUTPUT_LIMIT)
    codes = [
        f"import os, time\ntext = {answer}\nos.write(6, len(text).to_bytes(4) + text.encode())\ntime.sleep(9)"
        for answer in NEVER_WRITTEN
    ]
    for (result, _), answer in zip(await results_of(pool, LIVE, *codes), NEVER_WRITTEN, strict=True):
        told = (result.status, result.alive, result.error, result.detail)
        assert told == (S.RUNTIME_ERROR, False, "", OWN_CHANNEL), answer


async def test_half_an_answer_does_not_end_the_time_limit(pool: SandboxPool) -> None:
    codes = [f"import os, time\nos.write(6, {half})\ntime.sleep(30)" for half in HALF]
    *halves, (ended, _) = await results_of(pool, HASTY, *codes, "import os\nos.write(6, b'\\0\\0\\x0f\\0')")
    for result, _ in halves:
        assert not result.alive and result.status in (S.TIME_LIMIT, S.RUNTIME_ERROR) and result.wall_s < 25
    assert not ended.alive and ended.status is S.TIME_LIMIT


@pytest.mark.parametrize("what", [r"b'\0\0\0\0'", r"b'\0\0\0\2{}'", r"b'\xff' * 4"])
async def test_a_process_that_speaks_between_cells_is_ended(pool: SandboxPool, what: str) -> None:
    code = f"import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), os.write(6, {what}))).start()"
    async with live(pool) as process:
        assert (await process.run(code)).status is S.OK
        await until(lambda: process.ended is not None, "its end")
        result = await process.run("print(1)")
        assert (result.alive, result.status, result.detail) == (False, S.RUNTIME_ERROR, OWN_CHANNEL)
    await clean(pool)


async def test_others_files_memory_and_network_are_closed(isolated_pool: SandboxPool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("planted")
    secret.chmod(0o600)
    async with live(isolated_pool) as first, live(isolated_pool) as second:
        where = (await first.run("open('mine', 'w').write('private')\nimport os\nprint(os.getcwd())")).stdout
        directory = where.decode().split("\n")[-2]
        code = f"""
import os, socket
def attempt(function):
    try:
        return function()
    except OSError as error:
        return 'refused'
for function in (
    lambda: open({str(secret)!r}).read(), lambda: open('/etc/shadow').read(), lambda: open('/proc/{os.getpid()}/environ').read(),
    lambda: socket.socket(), lambda: open('/dev/shm/x', 'w'), lambda: os.execv('/bin/true', ['true']),
    lambda: os.kill({os.getpid()}, 0), lambda: open({directory!r} + '/mine').read(),
):
    print(attempt(function))
"""
        assert (await second.run(code)).stdout.decode() == "refused\n" * 8
    await clean(isolated_pool)


async def test_a_full_house_is_an_error_places_come_back_and_programs_have_their_own(
    pool: SandboxPool, execute: Execute
) -> None:
    processes = [await LiveProcess.start(pool.live, LIVE, "") for _ in range(3)]
    results = await asyncio.gather(*(process.run("1 + 1") for process in processes))
    assert {result.stdout for result in results} == {b"2\n"}
    with pytest.raises(CapacityError, match="all 3 live processes") as full:
        await LiveProcess.start(pool.live, LIVE, "")
    assert full.value.retry_after_s
    await processes[0].close()
    await processes[0].close()  # twice is fine, and gives one place back
    await until(lambda: pool.live.gauges["live_processes"] == 2)
    processes[0] = await LiveProcess.start(pool.live, LIVE, "")
    with pytest.raises(CapacityError):
        await LiveProcess.start(pool.live, LIVE, "")
    busy = [asyncio.create_task(process.run("import time\ntime.sleep(9)")) for process in processes]
    await asyncio.gather(*(execute("print(1)") for _ in range(2)))
    assert not any(task.done() for task in busy)
    for task in busy:  # which ends their processes
        task.cancel()
    await asyncio.wait(busy)
    assert all(task.cancelled() for task in busy)
    await clean(pool)


async def test_output_of_a_thread_between_cells_comes_with_the_next(pool: SandboxPool) -> None:
    late = "import threading\ntimer = threading.Timer(0.1, lambda: print('late', flush=True))\ntimer.start()"
    async with live(pool) as process:
        assert (await process.run(late)).stdout == b""
        await asyncio.sleep(0.4)
        assert (await process.run("timer.join()\n1")).stdout == b"late\n1\n"  # joined, as the machine may be busy
