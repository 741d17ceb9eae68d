"""A pytest plugin that checks the needs of each test, and prints in one line at the end which tests were not exercised.

``python -m tests.not_exercised FILE`` prints the line of several runs, which wrote to FILE by ``--not-exercised-to``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator, Mapping
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
    counts = Counter(tuple(value) for report in reports for key, value in report.user_properties if key == _PROPERTY)
    if file := config.getoption("--not-exercised-to"):
        with Path(file).open("ab") as log:
            log.write(record(counts))
    elif counts:
        terminalreporter.write_line(line(counts))


def record(counts: Counts) -> bytes:
    """The line of a file for ``--not-exercised-to`` that one run adds."""
    return orjson.dumps([[*key, number] for key, number in counts.items()], option=orjson.OPT_APPEND_NEWLINE)


def _needs_of(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def main(file: Path) -> None:
    total: Counter[tuple[str, str]] = Counter()
    for run in file.read_bytes().splitlines():
        total.update({(name, add): number for name, add, number in orjson.loads(run)})
    sys.stdout.write(f"{line(total)} {APART}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
