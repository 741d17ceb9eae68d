"""Reference solutions before their own tests: `rollmill check --solutions` names rows that fail them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.check.data import solution_lines
from services.common.config.data import DatasetConfig
from services.common.config.envgateway import SandboxConfig
from services.orchestrator.tasks.datasets import open_source

pytestmark = pytest.mark.needs("isolating sandbox")

SANDBOX = SandboxConfig(num_slots=2, prewarm_scientific=False)
ROWS = [
    {"problem": "right", "solution": "def f(n): return n * 7", "tests": {"functional": "def check(fn):\n    assert fn(3) == 21\ncheck(f)"}},
    {"problem": "wrong value", "solution": "def f(n): return n * 7", "tests": {"functional": "def check(fn):\n    assert fn(3) == 22\ncheck(f)"}},
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_check_tells_of_the_first_solutions(rows: Path) -> None:
    source = open_source(DatasetConfig(path=str(rows), form="code"), 0)
    (line,) = solution_lines({"data.train": source}, SANDBOX, None, 2)
    assert line.startswith("data.train: of 2 rows, 1 reference solutions pass their tests, 1 fail: row 2")
