"""Running test code in an interpreter of its own, where the program under test is only a name.

The tests' calls of the program leave over one descriptor and come back over another as plain data; the program runs in
a different process, as a different user, and is never given a test or an expected value. What is reported here is
therefore true: nothing of the program ever runs beside it. Each statement of the tests that can fail is a case; a
nonce at the end proves that the last one was reached.

Frames out: {"call": ...} (a reply is read), {"case": i, "outcome", "detail"}, with outcome
pass, fail, raised (by the program), error (in the tests) or died, {"done": nonce}.
"""

from __future__ import annotations

import ast
import builtins
import json
import traceback
from typing import Any

from . import plain, prelude, program
from .calls import read_frame, write_frame

_TESTS = "<tests>"


class CallFailedError(BaseException):
    """The program died in a call; not an Exception, so that no test code takes it for an answer."""


class _Link:
    """The two descriptors to whoever runs the program."""

    def __init__(self, ask_fd: int, answer_fd: int) -> None:
        self._ask = ask_fd
        self._answer = answer_fd

    def tell(self, message: dict[str, Any]) -> None:
        write_frame(self._answer, json.dumps(message))

    def call(self, message: dict[str, Any]) -> Any:
        self.tell({"call": message})
        frame = read_frame(self._ask)
        if frame is None:
            raise CallFailedError("nobody answers")
        if frame[:1] != b"R":
            raise CallFailedError(frame[1:].decode())
        try:
            reply = plain.parse(frame[1:])
            if "error" in reply:
                error = _exception(reply)
            else:
                return plain.from_tree(reply["value"], lambda number: Remote(self, {"handle": number}), nodes=True)
        except (ValueError, KeyError, TypeError) as broken:  # not what our harness writes
            raise CallFailedError(f"no reply: {broken}") from None
        raise error


def _exception(reply: dict[str, Any]) -> Exception:
    """The nearest built-in exception of what the program raised."""
    for name in plain.from_tree(reply["error"]):
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return _raised(kind(reply["message"]))
            except TypeError:  # UnicodeDecodeError and its like want more than a message
                continue
    return _raised(RuntimeError(reply["message"]))


def _raised(error: Exception) -> Exception:
    error.raised_by_program = True  # type: ignore[attr-defined]
    return error


class Remote:
    """A function or object of the program's process."""

    def __init__(self, link: _Link, target: dict[str, Any]) -> None:
        self._link = link
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trees = {"args": _outgoing(args), "kwargs": _outgoing(kwargs)}
        return self._link.call({**self._target, **trees})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "name" in self._target:
            return Remote(self._link, {"name": f"{self._target['name']}.{name}"})
        return self._link.call({**self._target, "attribute": name})


def _outgoing(value: Any) -> Any:
    """The tree of an argument; objects of the program go back as their numbers."""

    def number(remote: Any) -> int:
        if isinstance(remote, Remote) and "handle" in remote._target:
            return int(remote._target["handle"])
        raise TypeError(f"a {type(remote).__name__} cannot be passed to the program")

    return json.loads(plain.encode(value, number))


def run(source: bytes, note_fd: int, ask_fd: int, answer_fd: int) -> int:
    """``source`` is JSON: tests, preamble, entry_point, nonce, prelude."""
    request = json.loads(source)
    link = _Link(ask_fd, answer_fd)
    return program.guarded(lambda: _check(request, link), note_fd)


def _check(request: dict[str, Any], link: _Link) -> None:
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "tests"}
    prelude.fill_tests(namespace, request["prelude"])
    if request["preamble"]:
        exec(compile(request["preamble"], "<preamble>", "exec", dont_inherit=True), namespace)
    tree = ast.parse(request["tests"])
    statements, entry_point = _statements(tree, request["entry_point"])
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - own - set(dir(builtins))
    for name in free - set(namespace):
        namespace[name] = Remote(link, {"name": name})
    if entry_point:
        remote = Remote(link, {"name": entry_point})
        namespace["candidate"] = remote
        if "." not in entry_point:
            namespace[entry_point] = remote
    index = 0
    for statement in statements:
        code = compile(ast.Module([statement], []), _TESTS, "exec", dont_inherit=True)
        outcome = _outcome(code, namespace)
        if _can_fail(statement) or outcome["outcome"] != "pass":  # also a preparation that failed is told
            link.tell({"case": index, **outcome})
            index += 1
    link.tell({"done": request["nonce"], "cases": index})


def _outcome(code: Any, namespace: dict[str, Any]) -> dict[str, str]:
    try:
        exec(code, namespace)
    except CallFailedError as error:
        return {"outcome": "died", "detail": str(error)}
    except Exception as error:  # noqa: BLE001 - a program's answer can make any test code fail
        detail = traceback.format_exception_only(type(error), error)[-1].strip()[:500]
        if hasattr(error, "raised_by_program"):
            return {"outcome": "raised", "detail": detail}
        return {"outcome": "fail" if isinstance(error, AssertionError) else "error", "detail": detail}
    return {"outcome": "pass", "detail": ""}


def _can_fail(statement: ast.stmt) -> bool:
    """Whether a statement is a case: it asserts, or does more than define, import and describe."""
    if isinstance(statement, ast.Assert):
        constant = isinstance(statement.test, ast.Constant) and bool(statement.test.value)
        return not constant
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
        return False
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _statements(tree: ast.Module, entry_point: str) -> tuple[list[ast.stmt], str]:
    """The statements to run, ``check``'s body unfolded where that means the same; and what ``candidate`` is."""
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks:
        return tree.body, entry_point
    check = checks[-1]
    rest = [node for node in tree.body if node is not check]
    called = [node for node in rest if _is_call_of_check(node)]
    for node in called:
        if not entry_point:
            entry_point = ast.unparse(node.value.args[0])  # type: ignore[attr-defined]
    rest = [node for node in rest if node not in called]
    if any(isinstance(node, (ast.Return, ast.Nonlocal, ast.Global)) for node in ast.walk(check)):
        call = ast.parse("check(candidate)\nassert True, 'ran to its end'").body
        whole = ast.If(test=ast.Constant(True), body=call, orelse=[])
        return [*rest, check, ast.fix_missing_locations(ast.copy_location(whole, check))], entry_point
    return [*rest, *check.body], entry_point


def _is_call_of_check(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
        and len(node.value.args) == 1
    )
