"""Calling a program's functions: one call and its value (``run_one``), or many on demand (``serve``).

Values go out as plain data over a descriptor of their own; what is right, nobody in this process knows. All that a
program could forge here is its own answer.
"""

from __future__ import annotations

import os
import struct
import sys
import types
from typing import Any

from . import plain, prelude, program

MODULE = "solution"  # not __main__: a script's own entry does not run
FRAME = struct.Struct("!I")
_RECURSION_FOR_ENCODING = 10_000


def write_frame(fd: int, text: str) -> None:
    data = text.encode()
    view = memoryview(FRAME.pack(len(data)) + data)
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


def _load(source: bytes, with_prelude: bool, note_fd: int) -> types.ModuleType:
    module = program.new_main(MODULE)
    code = program.compiled(source, note_fd)
    if with_prelude:
        prelude.fill(module.__dict__)
    exec(code, module.__dict__)
    return module


def find(module: types.ModuleType, entry_point: str) -> Any:
    """``f``, ``Class.f`` or ``Class().f``, whose object is made anew. Raises ``NameError`` or ``AttributeError``."""
    owner, _, name = entry_point.rpartition(".")
    if not owner:
        if entry_point not in module.__dict__:
            raise NameError(f"name {entry_point!r} is not defined")
        return module.__dict__[entry_point]
    holder = find(module, owner.removesuffix("()"))
    return getattr(holder() if owner.endswith("()") else holder, name)


def run_one(source: bytes, payload: dict[str, Any], note_fd: int, answer_fd: int) -> int:
    """The exit code; the value goes to ``answer_fd``. Payload: entry_point, args, kwargs (trees), prelude."""
    streams = [sys.stdout, sys.stderr]

    def call() -> None:
        module = _load(source, payload["prelude"], note_fd)
        function = find(module, payload["entry_point"])
        args = plain.from_tree(payload["args"], nodes=True)
        kwargs = plain.from_tree(payload["kwargs"], nodes=True)
        value = function(*args, **kwargs)
        sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
        write_frame(answer_fd, plain.encode(value))

    code = program.guarded(call, note_fd)
    program.flush([sys.stdout, sys.stderr, *streams])
    return code


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


def serve(source: bytes, note_fd: int, ask_fd: int, answer_fd: int) -> int:
    """Load the program and answer calls until ``ask_fd`` ends. First frame: {"prelude": bool}."""
    streams = [sys.stdout, sys.stderr]

    def answer_all() -> None:
        first = read_frame(ask_fd)
        settings = plain.parse(first or b"{}")
        module = _load(source, bool(settings.get("prelude")), note_fd)
        objects = _Objects()
        while (frame := read_frame(ask_fd)) is not None:
            sys_limit = sys.getrecursionlimit()
            reply = _answer(module, objects, plain.parse(frame))
            program.flush(streams)
            write_frame(answer_fd, reply)
            sys.setrecursionlimit(sys_limit)

    return program.guarded(answer_all, note_fd)


def _answer(module: types.ModuleType, objects: _Objects, call: dict[str, Any]) -> str:
    """{"value": tree} or {"error": names of the type and its bases, "message": text}."""
    try:
        target = objects.get(call["handle"]) if "handle" in call else find(module, call["name"])
        if "attribute" in call:
            target = getattr(target, call["attribute"])
        if "args" in call:
            args = plain.from_tree(call["args"], objects.get, nodes=True)
            kwargs = plain.from_tree(call["kwargs"], objects.get, nodes=True)
            target = target(*args, **kwargs)
        sys.setrecursionlimit(_RECURSION_FOR_ENCODING)
        return f'{{"value":{plain.encode(target, objects.number)}}}'
    except Exception as error:  # noqa: BLE001 - tests may expect it
        program.report(error, -1)
        names = [base.__name__ for base in type(error).__mro__]
        return f'{{"error":{plain.encode(names)},"message":{plain.encode(str(error)[:1000])}}}'
