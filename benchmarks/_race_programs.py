"""Reward and tool of the race inside the process that asks: no sandbox, no time limit, standard library only.

Both sides of ``race.py`` use them where the race is "in process". Programs that could run for long in a process without
a limit (loops, powers, shifts, imports) are refused before the run: no right program of these tasks has any of these.
"""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Mapping
from types import CodeType
from typing import Any

_REFUSED = (
    ast.While, ast.For, ast.AsyncFor, ast.comprehension, ast.Pow, ast.LShift, ast.Import, ast.ImportFrom,
    ast.Attribute, ast.ClassDef, ast.AsyncFunctionDef,
)  # fmt: skip
_BUILTINS = {"print": print, "int": int, "str": str, "abs": abs, "len": len}


class Refused(Exception):
    """The program could run for long."""


def passes(task: Mapping[str, Any], completion: str) -> float:
    """1 when the program of a completion passes every case of its task, else 0.

    >>> tests = {"entry_point": "f", "cases": [{"args": [2], "expected": 5}]}
    >>> passes({"tests": tests}, "def f(x): return x+3"), passes({"tests": tests}, "def f(x): return x")
    (1.0, 0.0)
    """
    tests = task["tests"]
    names: dict[str, Any] = {"__builtins__": _BUILTINS}
    try:
        exec(_compiled(completion), names)
        function = names[tests["entry_point"]]
        return float(all(function(*case["args"]) == case["expected"] for case in tests["cases"]))
    except Exception:  # noqa: BLE001 - whatever a program raises is its own verdict
        return 0.0


def run_tool(code: str) -> str:
    """The output of the program, then its error.

    >>> run_tool("print(12*12)"), run_tool("print(2**9)")
    ('144', 'Refused: Pow')
    """
    printed = io.StringIO()
    try:
        compiled = _compiled(code)
        with contextlib.redirect_stdout(printed):
            exec(compiled, {"__builtins__": _BUILTINS})
    except Exception as error:  # noqa: BLE001 - whatever a program raises is told to the policy
        return f"{printed.getvalue()}{type(error).__name__}: {error}".strip()
    return printed.getvalue().strip()


def _compiled(code: str) -> CodeType:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, _REFUSED):
            raise Refused(type(node).__name__)
    return compile(tree, "<program>", "exec")
