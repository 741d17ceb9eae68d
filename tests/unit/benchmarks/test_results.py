"""Every benchmark reports its machine and the parts that were left out, and runs on the available cores."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import _bench, _run_all, stalls
from tests.needs import NEEDS
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


def test_what_was_not_measured_has_no_figures_and_a_reason() -> None:
    said = told_by("from benchmarks._bench import report_nothing\nreport_nothing('it', 'no rows')")
    assert said["left_out"] == {_bench.EVERYTHING: "no rows"}
    assert [said[key] for key in ("ours", "theirs", "ratio", "spread")] == [None] * 4
    assert said.keys() >= {"cores", "load"}


def test_a_script_that_wants_more_cores_than_there_are_takes_these() -> None:
    said = told_by(
        "from benchmarks._bench import pin\nfrom benchmarks._bench import report_facts\nreport_facts('it', cores=pin(64))"
    )
    assert 0 < said["cores"] <= 1  # type: ignore[operator]


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


def test_rows_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert _bench.why_no_rows(tmp_path, ["a.jsonl"]) is None
    assert _bench.why_no_rows(None, ["a.jsonl"]) == "no rows: name their folder with --data or ROLLMILL_DATA_ROOT"
    assert "has no b.jsonl" in str(_bench.why_no_rows(tmp_path, ["a.jsonl", "b.jsonl"]))


def test_memory_that_is_not_there_is_told_beforehand(tmp_path: Path) -> None:
    assert _bench.why_no_room(1, tmp_path) is None and _bench.why_no_memory(1) is None
    assert "needed" in str(_bench.why_no_room(1 << 60, tmp_path))
    assert "needed" in str(_bench.why_no_memory(1 << 60))


def test_a_need_of_tests_that_is_not_met_is_told_with_what_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.setattr(sys, "executable", "/none/python")
    assert _bench.why_not("redis-server") == f"there is no redis-server ({NEEDS['redis-server'].add})"
    assert _bench.why_not("Linux") is None


def test_worlds_that_need_what_is_not_there_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"redis-server": "no redis"}
    monkeypatch.setattr(stalls, "why_not", missing.get)
    shapes = {shape.name: shape for shape, _ in stalls.WORLDS}
    assert stalls._left_out(shapes.values()) == {"world redis": "no redis", "world workers": "no redis"}
    missing["tmpfs"] = "no mount"
    assert stalls._left_out([shapes["network"], shapes["ranks"]]) == {"world network": "no mount"}


def test_a_quick_look_at_stalls_injects_one_into_each_of_its_worlds() -> None:
    chosen = stalls._chosen(argparse.Namespace(only=[], quick=True))
    assert [shape.name for shape, _ in chosen] and {shape.name for shape, _ in chosen} == set(stalls.QUICK)
    assert all(len(injections) == 1 for _, injections in chosen)


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


def test_a_benchmark_that_does_not_end_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stands.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(3600)")
    assert _run_all.run_all([tmp_path / "stands.py"], [], limit_s=3.0) == {"stands": "not done after 3 s"}
    assert "begun" in capfd.readouterr().out
