"""Runs test code in an interpreter of its own, which has the program under test only by name.

The tests' calls of the program leave over one descriptor and come back over another as plain data; the program runs in
a different process, as a different user, and is never given a test or an expected value. The report is therefore true:
no code of the program ever runs in this process. Which names are the program's is decided before
(``services.common.text.assert_tests``); all others are the tests' own or this interpreter's. Each statement of the
tests that can fail is a case; a nonce at the end proves that the last one was reached.

Frames out: {"call": ...} (a reply is read), {"case": i, "outcome", "detail"}, with outcome
pass, fail, raised (by the program), error (in the tests) or died, {"unusable": why} for tests that fail before they
have called the program, {"done": nonce}. A case may be reported twice; its first failure counts.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import traceback
from collections.abc import Callable
from typing import Any

from . import broadcasts, cases, prelude, program
from .remote import CallFailedError, ProgramLink, UnsendableError, named

_TESTS = "<tests>"
_FUTURE_FLAGS = 0x1FE0000  # CO_FUTURE_*: each statement is compiled by itself, under the imports of the whole


def run(source: bytes, note_fd: int, ask_fd: int, answer_fd: int) -> int:
    """``source`` is JSON: tests, preamble, entry_point, remote, aliases, supplied, nonce, prelude."""
    request = json.loads(source)
    link = ProgramLink(ask_fd, answer_fd)
    return program.guarded(lambda: _check(request, link), note_fd)


class _UnusableError(Exception):
    """The tests fail for any program."""


def _check(request: dict[str, Any], link: ProgramLink) -> None:
    try:
        num_cases = _run_all(request, link)
        if link.changed_arguments:
            # Once more with the original arguments: a program's changes of its arguments must not become the expected
            # value. A right answer is right both ways.
            link.keeps_arguments = True
            _run_all(request, link)
        if not link.num_calls:
            raise _UnusableError("the tests never call the program")
    except _UnusableError as error:
        link.send({"unusable": str(error)})
        return
    link.send({"done": request["nonce"], "cases": num_cases})


def _run_all(request: dict[str, Any], link: ProgramLink) -> int:
    """Tell every case; how many there are."""
    namespace = _namespace(request, link)
    index = 0
    tree = ast.parse(request["tests"])
    link.works_in_place = cases.works_in_place(tree, {*request["remote"], *request["aliases"]})
    flags = compile(request["tests"], _TESTS, "exec", dont_inherit=True).co_flags & _FUTURE_FLAGS
    for statement in cases.statements(tree, request["aliases"]):
        for run in _runs(statement, namespace, flags):
            link.raised, link.ever_raised = [], []
            outcome = _outcome(run, link)
            if link.unusable:
                raise _UnusableError(link.unusable)
            if outcome["outcome"] == "error" and not link.num_calls:
                raise _UnusableError(f"the tests do not run: {outcome['detail']}")
            if statement.is_case or outcome["outcome"] != "pass":  # also a preparation that failed is told
                link.send({"case": index, **outcome})
                index += 1
    return index


def _namespace(request: dict[str, Any], link: ProgramLink) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "__main__"}
    namespace |= {cases.CAUGHT: link.caught, cases.RAISED_AGAIN: link.raised_again, cases.PASSED: link.passed}
    if "__next__" not in request["tests"] + request["preamble"]:  # an iterator of theirs may end by another's end
        namespace["next"] = link.next
    prelude.fill_tests(namespace, request["prelude"])
    code = request["tests"] + request["preamble"]
    broadcasts.refuse_empty("numpy" in code or "numpy" in request["supplied"].values())
    try:
        for name, place in request["supplied"].items():
            module, _, attribute = place.partition(":")
            namespace[name] = importlib.import_module(module)
            if attribute:
                namespace[name] = getattr(namespace[name], attribute)
        if request["preamble"]:
            tree = cases.announce_handlers(ast.parse(request["preamble"]))
            exec(compile(tree, "<preamble>", "exec", dont_inherit=True), namespace)
    except Exception as error:  # noqa: BLE001 - a row's code may raise any error: the program is not at fault
        raise _UnusableError(f"the preamble does not run: {_message(error)}") from None
    for name in request["remote"]:
        namespace[name] = named(link, name)
    for name in request["aliases"]:
        namespace[name] = named(link, request["entry_point"])
    if "unittest" in request["tests"]:
        _announce_asserted_raises(link)
    return namespace


def _runs(statement: cases.Statement, namespace: dict[str, Any], flags: int) -> list[Callable[[], object]]:
    """The calls to execute for a statement: the statement, a test function, or each test of a class."""
    if statement.function:
        return [lambda: namespace[statement.function]()]
    if statement.test_case:
        import unittest

        suite = unittest.defaultTestLoader.loadTestsFromTestCase(namespace[statement.test_case])
        return [lambda test=test: _run_unittest(test) for test in suite]  # type: ignore[misc]
    tree = cases.announce_handlers(ast.Module([statement.node], []))
    code = compile(tree, _TESTS, "exec", flags, dont_inherit=True)
    return [lambda: exec(code, namespace)]


def _run_unittest(test: Any) -> None:
    """Run one test as an assertion."""
    import unittest

    class Told(unittest.TestResult):
        """Keeps the raised exception instead of its text."""

        first: BaseException | None = None

        def addError(self, test: Any, err: Any) -> None:
            self.first = self.first or err[1]

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self.addError(test, err)

    result = Told()
    test.run(result)
    if result.first is not None:
        raise result.first


def _announce_asserted_raises(link: ProgramLink) -> None:
    """``assertRaises(error, function, ...)`` is a handler of the tests, though its code is the library's."""
    from unittest import case

    context: Any = case._AssertRaisesContext
    plain_exit = getattr(context, "plain_exit", context.__exit__)

    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        swallowed = plain_exit(self, kind, error, trace)
        if swallowed:
            link.raised = [raised for raised in link.raised if raised is not error]
        return swallowed

    context.plain_exit, context.__exit__ = plain_exit, leave


def _outcome(run: Callable[[], object], link: ProgramLink) -> dict[str, str]:
    try:
        run()
    except CallFailedError as error:
        return {"outcome": "died", "detail": str(error)}
    except UnsendableError as error:
        return {"outcome": "error", "detail": str(error)}
    except SystemExit as error:
        return {"outcome": "fail" if error.code else "error", "detail": f"the tests exit with {error.code!r}"[:500]}
    except Exception as error:  # noqa: BLE001 - a program's answer can make any test code fail
        if any(error is raised for raised in link.ever_raised):
            return {"outcome": "raised", "detail": _message(error)}
        return {"outcome": "fail" if isinstance(error, AssertionError) else "error", "detail": _message(error)}
    if link.raised:
        return {"outcome": "raised", "detail": f"{_message(link.raised[0])}, which no test expects"[:500]}
    return {"outcome": "pass", "detail": ""}


def _message(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()[:500]
