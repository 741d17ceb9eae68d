"""Converts programming problems into one form: ``{"problem": text, "tests": {...}}``.

    {"kind": "stdin",  "cases": [{"stdin": text, "expected": text}, ...]}
    {"kind": "call",   "entry_point": name, "cases": [{"args": [...], "expected": value, "also": [value, ...]}, ...],
     "integer_keys": bool}
    {"kind": "assert", "tests": code, "entry_point": name, "preamble": code, "names": [name, ...]}

Input layouts: lists of ``input``/``output`` pairs, ``inputs``/``outputs``, both also as JSON text or a Python literal
and inside ``verification_info``; ``functional`` test code, HumanEval's columns, and MBPP's lists of asserts. Pairs may
have a ``type`` (``stdin_stdout``; ``function_call`` or ``functional``) and the name of the called function (``fn_name``
or ``metadata.func_name``, in the pair or in the row); without a type, a pair that names a function calls it. Arguments
of a call are a list, or a text with one JSON value per line; ``integer_keys``: a dictionary in them has keys that JSON
made text, and neither a head nor the solution of the row has text keys. Where the value of a call can be read in two ways (a list of one is the value or holds it, a text is the
value or its JSON), ``also`` has the other ones. ``names`` are other names that the tests use and the
reference solution defines. A reference solution is kept under ``solution``, several also under ``solutions``. Refuses
every other layout, without guesses.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from services.common.errors import DatasetError
from services.common.text.programs import defined_by, program_of

Row = Mapping[str, Any]
Tests = dict[str, Any]
_CODE_PROBLEM_COLUMNS = ("problem", "question", "text", "prompt")
_TESTS_COLUMNS = ("tests", "input_output", "test_cases", "verification_info")
_INTEGER = re.compile(r"-?\d{1,18}")
_IS_CALL = {"stdin_stdout": False, "stdin": False, "function_call": True, "functional": True}  # by the type of a pair


def code_row(row: Row, where: str) -> dict[str, Any]:
    """The row in one form; ``DatasetError`` names ``where`` and what is missing.

    >>> code_row({"problem": "Add.", "tests": [{"input": "1 2", "output": "3"}]}, "row 1")["tests"]
    {'kind': 'stdin', 'cases': [{'stdin': '1 2', 'expected': '3'}]}
    """
    normal: dict[str, Any] = {"problem": _code_problem(row, where), "tests": _tests(row, where)}
    solution = _solution(row)
    if solution is not None:
        normal["solution"] = solution
    if isinstance(row.get("solutions"), list) and len(row["solutions"]) > 1:
        normal["solutions"] = [text for text in row["solutions"] if isinstance(text, str) and text.strip()]
    if isinstance(row.get("starter_code"), str) and row["starter_code"].strip():
        normal["starter_code"] = row["starter_code"]
    if normal["tests"]["kind"] == "call":
        _as_annotated(normal["tests"], normal, where)
        if "integer_keys" in normal["tests"] and _has_text_keys(normal["tests"], normal):
            del normal["tests"]["integer_keys"]
        normal["tests"]["entry_point"] = _called(normal["tests"]["entry_point"], normal)
    if normal["tests"]["kind"] == "assert" and solution is not None:
        names = defined_by(solution, normal["tests"]["tests"])
        known = () if any(hasattr(builtins, name) for name in names) else ("", *names)
        if len(names) > 1 or (names and normal["tests"]["entry_point"] not in known):
            normal["tests"]["names"] = list(names)
    return normal


_SOLUTION = re.compile(r"^[^\S\n]*+class Solution\b", re.MULTILINE)


def _called(name: str, normal: Row) -> str:
    r"""The entry point: a method of ``Solution`` where the problem, its starter code or its solution has that class.

    >>> _called("add", {"starter_code": "class Solution:\n    def add(self, a, b):"})
    'Solution().add'
    """
    method = re.compile(rf"^[^\S\n]++def {re.escape(name)}\(", re.MULTILINE)
    texts = (normal.get(column, "") for column in ("problem", "starter_code", "solution"))
    is_method = any((begun := _SOLUTION.search(text)) and method.search(text, begun.end()) for text in texts)
    return f"Solution().{name}" if is_method else name


_KINDS = {"int": int | float, "float": int | float, "bool": int | float, "str": str, "list": list, "tuple": list,
          "set": list, "dict": dict}  # fmt: skip


def _as_annotated(tests: Tests, normal: Row, where: str) -> None:
    """Leave out readings of a value that the row's heads of the function exclude; refuse a function without a value."""
    head = re.compile(rf"\bdef {re.escape(tests['entry_point'])}\([^()]*+\)\s*+->([^:\n]*+):")
    found = (head.search(normal.get(column, "")) for column in ("problem", "starter_code", "solution"))
    heads = [_expression(said[1]) for said in found if said]
    for case in tests["cases"]:
        readings = [case["expected"], *case.pop("also", [])]
        if any(isinstance(said, ast.Constant) and said.value is None for said in heads) and None not in readings:
            raise DatasetError(
                f"{where}: {tests['entry_point']} returns None and changes its argument, and only returned values are"
                " judged; give tests as code that look at the argument"
            )
        left = [value for value in readings if all(_fits(value, said) for said in heads)] or readings
        case["expected"], also = left[0], left[1:]
        case.update({"also": also} if also else {})


