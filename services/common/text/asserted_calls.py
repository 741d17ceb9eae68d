"""Reads test code as calls of the program and conditions on their values, where its text gives both as literals.

``assert candidate(1, 2) == 3`` is a call and a value: the judge compares outside of the program's process, as for function
calls. Tests of which every check has such a shape become ``AssertedCall``s. All others are opaque: they can be judged only
in the process of the program, which can then forge the verdict.

    assert candidate(...) == value, in [value, ...]    value == candidate(...)        candidate(...) is None / True / False
    assert candidate(...)                              assert not candidate(...)
    assert abs(candidate(...) - value) < tolerance     math.isclose(candidate(...), value, rel_tol=..., abs_tol=...)
    assert is_same_list(candidate(...), value), is_same_tree likewise
    sorted(candidate(...)) == [...], and likewise the other functions of ``APPLIED``
    self.assertEqual(candidate(...), value), and its like, in classes of unittest

in ``check``, test functions, and loops over literals; names may stand for literals, and a name for a call that one check
uses.
"""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.common.text.assert_tests import TestNames, is_main, is_test_case, is_test_function, names_of, parsed
from services.common.text.literals import NotLiteralError, tree_of

# Functions of one argument that a test applies to the returned value. They are applied in the program's process: the program
# chooses their result as freely as the value itself.
APPLIED = ("list", "tuple", "set", "frozenset", "sorted", "dict", "len", "str", "int", "float", "abs", "sum", "min",
           "max")  # fmt: skip
_MOST_STEPS = 10_000  # of all loops together
_MOST_NODES = 300_000  # of all expressions with names
_Bound = dict[str, ast.expr]


class Relation(enum.StrEnum):
    EQUAL = "equal"
    IN = "in"
    IDENTICAL = "identical"  # to None, True or False
    TRUE = "true"
    FALSE = "false"
    NEAR = "near"  # less than ``tolerance`` away
    CLOSE = "close"  # ``math.isclose``


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertedCall:
    """One call and the condition on its value; all values are trees of plain data (``literals``)."""

    entry_point: str
    args: Any
    kwargs: Any
    applied: tuple[str, ...] = ()  # of ``APPLIED``, in order, to the value
    relation: Relation
    expected: Any = None
    tolerance: float = 0.0
    relative: float = 0.0  # of CLOSE


@functools.lru_cache(maxsize=512)  # a task's tests come again with every completion
def asserted_calls(
    tests: str, entry_point: str = "", preamble: str = "", names: tuple[str, ...] = ()
) -> tuple[AssertedCall, ...] | None:
    """The calls; None for opaque tests.

    Raises:
        UnusableTestsError: tests that cannot judge any program.
    """
    reader = _Reader(names_of(tests, entry_point, preamble, names))
    try:
        reader.read_scope(parsed(tests).body, reader.module)
    except (NotLiteralError, RecursionError):
        return None
    return tuple(reader.calls) or None


