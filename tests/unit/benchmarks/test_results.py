"""Every benchmark reports its machine and the parts that were left out, and runs on the available cores."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import _bench, _run_all
from tests.waiting import PROCESS_S

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


PATHS = f"import sys\nsys.path[:0] = {[str(BENCHMARKS), str(BENCHMARKS.parent)]}\n"
REPORTS = {"report", "report_facts", "report_nothing"}


def told_by(code: str) -> dict[str, object]:
    """The last line of a script, which may only use the last of this process's cores."""
    confined = f"import os\nos.sched_setaffinity(0, [max(os.sched_getaffinity(0))])\n{PATHS}"
    done = subprocess.run(
        [sys.executable, "-c", confined + code], capture_output=True, text=True, check=True, timeout=PROCESS_S
    )
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_a_result_says_how_many_cores_and_what_load_there_were() -> None:
    said = told_by("from benchmarks._bench import report\nreport('it', 2.0, 1.0, 2.0, 0.123456, workers=[1.23456])")
    assert said.pop("load") >= 0  # type: ignore[operator]
    assert 0 < said.pop("cores") <= 1  # type: ignore[operator]
    assert said == {
        "name": "it", "ours": 2.0, "theirs": 1.0, "ratio": 2.0, "spread": 0.1235, "workers": [1.235], "left_out": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "num_parts", "at_most", "expected"),
    [
        ({0, 1, 2, 3, 4}, 2, 2, [[0, 1], [2, 3]]),
        ({4, 7}, 2, 2, [[4], [7]]),
        ({4, 7, 9}, 2, 2, [[4], [7]]),
        ({5}, 2, 2, [[5], [5]]),
        ({4, 7, 9}, 3, 1, [[4], [7], [9]]),
        ({4, 7}, 3, 1, [[4], [7], [7]]),
    ],
)
def test_the_parts_of_a_benchmark_get_cores_that_exist(
    mine: set[int], num_parts: int, at_most: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine)
    assert _bench.split(num_parts, at_most) == expected


@pytest.mark.parametrize("path", _run_all.scripts(), ids=lambda path: path.stem)
def test_every_script_ends_through_the_shared_report(path: Path) -> None:
    """Which adds cores and load; ``_run_all.py`` checks the line itself when the script is run."""
    tree = ast.parse(path.read_text())
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "benchmarks._bench"
        for name in node.names
    }
    calls = {
        node.name: _names(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    reached, waiting = set(), {"main"}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= calls.get(name, set()) - reached
    assert "main" in calls and REPORTS & imported & reached, "main must end with a report of benchmarks/_bench.py"


def _names(function: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


WELL = f"{PATHS}from benchmarks._bench import report_facts\nreport_facts(sys.argv[1])\n"
BAD = {
    "crashes": ("raise SystemExit(3)", "exit code 3"),
    "other_name": (WELL.replace("sys.argv[1]", "'well'"), "not the result of other_name"),
    "says_nothing": ("", "no JSON"),
    "without_cores": ('print(\'{"name": "without_cores"}\')', "not the result of without_cores with cores"),
}


def test_one_benchmark_that_fails_is_named_and_stops_no_other(tmp_path: Path) -> None:
    runner = tmp_path / "_run_all.py"
    runner.write_text((BENCHMARKS / "_run_all.py").read_text())
    (tmp_path / "well.py").write_text(WELL)
    for name, (code, _) in BAD.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, str(runner), "well"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    summary = done.stdout.rpartition("==\n")[2]
    assert done.returncode == 1 and "4 of 5 failed" in summary
    for name, (_, reason) in BAD.items():
        [line] = [line for line in summary.splitlines() if f"{name}.py: " in line]
        assert reason in line
    for name in BAD:
        (tmp_path / f"{name}.py").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "0 of 1 failed" in done.stdout
