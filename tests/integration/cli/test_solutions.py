"""Reference solutions before their own tests: rows that fail them are named and left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.check.data import prepare_code, solution_lines
from services.common.config.data import DatasetConfig
from services.common.config.envgateway import SandboxConfig
from services.orchestrator.tasks.datasets import open_source

pytestmark = pytest.mark.needs("isolating sandbox")

SANDBOX = SandboxConfig(num_slots=2, prewarm_scientific=False)
ROWS = [
    {"problem": "right", "solution": "def f(n): return n * 7", "tests": {"functional": "def check(fn):\n    assert fn(3) == 21\ncheck(f)"}},
    {"problem": "wrong value", "solution": "def f(n): return n * 7", "tests": {"functional": "def check(fn):\n    assert fn(3) == 22\ncheck(f)"}},
    {"problem": "no Python", "solution": "def f(n): return n", "tests": {"functional": "def check(fn):\n    assert fn(3 == 22\ncheck(f)"}},
    {"problem": "no solution", "tests": [{"input": "1", "output": "1"}]},
    {"problem": "a class of its own", "solution": "class Pair:\n  def __init__(self, a): self.a = a\ndef total(p): return p.a", "test_list": ["assert total(Pair(3)) == 3"]},
    {"problem": "opaque", "solution": "def f(g): return g(3)", "tests": {"functional": "def twice(x): return 2 * x\nassert f(twice) == 6"}},
    {"problem": "stdin, wrong", "solution": "print(2)", "tests": [{"input": "1", "output": "1"}]},
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_rows_that_fail_their_own_solution_are_not_written(rows: Path, tmp_path: Path) -> None:
    done = prepare_code([str(rows)], tmp_path / "out" / "clean.jsonl", SANDBOX, None)
    kept = [json.loads(line)["problem"] for line in (tmp_path / "out" / "clean.jsonl").read_text().splitlines()]
    assert kept == ["right", "no solution", "a class of its own", "opaque"] and done.num_rows == 4
    assert done.left_out[str(rows)].count == 1 and "row 3" in str(done.left_out[str(rows)])
    report = done.solutions[str(rows)]
    assert (report.num_passed, report.num_without, report.failed.count) == (3, 1, 2)
    reasons = report.failed.reasons
    assert reasons[0].startswith("row 2:") and "expected 22, got 21" in reasons[0]
    assert reasons[1].startswith("row 7:") and "WRONG_ANSWER" in reasons[1]
    assert not list((tmp_path / "out").glob("*.partial"))


def test_a_check_tells_of_the_first_solutions(rows: Path) -> None:
    source = open_source(DatasetConfig(path=str(rows), form="code"), 0)
    (line,) = solution_lines({"data.train": source}, SANDBOX, None, 2)
    assert line.startswith("data.train: of 2 rows, 1 reference solutions pass their tests, 1 fail: row 2")
