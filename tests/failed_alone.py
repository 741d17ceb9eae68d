"""A pytest plugin that writes the names of failed tests to a file, and a command that runs them once more, alone.

A test may fail because other tests hold the cores of a slow machine. ``python -m tests.failed_alone FILE`` tells that apart
from a defect that is always there: with at most ``MOST`` failures it runs each once more, one after another. A test that
fails again fails the command; one that passes is named UNSTEADY, which is a defect to repair as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST = 3  # failures that are run again; more are no matter of load
_ADVICE = "Repair the cause (CONTRIBUTING.md, Habits): load or another test decided its result."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-to", metavar="FILE", help="write the names of failed tests to FILE, one on a line")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    file = config.getoption("--failed-to")
    if not file or hasattr(config, "workerinput"):  # the process that owns the workers has their reports
        return
    # An interrupted run says nothing about the tests that it did not come to.
    complete = exitstatus == pytest.ExitCode.TESTS_FAILED
    reports = [report for key in ("failed", "error") for report in terminalreporter.stats.get(key, [])]
    names = dict.fromkeys(report.nodeid for report in reports) if complete else {}
    Path(file).write_text("".join(f"{name}\n" for name in names))


def main(file: Path, *arguments: str) -> int:
    """The exit status: 0 if each failed test passes alone, 1 if one does not, or there are none or too many to run again."""
    names = file.read_text().splitlines() if file.exists() else []
    if not 0 < len(names) <= MOST:
        return 1
    sys.stdout.write(f"\n{len(names)} failed beside other tests; each runs once more, alone:\n")
    sys.stdout.flush()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments, *names], check=False)
    if done.returncode != 0:
        return 1
    for name in names:
        sys.stdout.write(f"UNSTEADY: {name} failed beside other tests and passed alone. {_ADVICE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
