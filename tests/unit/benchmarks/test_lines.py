"""The count of lines: every line has one kind, and generated code is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import lines

REPOSITORY = Path(__file__).parents[3]

PIECES = [
    '"""A.\n\nB."""',
    "x = 1  # one",
    "# why",
    "",
    'y = """\na\n"""',
    "def f():\n    pass",
    "    ",
    "z = [\n    1,\n\n]",
]


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("", (0, 0, 0, 0)),
        ("\n\n", (0, 0, 0, 2)),
        ("# a comment alone", (0, 0, 1, 0)),
        ('x = """\nno docstring, and a blank line in it\n\n"""\n', (4, 0, 0, 0)),
        ('class A:\n    """A."""\n\n    key: int = 1\n    """Below a field."""\n', (2, 2, 0, 1)),
        ("if True:\n    # why\n    x = 1\n", (2, 0, 1, 0)),
    ],
)
def test_each_line_has_its_kind(source: str, counts: tuple[int, int, int, int]) -> None:
    found = lines.counted(source)
    assert (found.code, found.docstring, found.comment, found.blank) == counts


@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_the_kinds_add_up_to_all_lines(pieces: list[str]) -> None:
    source = "\n".join(pieces)
    assert lines.counted(source).lines == len(source.splitlines())


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        lines.counted("def f(:\n")


def test_files_are_counted_by_part_and_generated_ones_are_not(tmp_path: Path) -> None:
    files = {
        "services/cli/run/launch.py": "def a():\n    pass\n\n\ndef bb():\n    x = 1\n    return x\n",
        "services/cli/run/stop.py": "x = 1\n",
        "services/cli/run/__init__.py": "",
        "services/common/pb/run_pb2.py": "x = 1\n" * 1000,
        "services/start.py": "x = 1\n",
        "recipes/quickstart/task.py": "# one\n",
        "tests/test_a.py": "x = 1\n",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    found = list(lines.source_files(tmp_path))
    assert {str(file.path) for file in found} == {n for n in files if "pb" not in n and "tests" not in n}
    total = lines.summary(found)
    assert (total["files"], total["lines"], total["code"], total["comment"], total["blank"]) == (5, 10, 7, 1, 2)
    assert total["longest_function"] == ["services/cli/run/launch.py:bb", 3]
    assert total["largest_file"] == ["services/cli/run/launch.py", 7]
    assert {lines.part_of(file.path) for file in found} == {"services/cli", "services", "recipes"}


@pytest.fixture(scope="module")
def last_line() -> dict[str, Any]:
    """The facts of the script about this repository."""
    done = subprocess.run(
        [sys.executable, "benchmarks/lines.py", "--quick"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_the_last_line_has_every_part(last_line: dict[str, Any]) -> None:
    assert {"services/cli", "services/common", "services/trainer", "recipes"} <= set(last_line["parts"])
    assert last_line["all"]["lines"] == sum(part["lines"] for part in last_line["parts"].values()) > 10_000
