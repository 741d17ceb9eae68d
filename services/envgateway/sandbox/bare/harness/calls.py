"""Calls a program's functions: one call and its value (``run_one``), or many on demand (``serve``).

Values go out as plain data over a descriptor of their own. Expected values never enter this process, so a program can
forge only its own answer.
"""

from __future__ import annotations

import builtins
import operator
import os
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

from . import plain, prelude, program

MODULE = "solution"  # not __main__: a script's own entry does not run
FRAME = struct.Struct("!I")
_RECURSION_FOR_ENCODING = 10_000


def write_frame(fd: int, text: str) -> None:
    write_bytes(fd, framed(text.encode()))


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


def _load(source: bytes, supply: program.Supply, note_fd: int, code: Any = None) -> types.ModuleType:
    module = program.new_main(MODULE)
    code = code if code is not None else program.compiled(source, note_fd)
    supply(module.__dict__, code)
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


def run_one(
    source: bytes,
    payload: dict[str, Any],
    note_fd: int,
    tell: Callable[[bytes], None],
    code: Any = None,
    supply: program.Supply = prelude.prepare,
) -> int:
    """The exit code; ``tell`` gets the value, framed. Payload: entry_point, args, kwargs (trees). ``code``: the compiled
    source, if any. ``supply``: puts names into the namespace of the code."""
    streams = [sys.stdout, sys.stderr]

    def call() -> None:
        module = _load(source, supply, note_fd, code)
        function = find(module, _defined_entry(module, payload["entry_point"]))
        args = plain.from_tree(payload["args"], nodes=True)
        kwargs = plain.from_tree(payload["kwargs"], nodes=True)
        value = function(*args, **kwargs)
        sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
        tell(framed(plain.encode(value).encode()))

    exit_code = program.guarded(call, note_fd)
    program.flush([sys.stdout, sys.stderr, *streams])
    return exit_code


def _defined_entry(module: types.ModuleType, entry_point: str) -> str:
    """``f`` and ``Solution().f`` stand for each other where only one of them is there: rows do not always say which."""
    names = vars(module)
    name = entry_point.removeprefix("Solution().")
    if name == entry_point and "." not in name and name not in names and hasattr(names.get("Solution"), name):
        return f"Solution().{name}"
    return name if "Solution" not in names and name in names else entry_point


class _Objects:
    """Objects that stay here, by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def number(self, value: Any) -> int:
        for number, held in enumerate(self._objects):
            if held is value:
                return number
        self._objects.append(value)
        return len(self._objects) - 1

    def get(self, number: int) -> Any:
        return self._objects[number]

    def named(self, value: Any) -> str:
        """The rest of its tree: its number, and the operations of its type."""
        kind = type(value)
        methods = {name for base in kind.__mro__ for name, method in vars(base).items() if method is not None}
        has = [feature for feature, method in _FEATURES.items() if method in methods]
        if "iter" not in has and "getitem" in has:  # an old-style sequence
            has.append("iter")
        return ",".join([str(self.number(value)), *(f'"{feature}"' for feature in has)])


_FEATURES = {
    "call": "__call__", "iter": "__iter__", "next": "__next__", "len": "__len__", "getitem": "__getitem__",
    "setitem": "__setitem__", "delitem": "__delitem__", "contains": "__contains__", "reversed": "__reversed__",
    "number": "__add__", "lt": "__lt__", "enter": "__enter__", "await": "__await__", "int": "__int__", "float": "__float__",
    "index": "__index__",
}  # fmt: skip


def serve(source: bytes, note_fd: int, ask_fd: int, answer_fd: int) -> int:
    """Load the program and answer calls until ``ask_fd`` ends. The first frame begins the session."""
    streams = [sys.stdout, sys.stderr]

    def answer_all() -> None:
        read_frame(ask_fd)
        module = _load(source, prelude.prepare, note_fd)
        objects = _Objects()
        while (frame := read_frame(ask_fd)) is not None:
            sys_limit = sys.getrecursionlimit()
            reply = _answer(module, objects, plain.parse(frame))
            program.flush(streams)
            write_frame(answer_fd, reply)
            sys.setrecursionlimit(sys_limit)

    return program.guarded(answer_all, note_fd)


def _answer(module: types.ModuleType, objects: _Objects, call: dict[str, Any]) -> str:
    """{"value": tree}, {"ended": true} or {"error": names of its built-in types, "message": text}; after a call
    also "changed": [[index of an argument, its tree now], ...]."""
    try:
        target = objects.get(call["handle"]) if "handle" in call else find(module, call["name"])
        if "special" in call:
            return _answer_special(target, call, objects)
        if "find" in call:
            return f'{{"value":["h",{objects.named(target)}]}}'
        if "attribute" in call:
            target = getattr(target, call["attribute"])
        changed = ""
        if "args" in call:
            args = plain.from_tree(call["args"], objects.get, nodes=True)
            kwargs = plain.from_tree(call["kwargs"], objects.get, nodes=True)
            target = target(*args, **kwargs)
            changed = _changed(call, [*args, *kwargs.values()], objects)
        sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
        return f'{{"value":{plain.encode(target, objects.named)}{changed}}}'
    except Exception as error:  # noqa: BLE001 - tests may expect the error
        program.report(error, -1)
        names = [base.__name__ for base in type(error).__mro__ if base in _BUILTIN_ERRORS]
        return f'{{"error":{plain.encode(names)},"message":{plain.encode(_text(error))}{_arguments(error)}}}'


# Those that a program may raise and a test may expect; a class of the same name is another.
_BUILTIN_ERRORS = frozenset(kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception))  # fmt: skip


def _arguments(error: Exception) -> str:
    """The arguments of a built-in exception, as a part of the reply."""
    if type(error) not in _BUILTIN_ERRORS:
        return ""
    try:
        return f',"args":{plain.encode(error.args)}'
    except plain.TooLargeError:
        return ""


def _text(error: Exception) -> str:
    """The message, or an empty text where the program's own text raises."""
    try:
        return str(error)[:1000]
    except Exception:  # noqa: BLE001 - untrusted __str__
        return ""


