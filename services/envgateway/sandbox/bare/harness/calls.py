"""Calls a program's function: one call and its value.

The value goes out as plain data over a descriptor of its own. Expected values never enter this process, so a program can
forge only its own answer.
"""

from __future__ import annotations

import builtins
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


def load(source: bytes, note_fd: int) -> types.ModuleType:
    """The program as a module, with the names of ``prelude``."""
    module = program.new_main(MODULE)
    code = program.compiled(source, note_fd)
    prelude.prepare(module.__dict__, code)
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


def run_one(source: bytes, payload: dict[str, Any], note_fd: int, tell: Callable[[bytes], None]) -> int:
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

    exit_code = program.guarded(call, note_fd)
    program.flush([sys.stdout, sys.stderr, *streams])
    return exit_code


def defined_entry(module: types.ModuleType, entry_point: str) -> str:
    """``f`` and ``Solution().f`` stand for each other where only one of them is there: rows do not always say which."""
    names = vars(module)
    name = entry_point.removeprefix("Solution().")
    if name == entry_point and "." not in name and name not in names and hasattr(names.get("Solution"), name):
        return f"Solution().{name}"
    return name if "Solution" not in names and name in names else entry_point