def _expression(text: str) -> ast.expr | None:
    try:
        said = ast.parse(text.strip(), mode="eval").body
        return _expression(said.value) if isinstance(said, ast.Constant) and isinstance(said.value, str) else said
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _fits(value: Any, said: ast.expr | None) -> bool:
    """Whether a JSON value can be of an annotated type; of a type that is not known, when it is no text."""
    if isinstance(said, ast.Constant) and said.value is None:
        return value is None
    if isinstance(said, ast.BinOp):
        return _fits(value, said.left) or _fits(value, said.right)
    outer, parts = said, []
    if isinstance(said, ast.Subscript):
        outer, parts = said.value, said.slice.elts if isinstance(said.slice, ast.Tuple) else [said.slice]
    name = (outer.id if isinstance(outer, ast.Name) else outer.attr if isinstance(outer, ast.Attribute) else "").lower()
    if name in ("optional", "union"):
        return (name == "optional" and value is None) or any(_fits(value, part) for part in parts)
    kind = _KINDS.get(name)
    if kind is None:
        return name == "any" or not isinstance(value, str)
    if name in ("list", "set") and parts and isinstance(value, list):
        return all(_fits(item, parts[0]) for item in value)
    return isinstance(value, kind)


def _code_problem(row: Row, where: str) -> str:
    for name in _CODE_PROBLEM_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            # HumanEval's prompt is the beginning of the program: its indentation counts.
            return str(row[name]).strip("\n") if "entry_point" in row else str(row[name]).strip()
    raise DatasetError(f"{where}: no problem: looked for {', '.join(_CODE_PROBLEM_COLUMNS)} in {sorted(row)}")


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
    for name in _TESTS_COLUMNS:
        if row.get(name) is not None:
            return _of_any_shape(_parsed(row[name], f"{where}, {name}"), f"{where}, {name}", _named_by(row))
    raise DatasetError(
        f"{where}: no tests: looked for {', '.join(_TESTS_COLUMNS)}, test and test_list in {sorted(row)}"
    )


def _of_any_shape(found: Any, where: str, name: str) -> Tests:
    """``name``: the function that the row calls, if named outside its tests."""
    if isinstance(found, list) and found:
        return _of_pairs(found, where, name)
    if isinstance(found, Mapping):
        if isinstance(found.get("functional"), str):
            return {"kind": "assert", "tests": found["functional"], "entry_point": "", "preamble": ""}
        if "inputs" in found and "outputs" in found:
            return _of_columns(found, where, name)
        if "test_cases" in found:
            language = found.get("language", "python")
            if language != "python":
                raise DatasetError(f"{where}: the programs are {language}; only python is judged")
            return _of_any_shape(_parsed(found["test_cases"], where), where, name)
    raise DatasetError(f"{where}: neither pairs of input and output, nor inputs and outputs, nor functional test code")


def _of_pairs(pairs: list[Any], where: str, name: str) -> Tests:
    names, kinds = set(), set()
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, Mapping) or "input" not in pair or "output" not in pair:
            raise DatasetError(f"{where}, case {number}: needs input and output")
        named = _named_by(pair)
        kind = str(pair.get("type") or pair.get("testtype") or "")
        if kind and kind not in _IS_CALL:
            raise DatasetError(f"{where}, case {number}: type {kind!r}; there are {', '.join(_IS_CALL)}")
        is_call = _IS_CALL[kind] if kind else bool(named or name)
        kinds.add(is_call)
        names.add(named or name if is_call else "")
    if len(kinds) > 1:
        raise DatasetError(f"{where}: some cases read stdin and others call a function")
    if len(names) > 1:
        raise DatasetError(f"{where}: the cases call different functions: {', '.join(sorted(names))}")
    inputs, outputs = [pair["input"] for pair in pairs], [pair["output"] for pair in pairs]
    if not kinds.pop():
        return _stdin(inputs, outputs, where)
    if not (called := names.pop()):
        raise DatasetError(f"{where}: the cases call a function and do not name it: no fn_name, no metadata.func_name")
    return _calls(called, inputs, outputs, where)


