"""Reads assert-style tests: the calls and their expected values, where the text gives them as literals.

``assert candidate(1, 2) == 3`` is a call and a value, so the judge treats the assert like a function call: the value
stays here. Tests of which every assert has such a shape become ``DirectAssert``s; any others run as code
(``judge.interactive_judge``).

    assert candidate(...) == value        value == candidate(...)        candidate(...) is None / True / False
    assert candidate(...)                 assert not candidate(...)
    assert abs(candidate(...) - value) < tolerance
    assert is_same_list(candidate(...), value), is_same_tree likewise
"""

from __future__ import annotations

import ast
import enum
import functools
from dataclasses import dataclass
from typing import Any

from services.common.text.assert_tests import TestNames, names_of, parsed
from services.envgateway.judge.literals import NotLiteralError, tree_of
from services.envgateway.judge.records import AssertTests
from services.envgateway.judge.values import ValueRule, distance, equal, shown, truth

_STRICT = ValueRule(strict=True)


class Relation(enum.StrEnum):
    EQUAL = "equal"
    IDENTICAL = "identical"  # to None, True or False
    TRUE = "true"
    FALSE = "false"
    NEAR = "near"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAssert:
    """One call and the condition on its value; all values are trees of plain data."""

    entry_point: str
    args: Any
    kwargs: Any
    relation: Relation
    expected: Any = None
    tolerance: float = 0.0

    def failure(self, actual: Any) -> str:
        """Why a returned value is wrong; empty when the value is right."""
        match self.relation:
            case Relation.EQUAL:
                right = equal(self.expected, actual, _STRICT)
            case Relation.IDENTICAL:
                right = self.expected is actual
            case Relation.TRUE:
                right = truth(actual) is True
            case Relation.FALSE:
                right = truth(actual) is False
            case Relation.NEAR:
                apart = distance(self.expected, actual)
                right = apart is not None and apart < self.tolerance
        if right:
            return ""
        wanted = shown(self.expected) if self.relation not in (Relation.TRUE, Relation.FALSE) else self.relation.value
        return f"expected {wanted}, got {shown(actual)}"


def names(tests: AssertTests) -> TestNames:
    """The values of the names in the tests; raises ``UnusableTestsError``."""
    return names_of(tests.tests, tests.entry_point, tests.preamble, tests.names)


@functools.lru_cache(maxsize=512)  # a task's tests come again with every completion
def read(tests: AssertTests) -> tuple[DirectAssert, ...] | None:
    """The calls, or None when the tests have to be run to know them.

    Raises:
        UnusableTestsError: tests that cannot judge any program.
    """
    meant = names(tests)
    try:
        cases = tuple(_Reader(meant).read(parsed(tests.tests).body))
    except NotLiteralError:
        return None
    return cases or None


def num_asserts(tests: AssertTests) -> int:
    """Number of asserts in the text."""
    return sum(isinstance(node, ast.Assert) for node in ast.walk(parsed(tests.tests)))


class _Reader:
    def __init__(self, names: TestNames) -> None:
        self._names = names

    def read(self, statements: list[ast.stmt]) -> list[DirectAssert]:
        cases: list[DirectAssert] = []
        for statement in statements:
            match statement:
                case ast.Assert(test=ast.Constant(value=value)) if value:
                    continue
                case ast.Assert(test=test):
                    cases.append(self._assert(test))
                case ast.FunctionDef(name="check", args=ast.arguments(args=[_], defaults=[])):
                    cases += self.read(statement.body)
                case ast.Expr(value=ast.Call(func=ast.Name(id="check"))) | ast.Expr(value=ast.Constant() | ast.Name()):
                    continue
                case ast.Assign(value=value):
                    tree_of(value)  # a description; otherwise the name would appear in an assert of unknown form
                case ast.Import() | ast.ImportFrom() | ast.Pass():
                    continue
                case _:
                    raise NotLiteralError("more than asserts")
        return cases

    def _assert(self, test: ast.expr) -> DirectAssert:
        match test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                if self._is_program(left):
                    return self._case(left, Relation.EQUAL, tree_of(right))
                return self._case(right, Relation.EQUAL, tree_of(left))
            case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None | True | False as value)]):
                return self._case(left, Relation.IDENTICAL, value)
            case ast.Compare(left=left, ops=[ast.Lt()], comparators=[ast.Constant(value=float() | int() as tolerance)]):
                return self._near(left, float(tolerance))
            case ast.Call(func=ast.Name(id="is_same_list" | "is_same_tree"), args=[call, value], keywords=[]):
                return self._case(call, Relation.EQUAL, tree_of(value))
            case ast.UnaryOp(op=ast.Not(), operand=call):
                return self._case(call, Relation.FALSE)
        return self._case(test, Relation.TRUE)

    def _near(self, left: ast.expr, tolerance: float) -> DirectAssert:
        match left:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=call, op=ast.Sub(), right=value)], keywords=[]):
                if self._is_program(call):
                    return self._case(call, Relation.NEAR, tree_of(value), tolerance)
                return self._case(value, Relation.NEAR, tree_of(call), tolerance)
        raise NotLiteralError("a comparison of another kind")

    def _case(self, call: ast.expr, relation: Relation, expected: Any = None, tolerance: float = 0.0) -> DirectAssert:
        if not isinstance(call, ast.Call) or not self._is_program(call):
            raise NotLiteralError("no call of the program")
        entry_point = ast.unparse(call.func)
        if any(keyword.arg is None for keyword in call.keywords):
            raise NotLiteralError("keyword arguments from a dict")
        return DirectAssert(
            entry_point=self._names.entry_point if entry_point in self._names.aliases else entry_point,
            args=["t", *map(tree_of, call.args)],
            kwargs=["d", *(part for keyword in call.keywords for part in (keyword.arg, tree_of(keyword.value)))],
            relation=relation,
            expected=expected,
            tolerance=tolerance,
        )

    def _is_program(self, node: ast.expr) -> bool:
        """A call of the program's: by ``candidate``, or by a name that is the program's."""
        if not isinstance(node, ast.Call):
            return False
        match node.func:
            case ast.Name(id=name):
                return name in self._names.aliases or name in self._names.remote
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name), args=[], keywords=[])):
                return name in self._names.remote
        return False
