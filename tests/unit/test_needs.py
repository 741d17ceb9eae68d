"""Needs of tests: an unmet one is a skip that the last line counts, or a failure if the need was demanded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import needs

Run = Callable[..., subprocess.CompletedProcess[str]]

TESTS = Path(__file__).resolve().parents[1]
MODULE = """
import pytest
from tests import needs

needs.NEEDS["a moon"] = needs.Need("a moon", lambda: "there is none", "apt-get install moon")
needs.NEEDS["air"] = needs.Need("air", lambda: None, "open a window")

@pytest.fixture(scope="session")
def moon():
    needs.check("a moon")

@pytest.mark.needs("air")
def test_met(): pass

@pytest.mark.needs("air", "a moon")
@pytest.mark.parametrize("n", range(2))
def test_marked(n): raise AssertionError

def test_by_fixture(moon): raise AssertionError
"""


@pytest.fixture
def run_tests(tmp_path: Path) -> Run:
    def run(module: str, *arguments: str, require: str = "") -> subprocess.CompletedProcess[str]:
        file = tmp_path / "test_it.py"
        file.write_text(module)
        # No other plugins: importing them takes most of the time.
        environment = {**os.environ, needs.REQUIRE: require, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "xdist",
            "-p",
            "tests.not_exercised",
            "-p",
            "no:cacheprovider",
            "--strict-markers",
        ]
        return subprocess.run(
            [
                *command, f"--rootdir={tmp_path}", f"--confcutdir={tmp_path}", f"--basetemp={tmp_path / 'base'}", "-c", os.devnull,
                *arguments, str(file),
            ],
            cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip

    return run


def test_what_is_missing_is_skipped_and_counted_across_workers(run_tests: Run) -> None:
    done = run_tests(MODULE, "-n1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 3 skipped" in done.stdout
    assert "not exercised: 3 tests: 3 of a moon (apt-get install moon)." in done.stdout.splitlines()


def test_what_is_required_fails_instead(run_tests: Run) -> None:
    done = run_tests(MODULE, require="all")
    assert done.returncode == 1
    assert "ROLLMILL_REQUIRE has a moon, but there is none (apt-get install moon)" in done.stdout
    assert re.search(r"1 passed, 3 errors", done.stdout) and "skipped" not in done.stdout
    assert "not exercised" not in done.stdout


def test_no_test_is_skipped_in_another_way() -> None:
    """A skip without a need would be missing in the last line."""
    other = re.compile(r"pytest\.(skip\(|importorskip|mark\.skip)|SkipTest")
    found = [path for path in TESTS.rglob("*.py") if other.search(path.read_text()) and path != Path(__file__)]
    assert found == []
