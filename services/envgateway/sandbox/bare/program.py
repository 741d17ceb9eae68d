"""Running one Python program the way ``python program.py`` would, in a process that is already confined.

Exit codes, the text of uncaught errors and what ``atexit`` prints are those of the interpreter. With ``echo`` the
value of a trailing expression is printed, as in a notebook. Knows nothing about limits or about who asked.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import linecache
import os
import sys
import traceback
import types
from typing import Any

FILENAME = "<program>"
OUT_OF_MEMORY = b"M"
_LONGEST_SHOWN_LINE = 1000


def run(source: bytes, echo: bool, note_fd: int) -> int:
    """The program's exit code. ``note_fd`` is told of an uncaught MemoryError, which is a verdict of its own."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [FILENAME]
    streams = [sys.stdout, sys.stderr]
    code = 1
    try:
        code = _guarded(_execute, source, echo, main, note_fd)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for non-daemon threads, bounded by the wall limit
        atexit._run_exitfuncs()
        main.__dict__.clear()  # __del__ of the program's objects may still print
    except BaseException:  # noqa: BLE001 - an error while ending: reported, and the exit code stays
        _report(sys.exc_info()[1], note_fd)
    for stream in dict.fromkeys([sys.stdout, sys.stderr, *streams]):  # also when the program put others in their place
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed by the program, or not a stream
            pass
    return code


def _guarded(function: Any, source: bytes, echo: bool, main: types.ModuleType, note_fd: int) -> int:
    try:
        function(source, echo, main)
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    except BaseException as error:  # noqa: BLE001 - whatever a stranger's program may raise
        _report(error, note_fd)
        return 1
    return 0


def _execute(source: bytes, echo: bool, main: types.ModuleType) -> None:
    if not echo:
        exec(compile(source, FILENAME, "exec", dont_inherit=True), main.__dict__)
        return
    tree = compile(source, FILENAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), main.__dict__)
        return
    tree.body.pop()
    body = compile(tree, FILENAME, "exec", dont_inherit=True)
    future_flags = body.co_flags & _FUTURE_FLAGS
    exec(body, main.__dict__)
    tail = ast.Interactive(body=[last])
    exec(compile(tail, FILENAME, "single", flags=future_flags, dont_inherit=True), main.__dict__)


_FUTURE_FLAGS = 0x1FE0000  # CO_FUTURE_*: a trailing expression obeys the program's own future imports


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _report(error: BaseException | None, note_fd: int) -> None:
    if error is None:
        return
    if isinstance(error, MemoryError):
        try:
            os.write(note_fd, OUT_OF_MEMORY)
        except OSError:  # the program closed it: then it is an ordinary error
            pass
    if isinstance(error, SyntaxError) and len(error.text or "") > _LONGEST_SHOWN_LINE:
        error.text = None
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILENAME:
        trace = trace.tb_next  # leave out this module's frames
    try:
        traceback.print_exception(type(error), error, trace)
    except (OSError, ValueError, AttributeError):  # stderr is closed or replaced
        pass


def warm_up() -> None:
    """Do once, before any fork, what a first compile and a first traceback set up: 1 ms that no child pays again."""
    namespace: dict[str, Any] = {"__builtins__": builtins}
    compile(b"x", FILENAME, "exec", ast.PyCF_ONLY_AST)
    exec(compile(_EXAMPLE, FILENAME, "exec", dont_inherit=True), namespace)
    try:
        namespace["fail"]()
    except ZeroDivisionError as error:
        traceback.format_exception(error)


_EXAMPLE = b"""
import math
class A:
    def __init__(self, n=0):
        self.n = n
def fail(*args, **kwargs):
    return 1 / 0
print(f"{sum(i * 2 for i in range(3))}{[i for i in (1, 2)]}{math.gcd(4, 6)}"[:0], end="")
"""


def remember_source(source: bytes) -> None:
    """So that tracebacks show the program's lines."""
    text = source.decode("utf-8", errors="replace")
    linecache.cache[FILENAME] = (len(text), None, text.splitlines(keepends=True), FILENAME)
