"""Programs of ill will. Each is bounded by itself as well, in time, processes and bytes."""

from __future__ import annotations

import asyncio
import os

import pytest

from services.common.config.envgateway import SandboxConfig
from services.common.errors import SandboxRefusedError
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests.integration.envgateway.conftest import CONFIG, Execute
from tests.integration.envgateway.sandbox_state import (
    assert_clean,
    children_of,
    kill_fork_server_at_its_next_fork,
    kill_supervisor,
    processes_of_slots,
    slot_dirs,
    supervisor_of,
    until_programs_run,
)

S = RunStatus


async def test_the_gateways_environment_and_memory_are_not_visible(
    isolated_pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "planted-" + "secret")
    pool = SandboxPool.start_before_threads(CONFIG)  # started with the canary in our environment
    try:
        code = f"""
import os, gc
print(dict(os.environ))
for path in ("/proc/self/environ", "/proc/{os.getpid()}/environ", "/proc/{os.getpid()}/cmdline", "/proc/1/environ",
             "/proc/{os.getpid()}/mem", "/etc/shadow", "/root/.bash_history"):
    try:
        print(open(path, "rb").read())
    except OSError as error:
        print(path, "refused")
print([o for o in gc.get_objects() if isinstance(o, (bytes, str)) and "another's" in str(o)])
"""
        other = asyncio.create_task(
            pool.run(ExecutionRequest(code='x = "another\'s program"\nimport time; time.sleep(1)'))
        )
        result = await pool.run(ExecutionRequest(code=code))
        await other
    finally:
        await pool.close()
    text = result.stdout.decode()
    assert result.status is S.OK and "secret" not in text and text.count("refused") >= 5
    assert text.splitlines()[-1] == "[]"


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


WORLD_WRITABLE = [
    pytest.param(target, marks=pytest.mark.needs("Landlock"))  # without it tier 1 leaves them writable
    for target in ("/tmp/escaped", "/dev/shm/escaped", "/var/tmp/escaped")
]


@pytest.mark.parametrize("target", ["/escaped", *WORLD_WRITABLE])
async def test_writing_outside_the_work_dir_is_refused(isolated_pool: SandboxPool, target: str) -> None:
    result = await isolated_pool.run(ExecutionRequest(code=f"open({target!r}, 'w').write('x')"))
    assert result.status is S.RUNTIME_ERROR
    assert any(error in result.stderr for error in (b"PermissionError", b"FileNotFoundError", b"Read-only file system"))
    assert not os.path.exists(target)


async def test_a_daemon_dies_with_its_program(execute: Execute, pool: SandboxPool) -> None:
    code = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(30)
        open("late", "w").write("x")
        os._exit(0)
    os._exit(0)
os.wait()
print("parent done", flush=True)
"""
    result = await execute(code)
    # not TIME_LIMIT, although the daemon holds stdout open
    assert (result.status, result.stdout) == (S.OK, b"parent done\n")
    await assert_clean(pool)


async def test_a_fork_bomb_is_held_and_wiped(execute: Execute, pool: SandboxPool) -> None:
    # Bounded by itself as well: six doublings are 64 processes, which end after 30 s.
    code = """
import os, time
refused = 0
for _ in range(6):
    try:
        os.fork()
    except OSError:
        refused += 1
os.write(1, b"x")
if refused:
    os.write(2, b"refused")
time.sleep(30)
"""
    result = await execute(code, wall_s=3.0, cpu_s=10.0)
    assert result.status in (S.TIME_LIMIT, S.RUNTIME_ERROR)
    assert b"refused" in result.stderr or result.detail == "more processes than allowed"
    if pool.tier != "0":  # there the count includes, roughly, the user's other processes
        assert len(result.stdout) <= CONFIG.num_processes
    await assert_clean(pool)


async def test_no_other_program_can_be_started(execute: Execute) -> None:
    result = await execute("import subprocess; print(subprocess.run(['/bin/echo', 'out'], capture_output=True))")
    assert result.status is S.RUNTIME_ERROR and b"PermissionError" in result.stderr


async def test_zombies_are_reaped(execute: Execute, pool: SandboxPool) -> None:
    code = "import os, time\nfor _ in range(5):\n  if os.fork() == 0: os._exit(0)\ntime.sleep(0.2)\nprint('ok')"
    assert (await execute(code)).stdout == b"ok\n"
    await assert_clean(pool)


IGNORING = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
end = time.time() + 20
"""


@pytest.mark.parametrize(
    "code",
    [
        IGNORING + "while time.time() < end: pass",
        IGNORING + "time.sleep(20)",
        "import signal, time\nsignal.alarm(0)\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(20)",
        "import os, time\nos.closerange(0, 4096)\ntime.sleep(20)",
        "pow(3, 10**9)",
        "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
    ],
)
async def test_no_process_outlives_the_wall_limit(execute: Execute, pool: SandboxPool, code: str) -> None:
    result = await execute(code, wall_s=0.5, cpu_s=8.0)
    assert (result.status, result.detail) == (S.TIME_LIMIT, "wall time")
    await assert_clean(pool)


