"""A machine without memory or disk space: what it does to a program is no verdict on the program."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests
from services.envgateway.sandbox import launch
from services.envgateway.sandbox.bare import memcg
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests import needs
from tests.integration.envgateway.conftest import CONFIG
from tests.integration.envgateway.sandbox_state import assert_clean, children_of, supervisor_of
from tests.small_disk import fill, mounted

HUNGRY = "import time; time.sleep(0.3); x = bytearray(b'x') * (120 << 20); print(len(x))"  # below its limit
LITTLE_BYTES = 100 << 20
CASES = StdinTests(cases=(StdinCase(stdin="1", expected="1"), StdinCase(stdin="2", expected="2")))
READ = "\nprint(input())"


@pytest.mark.needs("memory cgroup")
async def test_a_program_that_the_kernel_kills_below_its_limit_has_no_verdict(pool: SandboxPool) -> None:
    if not pool.gauges["sandbox_memory_cgroup"]:
        needs.unmet("memory cgroup", "programs are watched here")
    name = f"{memcg._PREFIX}{supervisor_of(pool)}"
    (Path(memcg._own_cgroup()) / name / "memory.max").write_text(str(LITTLE_BYTES))
    result = await pool.run(ExecutionRequest(code=HUNGRY))
    assert (result.status, result.signal) == (RunStatus.INFRA_ERROR, 9) and "no memory left" in result.detail
    await assert_clean(pool)


@pytest.mark.needs("memory cgroup")
async def test_so_has_one_without_a_cgroup_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MEMORY_CGROUP", False)
    pool = SandboxPool.start_before_threads(CONFIG.model_copy(update={"num_slots": 1}))
    granted = memcg.grant(1)
    assert isinstance(granted, memcg.MemoryGroups)
    try:
        granted.slots[0].limit(LITTLE_BYTES)
        for pid in children_of(supervisor_of(pool)):
            (Path(granted.slots[0].directory) / "cgroup.procs").write_text(str(pid))
        result = await pool.run(ExecutionRequest(code=HUNGRY))
        assert (result.status, result.signal) == (RunStatus.INFRA_ERROR, 9) and "no memory left" in result.detail
        itself = await pool.run(ExecutionRequest(code="import os; os.kill(os.getpid(), 9)"))
        assert (itself.status, itself.signal) == (RunStatus.RUNTIME_ERROR, 9)
    finally:
        await pool.close()
        granted.close()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with mounted(tmp_path / "small", "80m") as place:
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        yield place


@pytest.mark.needs("root", "tmpfs")
@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "open('f', 'w').write('x' * 10000)" + READ),
        ("python", "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x' * 9000); f.flush()" + READ),
        ("cpp", "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n; }"),
    ],
    ids=["a file that stays", "a file that goes", "the compiler's"],
)
async def test_a_program_that_fails_on_a_full_disk_has_no_verdict(small_disk: Path, language: str, code: str) -> None:
    pool = SandboxPool.start_before_threads(CONFIG, tiers=("1",))
    try:
        if language == "cpp" and not pool.has_cpp:
            needs.unmet("g++", "there is no compiler")
        request = JudgeRequest(code=code, tests=CASES, language=language)
        assert (await Judge(pool).judge(request)).verdict is RunStatus.OK
        fill(small_disk / "others")
        result = await Judge(pool).judge(request)
        assert result.verdict is RunStatus.INFRA_ERROR and "disk_bytes" in result.detail
        honest = await Judge(pool).judge(JudgeRequest(code="print(input())", tests=CASES))
        assert honest.verdict is RunStatus.OK  # nothing of it is written
        (small_disk / "others").unlink()
        assert (await Judge(pool).judge(request)).verdict is RunStatus.OK
    finally:
        await pool.close()


@pytest.mark.needs("root", "tmpfs")
async def test_a_program_that_uses_up_its_own_quota_is_at_fault(small_disk: Path) -> None:
    pool = SandboxPool.start_before_threads(CONFIG.model_copy(update={"file_bytes": 64 << 20}), tiers=("1",))
    try:
        code = "import os\nopen('f', 'wb').write(bytes(64 << 20))\nos._exit(3)"
        assert (await pool.run(ExecutionRequest(code=code))).status is RunStatus.RUNTIME_ERROR
        assert (await pool.run(ExecutionRequest(code="import os; os._exit(3)"))).status is RunStatus.RUNTIME_ERROR
    finally:
        await pool.close()