class _Reader:
    def __init__(self, names: TestNames) -> None:
        self._names = names
        self.calls: list[AssertedCall] = []
        self.module: _Bound = {}
        self._functions = set[str]()  # of the tests, that are read at their definition
        self._num_steps = self._num_nodes = 0

    def read_scope(self, statements: list[ast.stmt], bound: _Bound, owner: str = "") -> None:
        """Read the module, a function or a method. Raises ``NotLiteralError``."""
        self._read(statements, bound, owner)
        if any(map(self._is_once, bound.values())):
            raise NotLiteralError("a call that no check uses")

    def _read(self, statements: list[ast.stmt], bound: _Bound, owner: str) -> None:
        """``bound``: names that stand for literals or calls; ``owner``: the name of a test case in its method."""
        for statement in statements:
            match statement:
                case ast.Assert(test=ast.Constant(value=value)) if value:
                    pass
                case ast.Assert(test=test):
                    self.calls.append(self._condition(self._resolved(test, bound)))
                case ast.FunctionDef(name=name, body=body, decorator_list=[]) if bound is self.module and _is_run(
                    statement
                ):
                    self._functions.add(name)
                    self.read_scope(body, dict(bound))
                case ast.ClassDef(name=name, body=body) if bound is self.module and is_test_case(statement):
                    self._functions.add(name)
                    for method in body:
                        self._method(method, dict(bound))
                case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in self._functions or name == "check":
                    pass
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=check), args=args, keywords=keywords)) if name == owner:  # fmt: skip
                    parts = [self._resolved(arg, bound) for arg in args]
                    self.calls.append(self._unittest(check, parts, keywords))
                case ast.Expr(value=ast.Constant() | ast.Name()) | ast.Pass():
                    pass
                case ast.Expr(value=ast.Call(func=function)) if ast.unparse(function) == "unittest.main":
                    pass
                case ast.If(body=body, orelse=[]) if is_main(statement):
                    self._read(body, bound, owner)
                case ast.For(target=target, iter=values, body=body, orelse=[]):
                    for item in _listed(self._resolved(values, bound)):
                        self._num_steps += 1
                        if self._num_steps > _MOST_STEPS:
                            raise NotLiteralError("too many steps")
                        self._bind(target, item, bound)
                        self._read(body, bound, owner)
                case ast.Assign(targets=[target], value=value):
                    given = self._resolved(value, bound)
                    if not self._is_program(given):
                        tree_of(given)
                    self._bind(target, given, bound)
                case ast.Import() | ast.ImportFrom():
                    _refuse_other_functions(statement)
                case _:
                    raise NotLiteralError("more than checks")

    def _method(self, method: ast.stmt, bound: _Bound) -> None:
        match method:
            case ast.FunctionDef(name=name, args=ast.arguments(args=[owner], defaults=[]), decorator_list=[]) if (
                name.startswith("test")
            ):
                self.read_scope(method.body, bound, owner.arg)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise NotLiteralError("a test case with more than tests")

    # -- names and loops ------------------------------------------------------------------------------------------

    def _bind(self, target: ast.expr, value: ast.expr, bound: _Bound) -> None:
        match target, value:
            case ast.Name(id=name), _ if name not in self._names.aliases | self._names.remote:
                if name in bound and (self._is_once(bound[name]) or (bound is self.module and self._functions)):
                    raise NotLiteralError("a name for several values, of which a function may use any")
                bound[name] = value
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))):
                if len(targets) != len(values):
                    raise NotLiteralError("another number of names than of values")
                for one, part in zip(targets, values, strict=True):
                    self._bind(one, part, bound)
            case _:
                raise NotLiteralError("an assignment of another kind")

    def _resolved(self, node: ast.expr, bound: _Bound) -> ast.expr:
        """The expression with literals in place of names. A name of a call stands for its call once: a second use would be
        the value of a second call."""
        if not bound:
            return node
        is_once = self._is_once

        class Resolver(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.expr:
                value = bound.get(name.id, name)
                if is_once(value):
                    del bound[name.id]
                return value

        resolved: ast.expr = Resolver().visit(copy.deepcopy(node))
        self._num_nodes += sum(1 for _ in itertools.islice(ast.walk(resolved), _MOST_NODES))
        if self._num_nodes > _MOST_NODES:  # literals within literals
            raise NotLiteralError("too many literals")
        return resolved

    # -- conditions -----------------------------------------------------------------------------------------------

    def _condition(self, test: ast.expr) -> AssertedCall:
        match test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                if self._called(left) is not None:
                    return self._case(left, Relation.EQUAL, tree_of(right))
                return self._case(right, Relation.EQUAL, tree_of(left))
            case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.List() | ast.Tuple() as right]):
                return self._case(left, Relation.IN, tree_of(right))
            case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None | True | False as value)]):
                return self._case(left, Relation.IDENTICAL, value)
            case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE() as sign], comparators=[ast.Constant(value=float() | int() as most)]):  # fmt: skip
                return self._near(left, float(most) if isinstance(sign, ast.Lt) else math.nextafter(most, math.inf))
            case ast.Call(func=ast.Name(id="is_same_list" | "is_same_tree"), args=[call, value], keywords=[]):
                return self._case(call, Relation.EQUAL, tree_of(value))
            case ast.Call(func=function, args=[left, right], keywords=keywords) if ast.unparse(function) in (
                "math.isclose",
                "isclose",
            ):
                return self._close(left, right, {keyword.arg or "": keyword.value for keyword in keywords})
            case ast.UnaryOp(op=ast.Not(), operand=call):
                return self._case(call, Relation.FALSE)
        return self._case(test, Relation.TRUE)

    def _unittest(self, check: str, args: list[ast.expr], keywords: list[ast.keyword]) -> AssertedCall:
        """A method of a test case; its message, where there is one, has no effect."""
        match check, args:
            case (
                ("assertEqual" | "assertListEqual" | "assertTupleEqual" | "assertSetEqual" | "assertDictEqual"),
                [left, right, *_],
            ):
                return self._condition(ast.Compare(left, [ast.Eq()], [right]))
            case "assertTrue", [test, *_]:
                return self._condition(test)
            case "assertFalse", [test, *_]:
                return self._case(test, Relation.FALSE)
            case "assertIsNone", [test, *_]:
                return self._case(test, Relation.IDENTICAL, None)
            case "assertAlmostEqual", [left, right] if not keywords:
                apart = ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)], [])
                return self._near(apart, math.nextafter(0.5e-7, 1))
        raise NotLiteralError("a check of another kind")

    def _near(self, left: ast.expr, tolerance: float) -> AssertedCall:
        match left:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=call, op=ast.Sub(), right=value)], keywords=[]):
                if self._called(call) is not None:
                    return self._case(call, Relation.NEAR, tree_of(value), tolerance)
                return self._case(value, Relation.NEAR, tree_of(call), tolerance)
        raise NotLiteralError("a comparison of another kind")

    def _close(self, left: ast.expr, right: ast.expr, tolerances: dict[str, ast.expr]) -> AssertedCall:
        relative, absolute = (_real(tolerances.pop(name, ast.Constant(default)))
                              for name, default in (("rel_tol", 1e-9), ("abs_tol", 0.0)))  # fmt: skip
        if tolerances:
            raise NotLiteralError("isclose with another argument")
        if self._called(left) is None:
            left, right = right, left
        return self._case(left, Relation.CLOSE, tree_of(right), absolute, relative)

    def _called(self, node: ast.expr) -> tuple[ast.Call, tuple[str, ...]] | None:
        """A call of the program and the functions that are applied to its value; None for another expression."""
        match node:
            case ast.Call() if self._is_program(node):
                return node, ()
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in APPLIED:
                called = self._called(inner)
                return (called[0], (*called[1], name)) if called is not None else None
        return None

    def _case(
        self, node: ast.expr, relation: Relation, expected: Any = None, tolerance: float = 0.0, relative: float = 0.0
    ) -> AssertedCall:
        called = self._called(node)
        if called is None:
            raise NotLiteralError("no call of the program")
        call, applied = called
        entry_point = ast.unparse(call.func)
        if any(keyword.arg is None for keyword in call.keywords):
            raise NotLiteralError("keyword arguments from a dict")
        return AssertedCall(
            entry_point=self._names.entry_point if entry_point in self._names.aliases else entry_point,
            args=["t", *map(tree_of, _unpacked(call.args))],
            kwargs=["d", *(part for keyword in call.keywords for part in (keyword.arg, tree_of(keyword.value)))],
            applied=applied,
            relation=relation,
            expected=expected,
            tolerance=tolerance,
            relative=relative,
        )

    def _is_once(self, node: ast.AST) -> bool:
        """A call for one use; an object of ``Solution`` is made anew for each call of a method."""
        return self._is_program(node) and ast.unparse(node) != "Solution()"

    def _is_program(self, node: ast.AST) -> bool:
        """A call of the program's: by ``candidate``, or by a name that is the program's."""
        if not isinstance(node, ast.Call):
            return False
        match node.func:
            case ast.Name(id=name):
                return name in self._names.aliases or name in self._names.remote
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name), args=[], keywords=[])):
                return name in self._names.remote
        return False


