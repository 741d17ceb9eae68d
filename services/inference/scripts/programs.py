"""Programs and test cases that a scripted policy writes for a row with ``tests``, right or wrong.

A row without a reference solution gets a program with a table of its cases' answers, if the table is short.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping
from typing import Any

MAX_TABLE_CHARS = 1500  # of a program with a table of its cases
MAX_CASE_CHARS = 400  # of a test case that is written out

Row = Mapping[str, Any]
Case = dict[str, Any]


def fenced(program: str, language: str = "python") -> str:
    newline = "" if program.endswith("\n") else "\n"
    return f"```{language}\n{program}{newline}```"


def right_program(row: Row) -> str | None:
    """The reference solution; without one a table of the cases; None when that would be long, or there are none."""
    solution = row.get("solution")
    if isinstance(solution, str) and solution.strip():
        return _unfenced(solution)
    tests: Row = row["tests"]
    if tests.get("kind") == "stdin":
        table = {str(case["stdin"]).strip(): str(case.get("expected", "")) for case in tests["cases"]}
        program = f"import sys\ntable = {table!r}\nprint(table[sys.stdin.read().strip()])\n"
    elif tests.get("kind") == "call" and str(tests["entry_point"]).isidentifier():
        by_arguments = {json.dumps(case["args"]): case["expected"] for case in tests["cases"]}
        program = (
            f"import json\ntable = {by_arguments!r}\n\n"
            f"def {tests['entry_point']}(*args):\n    return table[json.dumps(list(args))]\n"
        )
    else:
        return None
    return program if len(program) <= MAX_TABLE_CHARS else None


def broken_program(draw: random.Random) -> str:
    """A program that runs and gives no right answer."""
    return f"guess = {draw.randrange(10**8, 10**9)}\nprint(guess)\n"


def cases_of(row: Row, limit: int) -> list[Case]:
    """Up to ``limit`` short true cases, as a verifier is asked to write them."""
    tests: Row = row["tests"]
    found: list[Case] = []
    if tests.get("kind") == "stdin":
        found = [{"input": case["stdin"], "output": case.get("expected", "")} for case in tests["cases"]]
    elif tests.get("kind") == "call":
        found = [{"args": list(case["args"]), "expected": case["expected"]} for case in tests["cases"]]
    elif tests.get("kind") == "assert":
        found = _asserted(str(tests.get("tests", "")))
    return [case for case in found if len(json.dumps(case)) <= MAX_CASE_CHARS][:limit]


def falsified(case: Case) -> Case:
    """The same case with a wrong outcome."""
    name = "output" if "output" in case else "expected"
    truth = case[name]
    if isinstance(truth, bool):
        wrong: Any = not truth
    elif isinstance(truth, int | float):
        wrong = truth + 1
    elif isinstance(truth, str):
        wrong = f"{truth.rstrip()}1\n" if name == "output" else f"{truth}1"
    else:
        wrong = 1
    return {**case, name: wrong}


def _asserted(code: str) -> list[Case]:
    """Cases written as ``assert candidate(...) == value`` with plain values; other cases are skipped."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)):
            continue
        comparison = node.test
        call = comparison.left
        if len(comparison.ops) != 1 or not isinstance(comparison.ops[0], ast.Eq) or not isinstance(call, ast.Call):
            continue
        if not (isinstance(call.func, ast.Name) and call.func.id == "candidate"):
            continue
        try:
            # Named arguments stand in the order of the parameters in the sets that use them.
            args = [ast.literal_eval(part) for part in (*call.args, *(keyword.value for keyword in call.keywords))]
            case = {"args": args, "expected": ast.literal_eval(comparison.comparators[0])}
            json.dumps(case)
        except (ValueError, TypeError):
            continue
        found.append(case)
    return found


def _unfenced(text: str) -> str:
    lines = text.strip("\n").split("\n")
    if len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1]) + "\n"
    return text
