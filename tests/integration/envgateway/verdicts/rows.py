"""Rows of HumanEval, LeetCode, Codeforces and CodeContests as requests for the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.envgateway.judge.records import AssertTests, JudgeRequest, StdinCase, StdinTests
from tests.integration.envgateway.verdicts.contest_solutions import SOLUTIONS

_HUMANEVAL, _LEETCODE = "humaneval/HumanEval.jsonl", "leetcode/train.jsonl"
_CONTESTS = {name: f"{name}/test.jsonl" for name in sorted({name for name, _ in SOLUTIONS})}
FILES = (_HUMANEVAL, _LEETCODE, *_CONTESTS.values())  # below the folder of the rows


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def humaneval(root: Path) -> dict[str, JudgeRequest]:
    """Canonical solutions; the prompt is the trusted preamble of the tests."""
    return {
        row["task_id"]: JudgeRequest(
            code=row["prompt"] + row["canonical_solution"],
            tests=AssertTests(tests=row["test"], entry_point=row["entry_point"], preamble=row["prompt"]),
        )
        for row in _rows(root / _HUMANEVAL)
    }


def leetcode(root: Path) -> dict[str, JudgeRequest]:
    """Reference solutions."""
    return {
        f"LeetCode/{row['row']}": JudgeRequest(
            code=row["solutions"], tests=AssertTests(tests=row["tests"]["functional"])
        )
        for row in _rows(root / _LEETCODE)
    }


def contests(root: Path) -> dict[str, tuple[JudgeRequest, JudgeRequest]]:
    """Our solutions: right and wrong."""
    found: dict[str, tuple[JudgeRequest, JudgeRequest]] = {}
    for data_set, path in _CONTESTS.items():
        for row in _rows(root / path):
            codes = SOLUTIONS.get((data_set, row["row"]))
            if codes is not None:
                tests = StdinTests(cases=tuple(_cases(row["tests"])))
                right, wrong = (JudgeRequest(code=code, tests=tests) for code in codes)
                found[f"{data_set}/{row['row']}"] = (right, wrong)
    return found


def _cases(tests: Any) -> Iterator[StdinCase]:
    pairs = (
        zip(tests["inputs"], tests["outputs"], strict=True)
        if isinstance(tests, dict)
        else ((test["input"], test["output"]) for test in tests)
    )
    for stdin, expected in pairs:
        yield StdinCase(stdin=stdin, expected=expected)
