"""The table of times in the README of each package equals the constants of its code."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services"
PACKAGES = sorted(path.parent.name for path in SERVICES.glob("*/__init__.py"))
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*_S")
ROW = re.compile(r"^\| `([\w/.]+)` `(\w+)` \| ([\d.]+) \| \S.*\|$", re.MULTILINE)
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

Times = dict[tuple[str, str], float]


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its_value in zip(target.elts, value.elts, strict=True):
            yield from assigned(one, its_value)
    elif isinstance(target, ast.Name):
        yield target.id, value


def assignments(source: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            yield from assigned(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from assigned(node.target, node.value)


def number(value: ast.expr) -> float | None:
    """The value of a number, or of arithmetic with numbers alone; None for another expression."""
    if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
        return float(value.value)
    if isinstance(value, ast.BinOp) and type(value.op) in ARITHMETIC:
        left, right = number(value.left), number(value.right)
        return None if left is None or right is None else ARITHMETIC[type(value.op)](left, right)
    return None


def times(source: str) -> dict[str, float]:
    """Numeric constants of a module with names that end in ``_S``, without rates, which end in ``_PER_S``.

    A time that is computed from another is an error: the use of the other has the arithmetic.
    """
    found = {}
    for name, value in assignments(source):
        if CONSTANT.fullmatch(name) and not name.endswith("_PER_S"):
            known = number(value)
            if known is not None:
                found[name] = known
            elif isinstance(value, ast.BinOp):
                raise AssertionError(f"{name} = {ast.unparse(value)} has no value of its own for a table of times")
    return found


def found_in(folder: Path) -> Times:
    return {
        (path.relative_to(folder).as_posix(), name): value
        for path in sorted(folder.rglob("*.py"))
        for name, value in times(path.read_text(encoding="utf-8")).items()
    }


def listed_in(page: Path) -> Times:
    """The rows of the table. A folder that has the name of one of the repository begins with ``./``."""
    rows = ROW.findall(page.read_text(encoding="utf-8"))
    listed = {(file.removeprefix("./"), name): float(value) for file, name, value in rows}
    assert len(listed) == len(rows), f"{page} has two rows of one constant"
    return listed


def problems(found: Times, listed: Times) -> list[str]:
    """Differences between the constants of the code and the rows of the table."""
    return [
        *(f"no row: {file} {name} = {found[file, name]:g}" for file, name in sorted(found.keys() - listed.keys())),
        *(f"no constant: {file} {name}" for file, name in sorted(listed.keys() - found.keys())),
        *(
            f"{key[0]} {key[1]}: {found[key]!r} in the code, {listed[key]!r} in the table"
            for key in sorted(found.keys() & listed.keys())
            if found[key] != listed[key]
        ),
    ]


def test_times_of_a_module_are_found() -> None:
    source = (
        "A_S = 1.5  # x\nB, C2_S = 2, 3\n_G_S: float = 6\nF_S = 2 * 60.0\n"
        "MOST_REPORTS_PER_S = 4.0\nD = 5\nE_S = A_S\nLONG_S = {'a': 1.0}\n"
    )
    assert times(source) == {"A_S": 1.5, "C2_S": 3.0, "_G_S": 6.0, "F_S": 120.0}


def test_a_time_that_is_computed_from_another_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"B_S = 4 \* A_S"):
        times("A_S = 1.5\nB_S = 4 * A_S\n")


def test_each_difference_is_found() -> None:
    found = {("a.py", "A_S"): 1.0, ("a.py", "B_S"): 2.0}
    assert problems(found, found) == []
    assert problems(found, {("a.py", "A_S"): 1.0}) == ["no row: a.py B_S = 2"]
    assert problems({("a.py", "A_S"): 1.0}, found) == ["no constant: a.py B_S"]
    assert problems(found, {**found, ("a.py", "B_S"): 3.0}) == ["a.py B_S: 2.0 in the code, 3.0 in the table"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_has_every_time_of_the_package_with_its_value(package: str) -> None:
    folder = SERVICES / package
    found = found_in(folder)
    assert found, f"{folder} has no times"
    assert problems(found, listed_in(folder / "README.md")) == []