def _of_columns(found: Mapping[str, Any], where: str, name: str) -> Tests:
    inputs, outputs = found["inputs"], found["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise DatasetError(f"{where}: inputs and outputs must be lists of one length, not empty")
    called = _named_by(found) or name
    return _calls(called, inputs, outputs, where) if called else _stdin(inputs, outputs, where)


def _named_by(part: Row) -> str:
    """The function that a pair, a pair of columns or a row names; empty when none is named."""
    metadata = part.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = _json(metadata)
        except ValueError:  # free text about the row
            metadata = None
    nested = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(part.get("fn_name") or nested or "")


def _stdin(inputs: list[Any], outputs: list[Any], where: str) -> Tests:
    cases = [
        {"stdin": _text(given, where, number), "expected": _text(expected, where, number)}
        for number, (given, expected) in enumerate(zip(inputs, outputs, strict=True), start=1)
    ]
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


def _calls(name: str, inputs: list[Any], outputs: list[Any], where: str) -> Tests:
    args = [_args(given, f"{where}, case {number}") for number, given in enumerate(inputs, start=1)]
    # APPS and its descendants put every returned value into a list of one; a row in which not all are such lists does not.
    wrapped = all(isinstance(expected, list) and len(expected) == 1 for expected in outputs)
    texts = [expected for expected in outputs if isinstance(expected, str)]
    are_json = all(map(_is_json, texts))  # else all of them are the texts that the function returns
    readings = [_readings(expected, are_json)[:: -1 if wrapped else 1] for expected in outputs]
    cases: list[dict[str, Any]] = [
        {"args": given, "expected": value, **({"also": also} if also else {})}
        for given, (value, *also) in zip(args, readings, strict=True)
    ]
    tests: Tests = {"kind": "call", "entry_point": name, "cases": cases}
    if _integer_keys(args):
        tests["integer_keys"] = True
    return tests


def _integer_keys(value: Any) -> set[str]:
    """The keys of the dictionaries in a value whose keys are all integers."""
    keys: set[str] = set()
    left = [value]
    while left:
        held = left.pop()
        if isinstance(held, dict) and all(_INTEGER.fullmatch(key) for key in held):
            keys.update(held)
        left.extend(held.values() if isinstance(held, dict) else held if isinstance(held, list) else ())
    return keys


_KEY = re.compile(
    r"""(?:\[|\b(?:get|pop)\()\s*+["'](-?\d{1,18})["']\s*+[\],)]|["'](-?\d{1,18})["'](?:\s++not)?\s++in\b"""
)


def _has_text_keys(tests: Tests, normal: Row) -> bool:
    """Whether the row says that keys of integers are texts: the function's head by a type, or its solution by a key."""
    head = re.compile(rf"\bdef {re.escape(tests['entry_point'])}\([^()]*(?i:\bdict|mapping)\[str\b")
    named = {key for found in _KEY.findall(normal.get("solution", "")) for key in found}
    return any(head.search(normal.get(column, "")) for column in ("problem", "starter_code", "solution")) or bool(
        named & _integer_keys([case["args"] for case in tests["cases"]])
    )


def _args(given: Any, where: str) -> list[Any]:
    if isinstance(given, list):
        return given
    if not isinstance(given, str):
        raise DatasetError(f"{where}: the arguments are a {type(given).__name__}; they must be a list or text")
    try:
        return [_json(line) for line in given.split("\n") if line.strip()]
    except ValueError as error:
        raise DatasetError(f"{where}: the arguments are not one JSON value per line: {error}") from None


def _readings(expected: Any, are_json: bool) -> list[Any]:
    """The values that an output may mean, the likeliest first.

    >>> _readings("[4]", True), _readings("4", False), _readings([[1, 2]], True)
    ([[4], 4, '[4]'], ['4'], [[[1, 2]], [1, 2]])
    """
    value = _json(expected) if isinstance(expected, str) and are_json else expected
    held = value if isinstance(value, list) and len(value) == 1 else []
    return [value, *held, *([expected] if isinstance(expected, str) and not isinstance(value, str) else [])]


def _is_json(text: str) -> bool:
    try:
        _json(text)
    except ValueError:
        return False
    return True


def _parsed(value: Any, where: str) -> Any:
    """The value of a text with JSON or a Python literal; returns other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return _json(value)
    except ValueError as error:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise DatasetError(f"{where}: not valid JSON: {error}") from None


def _json(text: str) -> Any:
    """Raises ``ValueError`` also for values that other JSON parsers refuse: NaN, infinities and bottomless nesting."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _solution(row: Row) -> str | None:
    if isinstance(row.get("canonical_solution"), str):
        return str(row.get("prompt", "")) + str(row["canonical_solution"])
    solutions = row.get("solutions")
    first = solutions[0] if isinstance(solutions, list) and solutions else solutions
    for found in (row.get("solution"), row.get("code"), row.get("gold_standard_solution"), first):
        if isinstance(found, str) and found.strip():
            return program_of(found)
    return None
