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
uses. A name with more than one meaning, and an object that a second check uses after the program had it, are not read.
"""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.common.text.literals import NotLiteralError, tree_of
from services.common.text.programs import HARNESS_NAMES, TestNames, completed, is_main, names_of, parsed

# Functions of one argument that a test applies to the returned value. They are applied in the program's process: the program
# chooses their result as freely as the value itself.
APPLIED = ("list", "tuple", "set", "frozenset", "sorted", "dict", "len", "str", "int", "float", "abs", "sum", "min",
           "max")  # fmt: skip
_MOST_STEPS = 10_000  # of all loops together
_MOST_NODES = 300_000  # of all expressions with names
# The names that have a meaning here, and the imports that keep it.
_ORIGINS = {"math": {".math"}, "copy": {".copy"}, "unittest": {".unittest"}, "TestCase": {"unittest.TestCase"},
            "isclose": {"math.isclose"}, "inf": {"math.inf", "numpy.inf"}, "deepcopy": {"copy.deepcopy"},
            **{name: set[str]() for name in (*APPLIED, "range", "zip", "enumerate", "__name__", "*", *HARNESS_NAMES)}}  # fmt: skip
_FREE = {"len", "int", "sum", "min", "max"}  # a program's own function of the name is told apart
_EQUALITIES = {"assertEqual": ast.expr, "assertSetEqual": ast.Set, "assertDictEqual": ast.Dict}
_MUTABLE = (ast.List, ast.Set, ast.Dict, ast.Call)
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
    meant = names_of(tests, entry_point, preamble, names)
    reader = _Reader(meant)
    try:
        _refuse_other_meanings(parsed(tests), parsed(completed(preamble)), meant)
        reader.read_scope(parsed(tests).body, reader.module)
    except (ValueError, RecursionError):
        return None
    return tuple(reader.calls) or None


class _Reader:
    def __init__(self, names: TestNames) -> None:
        self._names = names
        self.calls: list[AssertedCall] = []
        self.module: _Bound = {}
        self._program = names.aliases | names.remote
        self._functions = set[str]()  # of the tests, that are read at their definition
        self._handed = dict[int, ast.AST]()  # objects that the program had, and may have changed
        self._num_steps = self._num_nodes = 0

    def read_scope(self, statements: list[ast.stmt], bound: _Bound, owner: str = "") -> None:
        """Read the module, a function or a method. Raises ``NotLiteralError``."""
        nodes = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)]
        for name in {owner, *(node.id for node in nodes if isinstance(node.ctx, ast.Store))}:
            bound.pop(name, None)  # local: no name of the module
        self._read(statements, bound, owner)
        if any(map(self._is_program, bound.values())):
            raise NotLiteralError("a call that no check uses")

    def _read(self, statements: list[ast.stmt], bound: _Bound, owner: str) -> None:
        """``bound``: names that stand for literals or calls; ``owner``: the name of a test case in its method."""
        for statement in statements:
            match statement:
                case ast.Assert(test=ast.Constant(value=value)) if value:
                    pass
                case ast.Assert(test=test):
                    given = self._resolved(test, bound)
                    self._refuse_changed([given])
                    self.calls.append(self._condition(given))
                case ast.FunctionDef(name=name, body=body, decorator_list=[], col_offset=0) if _is_run(statement):
                    self.read_scope(body, dict(bound))
                    self._functions.add(name)
                case ast.ClassDef(name=name, bases=[ast.Name(id="TestCase") | ast.Attribute(attr="TestCase")], keywords=[], body=body, decorator_list=[], col_offset=0):  # fmt: skip
                    self._functions.add(name)
                    for method in body:
                        self._method(method, dict(bound))
                case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if (
                    name in self._functions and {*map(ast.unparse, args)} <= {"candidate", self._names.entry_point}
                ):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=check), args=args, keywords=keywords)) if name == owner:  # fmt: skip
                    parts = [self._resolved(arg, bound) for arg in args]
                    self._refuse_changed(parts)
                    self.calls.append(self._unittest(check, parts, keywords))
                case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Import() | ast.ImportFrom():
                    pass
                case ast.Expr(value=ast.Name(id=name)) if hasattr(builtins, name):
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
                    self._bind(target, self._resolved(value, bound), bound)
                case _:
                    raise NotLiteralError("more than checks")

    def _method(self, method: ast.stmt, bound: _Bound) -> None:
        match method:
            case ast.FunctionDef(name=name, args=args, decorator_list=[]) if (
                name.startswith("test") and (owner := ast.unparse(args)).isidentifier() and owner not in self._program
            ):
                self.read_scope(method.body, bound, owner)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise NotLiteralError("a test case with more than tests")

    # -- names and loops ------------------------------------------------------------------------------------------

    def _bind(self, target: ast.expr, value: ast.expr, bound: _Bound) -> None:
        match target, value:
            case ast.Name(id=name), _ if name not in self._program:
                if not self._is_program(value):
                    tree_of(value)
                if name in bound and (self._is_program(bound[name]) or (bound is self.module and self._functions)):
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
        is_once = self._is_program

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

    def _refuse_changed(self, test: list[ast.expr]) -> None:
        """Refuse an object that the program had before, or has here and is compared with."""
        nodes = [node for part in test for node in ast.walk(part)]
        calls = [node for node in nodes if self._is_program(node)]
        handed = {id(node): node for call in calls for node in ast.walk(call) if isinstance(node, _MUTABLE)}
        uses = Counter(map(id, nodes))
        if self._handed.keys() & uses.keys() or any(uses[one] > 1 for one in handed):
            raise NotLiteralError("an object that the program may have changed")
        self._handed |= handed

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
        if not all(keyword.arg == "msg" and isinstance(keyword.value, ast.Constant) for keyword in keywords):
            raise NotLiteralError("a check with another argument")
        match check, args:
            case _, [left, right] | [left, right, ast.Constant()] if isinstance(right, _EQUALITIES.get(check, ())):
                return self._condition(ast.Compare(left, [ast.Eq()], [right]))
            case "assertTrue", [test] | [test, ast.Constant()]:
                return self._condition(test)
            case "assertFalse", [test] | [test, ast.Constant()]:
                return self._case(test, Relation.FALSE)
            case "assertIsNone", [test] | [test, ast.Constant()]:
                return self._case(test, Relation.IDENTICAL, None)
            case "assertAlmostEqual", [left, right]:
                apart = ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)], [])
                return self._near(apart, math.nextafter(0.5e-7, 1))
        raise NotLiteralError("a check of another kind")

    def _near(self, left: ast.expr, tolerance: float) -> AssertedCall:
        match left:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=call, op=ast.Sub(), right=value)], keywords=[]):
                if self._called(call) is None:
                    call, value = value, call
                expected = tree_of(value)
                if type(expected) is int or (isinstance(expected, list) and expected[0] == "f" and "x" in expected[1]):
                    return self._case(call, Relation.NEAR, expected, tolerance)
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

    def _is_program(self, node: ast.AST) -> bool:
        """A call of the program's: by ``candidate``, or by a name that is the program's."""
        if not isinstance(node, ast.Call):
            return False
        match node.func:
            case ast.Name(id=name):
                return name in self._program
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name), args=[], keywords=[])):
                return name in self._names.remote
        return False


def _is_run(function: ast.FunctionDef) -> bool:
    """``check`` with the program as its only argument, or a test function without any."""
    parameters = ast.unparse(function.args)
    return parameters.isidentifier() if function.name == "check" else function.name[:4] == "test" and not parameters


def _refuse_other_meanings(tests: ast.Module, preamble: ast.Module, meant: TestNames) -> None:
    """Refuse a name with several origins, a name of ``_ORIGINS`` with another, and the parameter of ``check`` outside."""
    found = defaultdict[str, set[str]](set)
    before = (ast.walk(part) if not hasattr(part, "name") else [ast.Name(part.name, ast.Store())]
              for part in preamble.body)  # fmt: skip
    for node in itertools.chain(ast.walk(tests), *before):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found[name].add("")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name].add(str(node.lineno))
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    name = alias.asname or alias.name.partition(".")[0]
                    found[name].add(f"{getattr(node, 'module', '')}.{alias.name}")
    outside = [part for part in tests.body if not (isinstance(part, ast.FunctionDef) and part.name == "check")]
    loaded = {node.id for part in outside for node in ast.walk(part) if isinstance(node, ast.Name)}
    if (
        any(len(found[name]) > 1 or not found[name] <= _ORIGINS.get(name, found[name]) for name in found)
        or any(found[name] - {""} for name in found.keys() & (meant.remote | meant.aliases))
        or _ORIGINS.keys() & (meant.remote - _FREE)
        or loaded & meant.aliases - {"candidate", meant.entry_point}
    ):
        raise NotLiteralError("a name with several meanings")


def _listed(values: ast.expr) -> list[ast.expr]:
    """The parts of a literal over which a loop goes."""
    match values:
        case ast.List(elts=items) | ast.Tuple(elts=items) if not any(isinstance(item, ast.Starred) for item in items):
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
            return [ast.Tuple(list(parts)) for parts in zip(*map(_listed, args), strict=True)]
        case ast.Call(func=ast.Name(id="enumerate"), args=[arg], keywords=[]):
            return [ast.Tuple([ast.Constant(number), item]) for number, item in enumerate(_listed(arg))]
        case ast.Call(
            func=ast.Attribute(value=ast.Dict(keys=keys, values=items), attr="items"), args=[], keywords=[]
        ) if len({key.value for key in keys if isinstance(key, ast.Constant)}) == len(keys):
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
