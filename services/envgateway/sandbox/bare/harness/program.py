"""Runs one Python program as ``python program.py`` would, in a process that is already confined.

Exit codes, the text of uncaught errors and what ``atexit`` prints are those of the interpreter. With ``echo`` the value
of a trailing expression is printed, as in a notebook. Limits are other modules' part.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeAlias

from ..messages import NO_COMPILE_NOTE, OUT_OF_MEMORY_NOTE

FILENAME = "<program>"
_LONGEST_SHOWN_LINE = 1000
_UNFLUSHED_EXIT = 120  # the interpreter's, when stdout cannot be flushed
_SHOWN_FRAMES = 1000  # the last, as the interpreter shows them
Supply: TypeAlias = Callable[[dict[str, Any], types.CodeType], None]


def run(source: bytes, echo: bool, note_fd: int, supply: Supply | None = None) -> int:
    """The program's exit code. ``note_fd`` gets events with a verdict of their own: a failed compile, an uncaught
    MemoryError. ``supply``: puts names into the namespace of the code."""
    streams = sys.stdin, sys.stdout, sys.stderr
    left_with = 1
    try:
        left_with = guarded(lambda: _execute(source, echo, new_main("__main__"), note_fd, supply), note_fd)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for non-daemon threads, bounded by the wall limit
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - an error while ending: reported, and the exit code stays
        report(sys.exc_info()[1], note_fd)
    try:  # the program's own stream, while its globals are there
        if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - a stream of the program may raise any error
        report(sys.exc_info()[1], note_fd)
        left_with = _UNFLUSHED_EXIT
    flush([sys.stderr])
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.modules.pop("__main__", None)
    gc.collect()  # __del__ of the program's objects may still print, and finds the globals
    flush([*streams[1:]])
    return left_with


def new_main(name: str) -> types.ModuleType:
    """An empty module in the role of the program's ``__main__``."""
    main = types.ModuleType(name)
    main.__dict__.update(__builtins__=builtins, __file__=FILENAME)
    sys.modules[name] = main
    sys.argv = [FILENAME]
    return main


def flush(streams: list[Any]) -> None:
    for stream in dict.fromkeys(streams):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - closed by the program, no stream, or a stream of the program
            pass


def guarded(function: Callable[[], None], note_fd: int) -> int:
    """The exit code that the interpreter would give for the function's end."""
    try:
        function()
    except SystemExit as exit_request:
        return exit_code(exit_request)
    except BaseException as error:  # noqa: BLE001 - an untrusted program may raise any error
        report(error, note_fd)
        return 1
    return 0


def compiled(source: bytes, note_fd: int, flags: int = 0, filename: str = FILENAME) -> Any:
    """Compile to code, or with ``ast.PyCF_ONLY_AST`` to a tree; a failed compile is noted."""
    try:
        # as text, so that no encoding cookie changes the decoding
        text = source.decode().removeprefix("\ufeff")
        return compile(text, filename, "exec", flags, dont_inherit=True)
    except BaseException:
        note(note_fd, NO_COMPILE_NOTE)
        raise


def note(note_fd: int, what: bytes) -> None:
    try:
        os.write(note_fd, what)
    except OSError:  # the program closed the stream: then the error is an ordinary one
        pass


def _execute(source: bytes, echo: bool, main: types.ModuleType, note_fd: int, supply: Supply | None) -> None:
    if echo:
        execute_echoing(source, main.__dict__, note_fd)
        return
    code = compiled(source, note_fd)
    if supply is not None:
        supply(main.__dict__, code)
    exec(code, main.__dict__)


def execute_echoing(source: bytes, namespace: dict[str, Any], note_fd: int, filename: str = FILENAME) -> None:
    """Execute, and print the value of a trailing expression, as a notebook does."""
    tree = compiled(source, note_fd, ast.PyCF_ONLY_AST, filename)
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    # Finds errors that only the compiler reports: a return outside of a function.
    whole = compiled(source, note_fd, filename=filename)
    if not isinstance(last, ast.Expr):
        exec(whole, namespace)
        return
    tree.body.pop()
    body = compile(tree, filename, "exec", dont_inherit=True)
    future_flags = body.co_flags & _FUTURE_FLAGS
    exec(body, namespace)
    tail = ast.Interactive(body=[last])
    exec(compile(tail, filename, "single", flags=future_flags, dont_inherit=True), namespace)


_FUTURE_FLAGS = 0x1FE0000  # CO_FUTURE_*: a trailing expression obeys the program's own future imports


def exit_code(error: SystemExit) -> int:
    """The exit code of a ``SystemExit``, as in the interpreter: an object other than a number is printed."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def report(error: BaseException | None, note_fd: int, filename: str = FILENAME) -> None:
    """Print the traceback as the interpreter does, without the frames above the program's first."""
    if error is None:
        return
    if isinstance(error, MemoryError):
        note(note_fd, OUT_OF_MEMORY_NOTE)
    if isinstance(error, SyntaxError) and len(error.text or "") > _LONGEST_SHOWN_LINE:
        error.text = None
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    shown = trace
    for _ in range(_SHOWN_FRAMES):
        shown = shown and shown.tb_next
    while shown is not None and trace is not None:  # by hand: the library looks at each of half a million frames
        shown, trace = shown.tb_next, trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except (OSError, ValueError, AttributeError):  # stderr is closed or replaced
        pass


def draw_own_random_numbers() -> None:
    """Seed numpy anew where loaded: otherwise every program would draw the same numbers."""
    if "numpy.random" in sys.modules:  # without a seed the constructor would import OpenSSL to make one
        sys.modules["numpy"].random.seed(list(os.urandom(16)))


def warm_up() -> None:
    """Do once, before any fork, the set-up of a first compile and a first traceback: saves each child 1 ms."""
    namespace: dict[str, Any] = {"__builtins__": builtins}
    compile("x", FILENAME, "exec", ast.PyCF_ONLY_AST)
    exec(compile(EXAMPLE, FILENAME, "exec", dont_inherit=True), namespace)
    try:
        namespace["fail"]()
    except ZeroDivisionError as error:
        traceback.format_exception(error)


EXAMPLE = b"""
import math
class A:
    def __init__(self, n=0):
        self.n = n
def fail(*args, **kwargs):
    return 1 / 0
print(f"{sum(i * 2 for i in range(3))}{[i for i in (1, 2)]}{math.gcd(4, 6)}"[:0], end="")
"""


def remember_source(source: bytes, filename: str = FILENAME) -> None:
    """So that tracebacks show the program's lines."""
    text = source.decode("utf-8", errors="replace")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
