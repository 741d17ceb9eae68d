"""Failed tests run once more, alone: a defect that is always there still fails, an unsteady test is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# Each test fails until its file is there: ``first`` leaves it when it fails, ``always`` does not.
MODULE = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("n", range({first}))
def test_first(n):
    seen = Path({folder!r}) / str(n)
    if not seen.exists():
        seen.touch()
        raise AssertionError

@pytest.mark.parametrize("n", range({always}))
def test_always(n):
    raise AssertionError

def test_good(): pass
"""


def both_runs(folder: Path, module: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """The run of a module by two workers, and the run of its failed tests."""
    (folder / "test_it.py").write_text(module)
    settings = ["-p", "no:cacheprovider", f"--rootdir={folder}", f"--confcutdir={folder}", "-c", os.devnull]
    failed = folder / "failed"
    command = ["pytest", "-p", "xdist", "-n2", "-p", "tests.failed_alone"]
    first = [*command, f"--failed-to={failed}", *settings, "test_it.py"]
    again = ["tests.failed_alone", str(failed), *settings]
    # No other plugins: importing them takes most of the time.
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = [
        subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True,
                       check=False, timeout=120)
        for command in (first, again)
    ]  # fmt: skip
    return done[0], done[1]


def test_a_test_that_passes_alone_is_named(tmp_path: Path) -> None:
    first, again = both_runs(tmp_path, MODULE.format(first=2, always=0, folder=str(tmp_path)))
    assert first.returncode == 1 and "2 failed, 1 passed" in first.stdout
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 passed" in again.stdout
    assert (
        "UNSTEADY: test_it.py::test_first[0]" in again.stdout and "UNSTEADY: test_it.py::test_first[1]" in again.stdout
    )


def test_a_test_that_fails_again_fails_the_command(tmp_path: Path) -> None:
    first, again = both_runs(tmp_path, MODULE.format(first=1, always=1, folder=str(tmp_path)))
    assert (first.returncode, again.returncode) == (1, 1)
    assert "1 failed, 1 passed" in again.stdout and "UNSTEADY" not in again.stdout
