"""Programming problems as they lie about, brought into one form: ``{"problem": text, "tests": {...}}``.

    {"kind": "stdin",  "cases": [{"stdin": text, "expected": text}, ...]}
    {"kind": "call",   "entry_point": name, "cases": [{"args": [...], "expected": value}, ...]}
    {"kind": "assert", "tests": code, "entry_point": name, "preamble": code}

Understood are lists of ``input``/``output`` pairs (also as JSON text, with ``type`` and ``metadata.func_name``),
``inputs``/``outputs`` with or without ``fn_name``, ``functional`` test code, HumanEval's columns, and MBPP's lists of
asserts. A reference solution is kept under ``solution``, several also under ``solutions``. Whatever is not understood is
refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.common.errors import DatasetError

Row = Mapping[str, Any]
Tests = dict[str, Any]

_PROBLEM_COLUMNS = ("problem", "question", "text", "prompt")


def code_row(row: Row, where: str) -> dict[str, Any]:
    """The row in one form; ``DatasetError`` names ``where`` and what is missing.

    >>> code_row({"problem": "Add.", "tests": [{"input": "1 2", "output": "3"}]}, "row 1")["tests"]
    {'kind': 'stdin', 'cases': [{'stdin': '1 2', 'expected': '3'}]}
    """
    normal: dict[str, Any] = {"problem": _problem(row, where), "tests": _tests(row, where)}
    solution = _solution(row)
    if solution is not None:
        normal["solution"] = solution
    if isinstance(row.get("solutions"), list) and len(row["solutions"]) > 1:
        normal["solutions"] = [text for text in row["solutions"] if isinstance(text, str) and text.strip()]
    if isinstance(row.get("starter_code"), str) and row["starter_code"].strip():
        normal["starter_code"] = row["starter_code"]
    return normal


def _problem(row: Row, where: str) -> str:
    for name in _PROBLEM_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            # HumanEval's prompt is the beginning of the program: its indentation counts.
            return str(row[name]).strip("\n") if "entry_point" in row else str(row[name]).strip()
    raise DatasetError(f"{where}: no problem: looked for {', '.join(_PROBLEM_COLUMNS)} in {sorted(row)}")


def _tests(row: Row, where: str) -> Tests:
    if "entry_point" in row and isinstance(row.get("test"), str):
        return {
            "kind": "assert",
            "tests": row["test"],
            "entry_point": str(row["entry_point"]),
            "preamble": str(row.get("prompt", "")),
        }
    if isinstance(row.get("test_list"), list):
        code = "\n".join([str(row.get("test_setup_code") or ""), *map(str, row["test_list"])]).strip()
        return {"kind": "assert", "tests": code, "entry_point": "", "preamble": ""}
    for name in ("tests", "input_output", "test_cases"):
        if name in row:
            return _of_any_shape(_parsed(row[name], f"{where}, {name}"), f"{where}, {name}")
    raise DatasetError(
        f"{where}: no tests: looked for tests, input_output, test_cases, test and test_list in {sorted(row)}"
    )


def _of_any_shape(found: Any, where: str) -> Tests:
    if isinstance(found, list) and found:
        return _of_pairs(found, where)
    if isinstance(found, Mapping):
        if isinstance(found.get("functional"), str):
            return {"kind": "assert", "tests": found["functional"], "entry_point": "", "preamble": ""}
        if "inputs" in found and "outputs" in found:
            return _of_columns(found, where)
    raise DatasetError(f"{where}: neither pairs of input and output, nor inputs and outputs, nor functional test code")


def _of_pairs(pairs: list[Any], where: str) -> Tests:
    names = set()
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, Mapping) or "input" not in pair or "output" not in pair:
            raise DatasetError(f"{where}, case {number}: needs input and output")
        metadata = pair.get("metadata")
        names.add(str(metadata.get("func_name") or "") if isinstance(metadata, Mapping) else "")
    if len(names) > 1:
        raise DatasetError(f"{where}: the cases call different functions: {', '.join(sorted(names))}")
    name = names.pop()
    kinds = {str(pair.get("type", "stdin_stdout")) for pair in pairs}
    if name or kinds == {"functional"}:
        if not name:
            raise DatasetError(f"{where}: functional cases without metadata.func_name")
        cases = [_call(pair["input"], pair["output"], f"{where}, case {n}") for n, pair in enumerate(pairs, start=1)]
        return {"kind": "call", "entry_point": name, "cases": cases}
    return _stdin([(pair["input"], pair["output"]) for pair in pairs], where)


def _of_columns(found: Mapping[str, Any], where: str) -> Tests:
    inputs, outputs = found["inputs"], found["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise DatasetError(f"{where}: inputs and outputs must be lists of one length, not empty")
    name = found.get("fn_name")
    if name:
        cases = [
            _call(given, expected, f"{where}, case {number}")
            for number, (given, expected) in enumerate(zip(inputs, outputs, strict=True), start=1)
        ]
        return {"kind": "call", "entry_point": str(name), "cases": cases}
    return _stdin(list(zip(inputs, outputs, strict=True)), where)


def _stdin(pairs: list[tuple[Any, Any]], where: str) -> Tests:
    cases = []
    for number, (given, expected) in enumerate(pairs, start=1):
        cases.append({"stdin": _text(given, where, number), "expected": _text(expected, where, number)})
    return {"kind": "stdin", "cases": cases}


def _text(value: Any, where: str, number: int) -> str:
    """Text, or a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise DatasetError(
        f"{where}, case {number}: input and output of a program must be text, not {type(value).__name__}"
    )


def _call(given: Any, expected: Any, where: str) -> dict[str, Any]:
    """Arguments come as a list, as JSON text of one, or as one JSON value per line."""
    if isinstance(given, str):
        try:
            lines = [json.loads(line) for line in given.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise DatasetError(f"{where}: the arguments are no JSON: {error}") from None
        given = lines[0] if len(lines) == 1 and isinstance(lines[0], list) else lines
    if not isinstance(given, list):
        raise DatasetError(f"{where}: the arguments are a {type(given).__name__}; they must be a list")
    if isinstance(expected, str):
        try:
            expected = json.loads(expected)
        except json.JSONDecodeError:
            pass  # a function that returns text
    elif isinstance(expected, list) and len(expected) == 1:
        expected = expected[0]  # APPS wraps the returned value
    return {"args": given, "expected": expected}


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not valid JSON: {error}") from None


def _solution(row: Row) -> str | None:
    if isinstance(row.get("canonical_solution"), str):
        return str(row.get("prompt", "")) + str(row["canonical_solution"])
    for name in ("solution", "code"):
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    solutions = row.get("solutions")
    if isinstance(solutions, str) and solutions.strip():
        return solutions
    if isinstance(solutions, list) and solutions and isinstance(solutions[0], str):
        return solutions[0]
    return None