async def test_closing_the_streams_is_no_infrastructure_error(execute: Execute) -> None:
    result = await execute("import os, sys\nos.close(1)\nos.close(2)\nsys.exit(0)")
    assert (result.status, result.exit_code, result.stdout) == (S.OK, 0, b"")
    result = await execute("import sys\nsys.stdout.close()\nsys.stderr.close()")
    assert result.status is S.OK


@pytest.mark.parametrize(
    "attempt", ["os.kill(-1, 9)", "os.kill(os.getppid(), 9)", "os.kill(1, 9)", "os.kill(TESTER, 9)", "os.killpg(0, 9)"]
)
async def test_killing_reaches_no_other_process(execute: Execute, pool: SandboxPool, attempt: str) -> None:
    neighbour = asyncio.create_task(execute("import time; time.sleep(0.6); print('alive')"))
    await asyncio.sleep(0.1)
    result = await execute(f"import os, time\nTESTER = {os.getpid()}\n{attempt}\ntime.sleep(0.2)\nprint('after')")
    assert result.status in (S.RUNTIME_ERROR, S.OK)  # at tier 1 kill(-1) finds nobody but the caller, and spares it
    assert (await neighbour).stdout == b"alive\n"
    assert pool.counts["restarts"] == 0
    await assert_clean(pool)


async def test_limits_and_priorities_cannot_be_raised(execute: Execute) -> None:
    code = """
import os, resource
def attempt(name, function):
    try:
        function(); print(name, "done")
    except (OSError, ValueError):
        print(name, "refused")
attempt("files", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6)))
attempt("fsize", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)))
attempt("cpu", lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("uid", lambda: os.setuid(0) if os.getuid() else (_ for _ in ()).throw(OSError()))
"""
    result = await execute(code)
    assert result.stdout.decode().split("\n")[:-1] == [
        f"{n} refused" for n in ("files", "fsize", "cpu", "nice", "realtime", "uid")
    ]


async def test_the_supervisors_death_is_an_infrastructure_error_and_mends_itself(
    execute: Execute, pool: SandboxPool
) -> None:
    # what the program leaves behind must not survive either: a grandchild has no parent-death signal
    code = "import os, time\nif os.fork() == 0: time.sleep(20)\ntime.sleep(20)"
    running = asyncio.create_task(execute(code, wall_s=10.0))
    await until_programs_run(pool, at_least=2)
    kill_supervisor(pool)
    result = await running
    assert result.status is S.INFRA_ERROR
    assert (await execute("print(1)")).stdout == b"1\n"
    assert pool.counts["restarts"] == 1
    await assert_clean(pool)


async def test_the_fork_servers_death_is_an_infrastructure_error_and_mends_itself(
    execute: Execute, pool: SandboxPool
) -> None:
    supervisor = supervisor_of(pool)
    running = asyncio.create_task(execute("import time; time.sleep(20)", wall_s=10.0))
    await until_programs_run(pool)
    (fork_server,) = (child for child in children_of(supervisor) if children_of(child))
    os.kill(fork_server, 9)
    result = await running
    assert (result.status, result.detail) == (S.INFRA_ERROR, "the fork server died")
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
        assert (result.status, result.detail) == (S.INFRA_ERROR, "the fork server died")
        await assert_clean(pool)


async def test_closing_the_pool_leaves_no_process_and_no_file() -> None:
    pool = SandboxPool.start_before_threads(CONFIG)
    base = pool.base_dir
    running = asyncio.create_task(pool.run(ExecutionRequest(code="import os, time\nos.fork()\ntime.sleep(20)")))
    await until_programs_run(pool, at_least=2)
    await pool.close()
    assert (await running).status in (S.INFRA_ERROR, S.CANCELLED)
    assert not os.path.exists(base)
    assert processes_of_slots(pool) == []


def test_a_refusal_names_the_line_to_add() -> None:
    with pytest.raises(SandboxRefusedError, match=r"envgateway\.sandbox\.allow_tier_0: true"):
        SandboxPool.start_before_threads(SandboxConfig(num_slots=1), tiers=())


@pytest.mark.needs("a user other than root")  # tier 0 would run code as root
async def test_tier_0_runs_when_the_config_says_so() -> None:
    pool = SandboxPool.start_before_threads(CONFIG, tiers=("0",))
    try:
        result = await pool.run(ExecutionRequest(code="print(47*38)"))
        assert (result.status, result.stdout, result.tier) == (S.OK, b"1786\n", "0")
    finally:
        await pool.close()


@pytest.mark.needs("root")
async def test_root_never_runs_code_as_root(pool: SandboxPool) -> None:
    result = await pool.run(ExecutionRequest(code="import os; print(os.getuid() != 0, os.getgroups())"))
    assert result.stdout == b"True []\n"
