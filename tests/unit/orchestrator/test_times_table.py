"""The table of times in the orchestrator's README equals the constants of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import services.orchestrator

SERVICE = Path(services.orchestrator.__file__).parent
CONSTANT = re.compile(r"_?[A-Z][A-Z_]*_S")
NOT_A_TIME = {"MOST_REPORTS_PER_S"}  # a rate
ROW = re.compile(r"^\| `([\w/.]+)` `(\w+)` \| ([\d.]+) \| \S.*\|$", re.MULTILINE)


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its_value in zip(target.elts, value.elts, strict=True):
            yield from assigned(one, its_value)
    elif isinstance(target, ast.Name):
        yield target.id, value


def times(source: str) -> dict[str, float]:
    """Numeric constants of a module with names that end in ``_S``."""
    return {
        name: float(value.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for name, value in assigned(node.targets[0], node.value)
        if CONSTANT.fullmatch(name) and name not in NOT_A_TIME
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    }


def test_times_of_a_module_are_found() -> None:
    source = "A_S = 1.5  # x\nB, C_S = 2, 3\nMOST_REPORTS_PER_S = 4.0\nD = 5\nE_S = A_S\n"
    assert times(source) == {"A_S": 1.5, "C_S": 3.0}


def test_the_readme_has_every_time_of_the_service_with_its_value() -> None:
    found = {
        (path.relative_to(SERVICE).as_posix(), name): value
        for path in SERVICE.rglob("*.py")
        for name, value in times(path.read_text()).items()
    }
    listed = {(file, name): float(value) for file, name, value in ROW.findall((SERVICE / "README.md").read_text())}
    assert listed == found
