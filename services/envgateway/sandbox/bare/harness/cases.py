"""Splits test code into statements to run, and marks those that are cases.

``check``'s body is unfolded where the meaning is the same, so that each of its asserts is a case. Functions named
``test...`` without a call and classes of ``unittest`` are run as pytest would. Every handler of the tests first reports
its exception (``CAUGHT``), and reports a re-raise (``RAISED_AGAIN``); a ``with`` statement reports the exceptions that
pass through, and has handled one only when the statement ends (``PASSED``). So exceptions that the library swallows
differ from exceptions that the tests expect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

CAUGHT, RAISED_AGAIN, PASSED = "__caught__", "__raised_again__", "__passed__"
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Statement:
    """One statement to execute, or a test function or class of the tests to run when all are defined."""

    node: ast.stmt
    is_case: bool
    function: str = ""
    test_case: str = ""


def statements(tree: ast.Module, aliases: list[str]) -> list[Statement]:
    """Statements to run, in order. ``aliases``: names of the program in the tests."""
    body = list(_unfolded_main(tree.body))
    checks = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if checks:
        body = _with_check(body, checks[-1], aliases)
    checking = _checking_functions(tree)
    called = {name for node in body for name in _named_in(node)}
    found = [Statement(node, _is_case(node, checking)) for node in body if not _starts_unittest(node)]
    for node in body:
        if _is_test_function(node) and node.name not in called:  # type: ignore[attr-defined]
            found.append(Statement(node, True, function=node.name))  # type: ignore[attr-defined]
        elif isinstance(node, ast.ClassDef) and _is_test_case(node):
            found.append(Statement(node, True, test_case=node.name))
    return found


def announce_handlers(tree: ast.Module) -> ast.Module:
    """Code in which every handler begins with a call of ``CAUGHT``."""
    return ast.fix_missing_locations(_Announcer().visit(tree))  # type: ignore[no-any-return]


def works_in_place(tree: ast.AST, program: set[str]) -> bool:
    """Whether the tests use another effect of a call than its value: they drop the value, or compare the value with
    None."""
    parameters = {argument.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for argument in node.args}
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _root(node.value) in program
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return any(_wants_no_value(node, program | made, parameters) for node in ast.walk(tree))


def _wants_no_value(node: ast.AST, program: set[str], parameters: set[str]) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if (
            name in parameters
        ):  # a helper that is given the program
            return True
        case ast.Expr(value=ast.Call() | ast.Await() as value):
            return _root(value) in program
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.BoolOp(op=ast.Or(), values=[ast.Call() as value, *_]):  # candidate(x) or x
            return _root(value) in program
        case ast.Attribute(attr="assertIsNone" | "assertIsNotNone"):
            return True
    return False


def _root(node: ast.AST) -> str:
    """The first name of a chain of calls, attributes and items."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.Await)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Announcer(ast.NodeTransformer):
    def __init__(self) -> None:
        self._num_withs = 0

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body = [_trying([_call(CAUGHT), *node.body], _call(RAISED_AGAIN))]
        return node

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        """Its manager may be a handler: ``assertRaises``, ``suppress``."""
        self.generic_visit(node)
        self._num_withs += 1
        passed = f"__passed_{self._num_withs}__"
        node.body = [_trying(node.body, _call(PASSED, passed))]
        return [ast.Assign([ast.Name(passed, ast.Store())], ast.List([], ast.Load())), node, _call(CAUGHT, passed)]


def _trying(body: list[ast.stmt], otherwise: ast.stmt) -> ast.stmt:
    """``otherwise`` is executed for every exception, which is then raised again."""
    handler = ast.ExceptHandler(type=ast.Name("BaseException", ast.Load()), name=None, body=[otherwise, ast.Raise()])
    return ast.Try(body=body, handlers=[handler], orelse=[], finalbody=[])


def _call(function: str, *names: str) -> ast.stmt:
    arguments: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
    return ast.Expr(ast.Call(ast.Name(function, ast.Load()), args=arguments, keywords=[]))


def _unfolded_main(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with the body of ``if __name__ == "__main__"`` unfolded."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__"):
            yield from node.body
        else:
            yield node


def _with_check(body: list[ast.stmt], check: ast.FunctionDef, aliases: list[str]) -> list[ast.stmt]:
    calls = [node for node in body if _is_call_of_check(node)]
    given = {ast.unparse(node.value) for node in calls}  # type: ignore[attr-defined]
    if len(given) > 1 or not check.args.args:
        return body  # the tests' own calls of the function
    rest = [node for node in body if node is not check and node not in calls]
    if _means_the_same_unfolded(check, rest, aliases):
        return [*rest, *check.body]
    call = ast.parse("check(candidate)").body if not calls else calls[:1]
    return [*rest, check, *call]


def _means_the_same_unfolded(check: ast.FunctionDef, rest: list[ast.stmt], aliases: list[str]) -> bool:
    arguments = check.args
    only_one = len(arguments.args) == 1 and not (
        arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg or arguments.defaults
    )
    name = arguments.args[0].arg
    shadows = name != "candidate" and any(name in _named_in(node) for node in rest)
    own = any(
        isinstance(node, (ast.Return, ast.Nonlocal, ast.Global, ast.Yield, ast.YieldFrom)) for node in ast.walk(check)
    )
    return only_one and name in aliases and not (shadows or own or check.decorator_list)


def _is_call_of_check(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
    )


def _is_case(node: ast.stmt, checking: set[str]) -> bool:
    """Whether a statement can fail: an assert, a raise, or a call of a function with one."""
    if isinstance(node, (*_Function, ast.ClassDef, ast.Import, ast.ImportFrom)):
        return False
    return any(map(_is_check, ast.walk(node))) or bool(_named_in(node) & checking)


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and bool(node.test.value))
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        return str(name).startswith("assert")
    return isinstance(node, ast.Raise)


def _checking_functions(tree: ast.Module) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    found = {node.name for node in functions if any(map(_is_check, ast.walk(node)))}
    while more := {node.name for node in functions if _named_in(node) & found} - found:
        found |= more
    return found


def _named_in(node: ast.AST) -> set[str]:
    inside = list(ast.walk(node))
    names = {inner.id for inner in inside if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}
    return names | {inner.attr for inner in inside if isinstance(inner, ast.Attribute)}


def _is_test_function(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and len(node.args.args) + len(node.args.posonlyargs) == len(node.args.defaults)
        and None not in node.args.kw_defaults
    )


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases)


def _starts_unittest(node: ast.stmt) -> bool:
    """``unittest.main()``: its classes are run by us."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("unittest.main", "main")
    )
