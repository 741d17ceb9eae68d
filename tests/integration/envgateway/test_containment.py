"""A program is at fault for effects of its bytes, memory and files: no other try, no message to the next program, at
every tier."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from services.common.errors import SandboxRefusedError
from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, JudgeRequest, JudgeResult, StdinCase, StdinTests
from services.envgateway.rewards.registry import CodeReward
from services.envgateway.sandbox import launch
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.bare.statuses import RunStatus as S
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest
from tests import needs
from tests.integration.envgateway.cases.containment import CASES
from tests.integration.envgateway.cases.model import CONFIG, HONEST, Bad, World, open_world
from tests.integration.envgateway.sandbox_state import assert_clean

pytestmark = pytest.mark.asyncio(loop_scope="module")

# U and 0 are for other users than root, who has 2 and 1
_TIERS = ["2", "1"] if os.getuid() == 0 else ["U", "0"]
_QUICK = {
    "tests-garbage", "tests-half-a-frame", "tests-nested", "call-nested", "call-wrong-tags", "tests-closed", "tests-killed",
    "tests-a-child-writes", "read-by-name", "read", "says-failed", "shut", "memfd", "secret", "named", "system-v",
    "beside-the-work-dir", "the-gateway", "locks", "watches", "huge-pages-in-pipes", "first-thread-ends",
}  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=_TIERS)
async def pool(request: pytest.FixtureRequest, world: World) -> AsyncIterator[SandboxPool]:
    """One slot for programs, so that the next program is where the last one was."""
    tier = request.param
    config = CONFIG.model_copy(update={"tier": tier, "allow_tier_0": True, "num_slots": 1})
    try:
        started = SandboxPool.start_before_threads(config)
    except SandboxRefusedError as refusal:
        needs.unmet(f"sandbox tier {tier}", refusal.message)
    yield started
    await started.close()


async def _gets_its_verdict(pool: SandboxPool, world: World, case: Bad) -> None:
    limits = [resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE), os.sched_getaffinity(0)]
    result = await Judge(pool).judge(case.request_in(world))
    assert case.wrong(result) == ""
    assert (await Judge(pool).judge(HONEST)).verdict is RunStatus.OK
    assert pool.counts["restarts"] == 0
    assert [resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE), os.sched_getaffinity(0)] == limits


@pytest.mark.parametrize("case", [c for c in CASES if c.name in _QUICK], ids=str)
async def test_a_program_is_at_fault_for_its_effects(pool: SandboxPool, world: World, case: Bad) -> None:
    await _gets_its_verdict(pool, world, case)


@pytest.mark.slow
@pytest.mark.parametrize("pool", _TIERS[-1:], indirect=True)  # benchmarks/judge_hostile.py has all at every tier
@pytest.mark.parametrize("case", [c for c in CASES if c.name not in _QUICK], ids=str)
async def test_a_program_is_at_fault_for_any_effect(pool: SandboxPool, world: World, case: Bad) -> None:
    await _gets_its_verdict(pool, world, case)


_CHANNELS = {
    "file-beside": ("open('../leak', 'w').write('7')", "open('../leak').read() == '7'"),
    "file-beside-in-a-folder": ("os.makedirs('../a/b'); open('../a/b/c', 'w').write('7')", "os.path.exists('../a/b/c')"),
    "other-work-dir": ("os.rename('../work', '../old'); os.mkdir('../work')", "os.path.exists('../old')"),
    "in-the-way": ("[os.makedirs(f'../.old-{i}/x') for i in range(9)]", "len(os.listdir('..')) > 1"),
    "times": ("os.utime('.', (7, 7))", "os.stat('.').st_mtime == 7"),
    "mode": ("fd = os.open('.', 0); os.fchmod(fd, 0o1707)", "os.stat('.').st_mode & 0o7777 == 0o1707"),
    "attribute": ("os.setxattr(os.open('.', 0), 'user.x', b'7')", "os.getxattr('.', 'user.x') == b'7'"),
    "attribute-above": ("os.setxattr(os.open('..', 0), 'user.x', b'7')", "os.getxattr('..', 'user.x') == b'7'"),
    "mode-above": ("os.fchmod(os.open('..', 0), 0o777)", "os.stat('..').st_mode & 0o777 == 0o777"),
    "tmp": ("open('/tmp/rollmill-leak', 'w').write('7')", "os.path.exists('/tmp/rollmill-leak')"),
    "var-tmp": ("open('/var/tmp/rollmill-leak', 'w').write('7')", "os.path.exists('/var/tmp/rollmill-leak')"),
    "shared-memory": ("open('/dev/shm/rollmill-leak', 'w').write('7')", "os.path.exists('/dev/shm/rollmill-leak')"),
    "system-v": ("assert libc.shmget(7777, 4096, 0o1666) >= 0", "libc.shmget(7777, 4096, 0) >= 0"),
    "signal-of-stdin": ("fcntl.fcntl(0, 10, 42)", "fcntl.fcntl(0, 11) == 42"),
    "owner-of-stdin": ("fcntl.fcntl(0, 8, os.getpid())", "fcntl.fcntl(0, 9) != 0"),
    "flags-of-stdin": ("fcntl.fcntl(0, 4, 0o6000)", "fcntl.fcntl(0, 3) & 0o6000 != 0"),
    "signal-of-the-fork-servers": ("[fcntl.fcntl(fd, 10, 42) for fd in (3, 7)]", "fcntl.fcntl(3, 11) == 42"),
    "flags-of-the-fork-servers": ("[fcntl.fcntl(fd, 4, 0o4000) for fd in (3, 7)]", "fcntl.fcntl(7, 3) & 0o4000 != 0"),
    "place-in-the-fork-servers": ("[os.lseek(fd, 7, 0) for fd in (3, 7)]", "os.lseek(3, 0, 1) == 7"),
    "times-of-a-device": ("os.utime('/dev/full')", "os.stat('/dev/full').st_mtime > time.time() - 1"),
    "flags-above": (
        "fcntl.ioctl(os.open('..', 0), 0x40086602, struct.pack('q', 0xC0))",
        "fcntl.ioctl(os.open('..', 0), 0x80086601, bytes(8))[0] & 0xC0 != 0",
    ),
    "access-list-above": (
        "fd = os.open('..', 0); os.setxattr(fd, 'system.posix_acl_default', bytes.fromhex("
        "'0200000001000700ffffffff020007003930000004000500ffffffff10000700ffffffff20000100ffffffff'))",
        "os.getxattr('..', 'system.posix_acl_default') != b''",
    ),
    "semaphores": ("assert libc.semget(7777, 1, 0o1666) >= 0", "libc.semget(7777, 1, 0) >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("channel", _CHANNELS)
async def test_a_program_leaves_the_next_no_message(pool: SandboxPool, channel: str) -> None:
    write, read = _CHANNELS[channel]
    head = "import ctypes, fcntl, os, struct, time\nlibc = ctypes.CDLL(None)\n"
    writer = f"{head}try:\n    {write}\nexcept (OSError, AssertionError): pass\n"
    reader = f"{head}try:\n    print({read})\nexcept OSError: print(False)\n"
    limits = ExecutionLimits(wall_s=3.0)
    await pool.run(ExecutionRequest(code=writer, limits=limits))
    result = await pool.run(ExecutionRequest(code=reader, limits=limits))
    assert (result.status, result.stdout) == (S.OK, b"False\n"), result.stderr
    await assert_clean(pool)


@pytest.mark.needs("C++ compiler")
async def test_a_compiled_program_executes_no_other(pool: SandboxPool) -> None:
    loader = os.path.realpath(f"/lib64/ld-linux-{'x86-64' if os.uname().machine == 'x86_64' else 'aarch64'}.so.2")
    code = f"""