def _changed(call: dict[str, Any], values: list[Any], objects: _Objects) -> str:
    """The arguments that are others now, as a part of the reply; empty when none is."""
    sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
    before = [*call["args"][1:], *call["kwargs"][2::2]]
    found = []
    for index, (tree, value) in enumerate(zip(before, values, strict=True)):
        if isinstance(tree, list) and tree[0] in _MUTABLE:
            after = plain.encode(value, objects.named)
            if plain.parse(after) != tree:
                found.append(f"[{index},{after}]")
    return f',"changed":[{",".join(found)}]' if found else ""


_MUTABLE = ("l", "t", "s", "d", "L", "T", "q", "n", "N")  # a tuple may hold a list


def _answer_special(target: Any, call: dict[str, Any], objects: _Objects) -> str:
    """Operations that the interpreter performs on an object: its length, its next part, a sum."""
    args = plain.from_tree(call["args"], objects.get, nodes=True)
    if call["special"] == "next":
        try:
            value = next(target)
        except StopIteration:
            return '{"ended":true}'
    else:
        value = _SPECIAL[call["special"]](target, *args)
    sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
    if call["special"] in ("iter", "reversed"):
        return f'{{"value":["h",{objects.named(value)}]}}'
    return f'{{"value":{plain.encode(value, objects.named)}}}'


def _state(value: Any) -> tuple[str, Any]:
    """The name of the type and the attributes, in slots too; None for a value without attributes."""
    kind = type(value)
    slots: list[str] = []
    for base in kind.__mro__:
        named = vars(base).get("__slots__", ())
        slots += [named] if isinstance(named, str) else list(named)
    held = [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
    state = {name: getattr(value, name) for name in held}
    has_dict = hasattr(value, "__dict__") and not callable(value)
    return kind.__qualname__, state | (vars(value) if has_dict else {}) if has_dict or slots else None


def _run(awaitable: Any) -> Any:
    """Run an awaitable of the tests in a loop of the program's."""
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


_SPECIAL: dict[str, Any] = {
    name: getattr(operator, name if name not in ("and", "or") else f"{name}_")
    for name in ("index", "abs", "neg", "getitem", "setitem", "delitem", "add", "sub", "mul", "truediv", "floordiv", "mod",
                 "pow", "matmul", "and", "or", "xor", "lt", "le", "gt", "ge")
} | {
    "len": len, "str": str, "repr": repr, "int": int, "float": float, "bool": bool, "iter": iter, "reversed": reversed,
    "isinstance": isinstance, "state": _state, "run": _run,
    "enter": lambda value: type(value).__enter__(value), "exit": lambda value, *args: type(value).__exit__(value, *args),
}  # fmt: skip