def _is_run(function: ast.FunctionDef) -> bool:
    """``check`` with the program as its argument, or a test function."""
    return is_test_function(function) or (
        function.name == "check" and len(function.args.args) == 1 and not function.args.defaults
    )


def _refuse_other_functions(statement: ast.Import | ast.ImportFrom) -> None:
    for alias in statement.names:
        name = alias.asname or alias.name
        is_close = name == "isclose" and isinstance(statement, ast.ImportFrom) and statement.module == "math"
        if hasattr(builtins, name) or (name in ("isclose", "math") and alias.name != "math" and not is_close):
            raise NotLiteralError(f"another function under the name {name}")


def _listed(values: ast.expr) -> list[ast.expr]:
    """The parts of a literal over which a loop goes."""
    match values:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return items
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
            bounds = [tree_of(arg) for arg in args]
            if not all(type(bound) is int for bound in bounds):
                raise NotLiteralError("a range of other values")
            try:
                numbers = range(*bounds)
            except (TypeError, ValueError) as error:
                raise NotLiteralError(str(error)) from None
            if len(numbers) > _MOST_STEPS:
                raise NotLiteralError("a range that is too long")
            return [ast.Constant(number) for number in numbers]
        case ast.Call(func=ast.Name(id="zip"), args=args, keywords=[]):
            return [ast.Tuple(list(parts)) for parts in zip(*map(_listed, args), strict=False)]
        case ast.Call(func=ast.Name(id="enumerate"), args=[arg], keywords=[]):
            return [ast.Tuple([ast.Constant(number), item]) for number, item in enumerate(_listed(arg))]
        case ast.Call(func=ast.Attribute(value=ast.Dict(keys=keys, values=items), attr="items"), args=[]):
            return [ast.Tuple([key, item]) for key, item in zip(keys, items, strict=True) if key is not None]
    raise NotLiteralError("a loop over other values")


def _unpacked(args: list[ast.expr]) -> Iterator[ast.expr]:
    for arg in args:
        if isinstance(arg, ast.Starred):
            yield from _listed(arg.value)
        else:
            yield arg


def _real(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=float() | int() as value):
            return float(value)
    raise NotLiteralError("a tolerance that is no number")
