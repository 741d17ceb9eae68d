"""A machine without disk space: what it does to a program is no verdict on the program."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests import needs
from tests.integration.envgateway.conftest import CONFIG
from tests.small_disk import fill, mounted

CASES = StdinTests(cases=(StdinCase(stdin="1", expected="1"), StdinCase(stdin="2", expected="2")))
READ = "\nprint(input())"


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