#include <cstdio>
#include <initializer_list>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <unistd.h>
extern char **environ;
int main() {{
    int refused = 0;
    for (const char *path : {{"{loader}", "/usr/lib/git-core/git", "/proc/self/exe", "./copy"}}) {{
        char *const arguments[] = {{(char *)path, (char *)"--version", nullptr}};
        if (fork() == 0) {{
            if (path[0] == '.') {{ unlink("copy"); symlink("{loader}", "copy"); }}
            execv(path, arguments);
            syscall(SYS_execveat, open(path, O_RDONLY), "", arguments, environ, 0x1000);
            syscall(SYS_execveat, AT_FDCWD, path, arguments, environ, 0);
            int child, status = posix_spawn(&child, path, nullptr, nullptr, arguments, environ);
            _exit(status ? 42 : 1);
        }}
        int status = 0;
        wait(&status);
        refused += WIFEXITED(status) && WEXITSTATUS(status) == 42;
    }}
    std::printf("%d\\n", refused);
}}
"""
    result = await Judge(pool).judge(
        JudgeRequest(code=code, language="cpp", tests=StdinTests(cases=(StdinCase(expected="4"),)))
    )
    assert result.verdict is S.OK, result.cases[0]
    await assert_clean(pool)


async def test_a_datagram_reaches_no_socket_of_the_machine(pool: SandboxPool) -> None:
    name, path = f"\0rollmill-test-{os.getpid()}", f"/var/tmp/rollmill-{os.getpid()}-socket"
    code = f"""
import asyncio, socket
done = []
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK):
    for to in ({name!r}, {path!r}):
        try:
            one, other = socket.socketpair(socket.AF_UNIX, kind)
            one.sendto(b"x", to)
            done.append((kind, to))
        except OSError:
            pass
        try:
            one.sendmsg([b"x"], [], 0, to)
            done.append((kind, to))
        except (OSError, NameError):
            pass
