"""A pytest plugin that checks the needs of each test, and prints in one line at the end which tests were not exercised.

``python -m tests.not_exercised FILE`` prints the line of several runs, which wrote to FILE by ``--not-exercised-to``;
with ``--names`` it prints the names of these tests, one on a line, for pytest's ``@FILE``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests import needs

_PROPERTY = "unmet need"
Counts = Mapping[tuple[str, str], int]  # number of tests by need and command
APART = "Apart from `make test`: make test-recipes, make test-sglang, make test-vllm, make test-gpu."


def line(counts: Counts) -> str:
    """The line of tests that were not exercised, by need and command, most tests first."""
    if not counts:
        return "not exercised: nothing; every need of the tests was met."
    by_command: dict[str, list[str]] = {}
    for (name, add), number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        by_command.setdefault(add, []).append(f"{number} of {name}")
    parts = [f"{', '.join(found)} ({command})" for command, found in by_command.items()]
    total = sum(counts.values())
    return f"not exercised: {total} test{'s' if total > 1 else ''}: {'; '.join(parts)}."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--not-exercised-to", metavar="FILE", help="add to FILE what was not exercised, instead of a line at the end"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): skipped where a need of tests/needs.py is not met")
    needs.required(os.environ.get(needs.REQUIRE, ""))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in _needs_of(item):
            needs.known(name, item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _needs_of(item):
        needs.check(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, needs.Unmet):
        need = call.excinfo.value.need
        report.user_properties.append((_PROPERTY, [need.name, need.add]))  # crosses to the process that counts
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    skipped = [
        (*value, report.nodeid) for report in reports for key, value in report.user_properties if key == _PROPERTY
    ]
    if hasattr(config, "workerinput"):
        return  # the process that owns the workers has their reports
    if file := config.getoption("--not-exercised-to"):
        with Path(file).open("ab") as log:
            log.write(record(skipped))
    elif skipped:
        terminalreporter.write_line(line(Counter((name, add) for name, add, _ in skipped)))


def record(skipped: Sequence[tuple[str, str, str]]) -> bytes:
    """The lines of a file for ``--not-exercised-to`` that one run adds: need, command and test."""
    return b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in skipped)


def _needs_of(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def main(file: Path, names: bool = False) -> None:
    skipped = [orjson.loads(entry) for entry in file.read_bytes().splitlines()]
    if names:
        sys.stdout.writelines(f"{test}\n" for _, _, test in skipped)
    else:
        sys.stdout.write(f"{line(Counter((name, add) for name, add, _ in skipped))} {APART}\n")


if __name__ == "__main__":
    main(Path(sys.argv[-1]), names="--names" in sys.argv[1:-1])
