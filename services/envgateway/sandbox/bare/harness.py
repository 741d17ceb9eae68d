"""Runs a program, its functions or its tests in a process that is already confined.

    run_program   as ``python program.py`` would; with ``echo`` the value of a trailing expression is printed, as in a notebook
    run_call      calls one function; its value goes out as plain data over a descriptor of its own. Expected values never
                  enter this process, so a program can forge only its own answer
    run_tests     test code beside the program
    serve_cells   a live process: cells of code in one namespace, as a notebook does

Exit codes, the text of uncaught errors and what ``atexit`` prints are those of the interpreter. Limits are other modules'
part.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import importlib
import json
import linecache
import os
import re
import signal
import struct
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from . import plain
from .wire import NO_COMPILE_NOTE, OUT_OF_MEMORY_NOTE

# --- A program.


FILENAME = "<program>"
_LONGEST_SHOWN_LINE = 1000
_UNFLUSHED_EXIT = 120  # the interpreter's, when stdout cannot be flushed
_SHOWN_FRAMES = 1000  # the last, as the interpreter shows them
Supply: TypeAlias = Callable[[dict[str, Any], types.CodeType], None]


def run_program(source: bytes, echo: bool, note_fd: int, supply: Supply | None = None) -> int:
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


# --- Names that a judged program may use without an import, and the depth that it may recurse to, as graders of programs give
# them: the names of common modules, and nodes of lists and trees. Put into the program's module before its source, so no
# line of the source moves; and before test code.


# of two equal names the later module's is taken; names of the interpreter keep their meaning
STAR = ("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
        "itertools", "functools", "operator", "io", "sys", "json")  # fmt: skip
_RECURSION = 600_000
# with them a program may use a name that its code does not show
_BY_TEXT = frozenset(("eval", "exec", "globals", "locals", "vars"))
# not imported before a program needs them: both hook into every fork
_READ_AS_TEXT = ("random", "statistics")


def _listed(name: str) -> list[str]:
    if name in _READ_AS_TEXT:
        with open(os.path.join(os.path.dirname(os.__file__), f"{name}.py"), encoding="utf-8") as source:
            return re.findall(r"\w+", source.read().partition("__all__ = [")[2].partition("]")[0])
    module = __import__(name)
    return getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]


_MODULE_OF = {name: module for module in STAR for name in _listed(module)}
NAMES = frozenset((*_MODULE_OF, *STAR, "ListNode", "TreeNode")) - vars(builtins).keys()


def supply_names(namespace: dict[str, Any], code: types.CodeType) -> None:
    """Supply the names that a program mentions, and let it recurse deeply. Its own definitions then replace them."""
    sys.setrecursionlimit(_RECURSION)
    fill(namespace, NAMES.intersection(_mentioned(code)))


def fill(namespace: dict[str, Any], names: Iterable[str] = NAMES) -> None:
    for name in names:
        if name in STAR:
            namespace[name] = __import__(name)
        else:  # looked up now: a case has streams of its own
            namespace[name] = getattr(__import__(_MODULE_OF[name]) if name in _MODULE_OF else plain, name)


def _mentioned(code: types.CodeType) -> Iterator[str]:
    yield from NAMES if not _BY_TEXT.isdisjoint(code.co_names) else code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _mentioned(part)


def fill_tests(namespace: dict[str, Any], common: bool) -> None:
    """Types with which tests build and compare nodes; the ``common`` names only where they are part of the dialect,
    because names known here are not looked up in the program."""
    if common:
        fill(namespace)
    namespace["list_node"] = plain.build_list
    namespace["tree_node"] = plain.build_tree
    namespace["is_same_list"] = lambda a, b: plain.encode(a) == plain.encode(b)
    namespace["is_same_tree"] = lambda a, b: plain.encode(a) == plain.encode(b)


# --- Calls of a program's function.


MODULE = "solution"  # not __main__: a script's own entry does not run
FRAME = struct.Struct("!I")
_RECURSION_FOR_ENCODING = 10_000


def framed(data: bytes) -> bytes:
    return FRAME.pack(len(data)) + data


def write_bytes(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_frame(fd: int) -> bytes | None:
    """None at the end of the stream."""
    head = _read_exactly(fd, FRAME.size)
    return _read_exactly(fd, FRAME.unpack(head)[0]) if head is not None else None


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def load(source: bytes, note_fd: int) -> types.ModuleType:
    """The program as a module, with the names that may be used without an import."""
    module = new_main(MODULE)
    code = compiled(source, note_fd)
    supply_names(module.__dict__, code)
    exec(code, module.__dict__)
    return module


def find(module: types.ModuleType, entry_point: str) -> Any:
    """``f``, ``Class.f`` or ``Class().f``, with a new object. Raises ``NameError`` or ``AttributeError``."""
    owner, _, name = entry_point.rpartition(".")
    if not owner:
        if entry_point not in module.__dict__:
            raise NameError(f"name {entry_point!r} is not defined")
        return module.__dict__[entry_point]
    holder = find(module, owner.removesuffix("()"))
    return getattr(holder() if owner.endswith("()") else holder, name)


def run_call(source: bytes, payload: dict[str, Any], note_fd: int, tell: Callable[[bytes], None]) -> int:
    """The exit code; ``tell`` gets the value, framed. Payload: entry_point, args, kwargs (trees), applied (functions of
    the value)."""
    streams = [sys.stdout, sys.stderr]

    def call() -> None:
        module = load(source, note_fd)
        function = find(module, defined_entry(module, payload["entry_point"]))
        args = plain.from_tree(payload["args"])
        kwargs = plain.from_tree(payload["kwargs"])
        value = function(*args, **kwargs)
        for name in payload["applied"]:
            value = getattr(builtins, name)(value)
        sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
        tell(framed(plain.encode(value).encode()))

    exit_code = guarded(call, note_fd)
    flush([sys.stdout, sys.stderr, *streams])
    return exit_code


def defined_entry(module: types.ModuleType, entry_point: str) -> str:
    """``f`` and ``Solution().f`` stand for each other where only one of them is there: rows do not always say which."""
    names = vars(module)
    name = entry_point.removeprefix("Solution().")
    if name == entry_point and "." not in name and name not in names and hasattr(names.get("Solution"), name):
        return f"Solution().{name}"
    return name if "Solution" not in names and name in names else entry_point


# --- Test code in the process of the program. The tests see the program's functions themselves, so the program can change
# anything here, also the result: the judge marks such a verdict as opaque. The nonce, which is told after the last test,
# shows that the tests have come to their end; it keeps a program from passing by accident, by an early exit or by its own
# output.


def run_tests(source: bytes, payload: dict[str, Any], note_fd: int, tell: Callable[[bytes], None]) -> int:
    """The exit code; ``tell`` gets the nonce, framed. Payload: tests, preamble, entry_point, remote, supplied, prelude,
    nonce."""
    streams = [sys.stdout, sys.stderr]

    def check() -> None:
        module = load(source, note_fd)
        names = _names_of_tests(payload)
        names |= {name: vars(module)[name] for name in payload["remote"] if name in vars(module)}
        if payload["entry_point"]:
            names["candidate"] = find(module, defined_entry(module, payload["entry_point"]))
        if "unittest" in payload["tests"]:  # the call would end the process; the test cases are run behind it
            vars(importlib.import_module("unittest"))["main"] = lambda *given, **named: None
        try:
            exec(compile(payload["tests"], "<tests>", "exec", dont_inherit=True), names)
        except AssertionError as error:  # a wrong answer: the program itself has not failed
            report(error, note_fd)
            return
        tell(framed(payload["nonce"].encode()))

    exit_code = guarded(check, note_fd)
    flush([sys.stdout, sys.stderr, *streams])
    return exit_code


def _names_of_tests(payload: dict[str, Any]) -> dict[str, Any]:
    """Names of the tests before those of the program: of the library, and of their own preamble."""
    names: dict[str, Any] = {"__name__": "__main__"}
    fill_tests(names, payload["prelude"])
    for name, place in payload["supplied"].items():
        module, _, attribute = place.partition(":")
        found = importlib.import_module(module)
        names[name] = getattr(found, attribute) if attribute else found
    exec(compile(payload["preamble"], "<preamble>", "exec", dont_inherit=True), names)
    return names


# --- Cells of a live process.
#
#     Frames in:  {"cell": n, "code": text}
#     Frames out: {"cell": n, "outcome": "ok" or "raised", "error": the name of the exception's type}
#
# Output of a cell goes to stdout and stderr, which are flushed before the frame is written. SIGINT ends a cell, once, and
# has no effect between cells; the supervisor bounds the time of a cell.


_NOBODY = -1  # a note would be about the whole process


def serve_cells(note_fd: int, ask_fd: int, answer_fd: int) -> int:
    """Run cells until ``ask_fd`` ends."""
    os.close(note_fd)
    own_pid = os.getpid()
    streams = [sys.stdout, sys.stderr]
    cells = _Cells()
    signal.signal(signal.SIGINT, cells.interrupt)
    while (frame := read_frame(ask_fd)) is not None:
        request = json.loads(frame)
        outcome = cells.run(f"<cell {request['cell']}>", request["code"])
        flush([sys.stdout, sys.stderr, *streams])
        if os.getpid() != own_pid:  # a process that the cell has forked and not ended: the answer is its parent's
            return 0
        write_bytes(answer_fd, framed(json.dumps({"cell": request["cell"], **outcome}).encode()))
    return 0


class _Cells:
    """The namespace, and whether one of its cells is being run."""

    def __init__(self) -> None:
        self._namespace = new_main("__main__").__dict__
        self._running = False

    def interrupt(self, *_: Any) -> None:
        if self._running:
            self._running = False
            raise KeyboardInterrupt

    def run(self, name: str, text: str) -> dict[str, str]:
        source = text.encode(errors="replace")
        remember_source(source, name)
        try:
            self._running = True
            try:
                execute_echoing(source, self._namespace, _NOBODY, name)
            finally:
                self._running = False
        except SystemExit as leaving:
            return _raised(leaving) if exit_code(leaving) else {"outcome": "ok", "error": ""}
        except BaseException as error:  # noqa: BLE001 - untrusted code may raise any error
            _forget_handler(error)
            report(error, _NOBODY, name)
            return _raised(error)
        return {"outcome": "ok", "error": ""}


def _forget_handler(error: BaseException) -> None:
    """Remove the handler that raised from an interrupted cell's traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code is _Cells.interrupt.__code__:
            trace.tb_next = None
            return
        trace = trace.tb_next


def _raised(error: BaseException) -> dict[str, str]:
    return {"outcome": "raised", "error": type(error).__name__}