asyncio.run(asyncio.sleep(0))
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.send(b"x")
    assert other.recv(9) == b"x"
print(done)
"""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
    ):
        abstract.bind(name)
        named.bind(path)
        try:
            os.chmod(path, 0o777)
            result = await pool.run(ExecutionRequest(code=code, limits=ExecutionLimits(wall_s=3.0)))
            for reached in (abstract, named):
                reached.setblocking(False)
                with pytest.raises(BlockingIOError):
                    reached.recv(9)
        finally:
            os.unlink(path)
    assert (result.status, result.stdout) == (S.OK, b"[]\n"), result.stderr


async def test_files_beside_the_work_dir_count_for_the_quota(pool: SandboxPool) -> None:
    code = """
import os, time
for where in ("..", "../x", "."):
    try:
        os.makedirs(where, exist_ok=True)
        for i in range(20):
            open(f"{where}/f{i}", "wb").write(b"x" * (1 << 19))
    except OSError as error:
        pass
time.sleep(.5)
print(sum(os.path.getsize(os.path.join(d, f)) for d, _, fs in os.walk("..") for f in fs) > 4 << 20)
"""
    result = await pool.run(ExecutionRequest(code=code, limits=ExecutionLimits(wall_s=5.0)))
    assert b"True" not in result.stdout
    await assert_clean(pool)


async def test_all_cases_together_have_a_time(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_config", pool.config.model_copy(update={"judging_time_s": 1.5}))
    cases = StdinTests(cases=tuple(StdinCase(stdin="", expected="1") for _ in range(130)))
    slow = JudgeRequest(code="import time\ntime.sleep(60)", tests=cases, limits=ExecutionLimits(wall_s=0.25))
    honest = replace(slow, code="import time\ntime.sleep(.4)\nprint(1)", limits=ExecutionLimits())
    for request in (slow, honest):
        result = await Judge(pool).judge(request)
        assert result.verdict is RunStatus.TIME_LIMIT and len(result.cases) == result.num_cases == 130
        assert "judging_time_s" in result.cases[-1].detail
    assert 1 <= sum(case.verdict is RunStatus.OK for case in result.cases) <= 4
    early = await Judge(pool).judge(replace(honest, stop_early=True))
    assert early.verdict is RunStatus.TIME_LIMIT and len(early.cases) <= 6


async def test_memory_that_is_in_no_resident_set_is_reported(pool: SandboxPool) -> None:
    if not pool.gauges["sandbox_memory_cgroup"]:
        needs.unmet("memory cgroup", "programs are watched here, and shared mappings refused")
    code = "import mmap, time\nm = mmap.mmap(-1, 90 << 20)\ntime.sleep(.1)\nfor i in range(90):\n    m[i << 20:(i + 1) << 20] = b'x' * (1 << 20)\n    m.madvise(mmap.MADV_DONTNEED, i << 20, 1 << 20)\ntime.sleep(.1)"
    result = await pool.run(ExecutionRequest(code=code, limits=ExecutionLimits(wall_s=5.0)))
    assert result.status is S.OK and 80 << 20 < result.peak_memory_bytes < 150 << 20


_UNCOUNTED = ("shared", "many-small", "zeros", "memfd", "huge-pages-in-pipes", "first-thread-ends")


async def test_without_a_cgroup_unaccounted_memory_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MEMORY_CGROUP", False)
    config = CONFIG.model_copy(update={"num_slots": 1, "allow_tier_0": os.getuid() != 0})
    watched = SandboxPool.start_before_threads(config)
    try:
        assert watched.gauges["sandbox_memory_cgroup"] == 0
        for case in (c for c in CASES if c.number == 56 and c.name in _UNCOUNTED):
            result = await Judge(watched).judge(case.request_in(world))
            assert case.wrong(result) == ""
    finally:
        await watched.close()


class _AtOnce:
    """A queue that judges at once."""

    num_slots = 1

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool

    async def run(self, job: JudgeRequest, **_: Any) -> JudgeResult:
        return await Judge(self._pool).judge(job)


@pytest.mark.parametrize("name", ["tests-garbage", "tests-half-a-frame", "tests-closed", "tests-feeds-back-depth"])
async def test_a_program_cannot_cause_a_missing_reward(pool: SandboxPool, name: str) -> None:
    request = next(case.request for case in CASES if case.name == name)
    assert isinstance(request.tests, AssertTests)
    task = {"tests": {"kind": "assert", "tests": request.tests.tests, "entry_point": request.tests.entry_point}}
    result = await CodeReward(_AtOnce(pool), case_time_s=2.0)(task, f"```python\n{request.code}```")
    assert (result.outcome, result.reward) == (RewardOutcome.WRONG, 0.0), result.detail
