"""The program as test code sees it: names and objects of another process, and that process's exceptions.

Tests call, read, iterate and index an object of the program; each step is a question over the link. They never send a
value to be compared: an object of the program equals another of the same type and state, and no plain data. Arithmetic
with plain data (``answer - 5``) is only for objects that the tests have made of a class by name; any other object would
receive its expected value, and could choose the difference. The number that an object represents is read once. An
exception of the program comes back as the nearest built-in type by identity, except those that end an iteration, which
become ``RuntimeError``. A raised exception counts as handled only when a handler of the tests has caught the exception
(``caught``): an exception that the library or the interpreter swallows still fails the case.
"""

from __future__ import annotations

import _thread
import builtins
import functools
import json
import sys
import types
from collections import deque
from typing import Any

from . import changes, plain
from .calls import read_frame, write_frame

# Types that end an iteration silently, at any place of the raise; groups, which need more than a message.
_NEVER = (StopIteration, StopAsyncIteration, *([ExceptionGroup] if sys.version_info >= (3, 11) else []))
_ENDED = object()


class CallFailedError(BaseException):
    """The program died in a call; not an Exception, so that no handler of test code treats the death as an answer."""


class UnsendableError(BaseException):
    """The tests pass the program a value that cannot be sent, such as a function of theirs: they cannot judge."""


class ProgramLink:
    """The two descriptors to the judge, which relays to the program, and the program's exceptions in the current case."""

    def __init__(self, ask_fd: int, answer_fd: int) -> None:
        self._ask = ask_fd
        self._answer = answer_fd
        self._turn = _thread.allocate_lock()  # tests may have threads
        self.num_calls = 0
        self.raised: list[BaseException] = []  # and no handler of the tests has had
        self.ever_raised: list[BaseException] = []
        self.numbers: dict[tuple[int, str], Any] = {}  # numbers that objects represent, by the object's number
        self.unusable = ""  # why the tests cannot judge, where one of their calls has shown the reason
        self.keeps_arguments = False  # the tests do not see the program's changes of its arguments
        self.works_in_place = False  # a call that returns None may be asked to change its arguments
        self.changed_arguments = False  # a call that was asked for a value has changed its arguments

    def __deepcopy__(self, memo: Any) -> ProgramLink:
        return self

    def send(self, message: dict[str, Any]) -> None:
        write_frame(self._answer, json.dumps(message))

    def ask(self, message: dict[str, Any]) -> Any:
        """The value of the reply; ``_ENDED`` at the end of an iteration. Raises what the program raised."""
        return self._value(self._reply(message))

    def call(self, target: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reply = self._reply({**target, "args": outgoing(args, self), "kwargs": outgoing(kwargs, self)})
        if "changed" in reply:
            self._show_changes(reply, [*args, *kwargs.values()])
        return self._value(reply)

    def caught(self, passed: list[BaseException] | None = None) -> None:
        """The tests have had the exception that is being handled, or those that passed a ``with`` statement."""
        seen: set[int] = set()
        waiting: list[BaseException | None] = [sys.exc_info()[1]] if passed is None else [*passed]
        while waiting:
            error = waiting.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            waiting += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
        self.raised = [error for error in self.raised if id(error) not in seen]

    def raised_again(self) -> None:
        """A handler of the tests raises its exception again: another handler has to handle the exception."""
        error = sys.exc_info()[1]
        if error is not None and any(error is raised for raised in self.ever_raised):
            self.raised.append(error)

    @staticmethod
    def passed(by: list[BaseException | None]) -> None:
        """The exception that is being handled passes a ``with`` statement."""
        by.append(sys.exc_info()[1])

    def next(self, iterator: Any, *default: Any) -> Any:
        """The built-in ``next``, except that an unexpected end fails the case: ``map`` would end silently."""
        try:
            return next(iterator)
        except StopIteration as ended:
            if default:
                return default[0]
            self.raised.append(ended)
            self.ever_raised.append(ended)
            raise

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        with self._turn:
            self.send({"call": message})
            frame = read_frame(self._ask)
        if frame is None:
            raise CallFailedError("the judge does not answer")
        if frame[:1] != b"R":
            self.numbers.clear()  # the next program counts its objects anew
            raise CallFailedError(frame[1:].decode())
        try:
            reply = plain.parse(frame[1:])
        except ValueError as broken:
            raise CallFailedError(f"no reply: {broken}") from None
        if not isinstance(reply, dict):
            raise CallFailedError("no reply")
        return reply

    def _value(self, reply: dict[str, Any]) -> Any:
        try:
            if "ended" in reply:
                return _ENDED
            if "error" not in reply:
                return self._read(reply["value"])
            error = _exception(reply)
        except (ValueError, KeyError, TypeError, MemoryError, OverflowError, RecursionError) as broken:
            raise CallFailedError(f"no reply: {broken}") from None  # not a frame of our harness
        self.raised.append(error)
        self.ever_raised.append(error)
        raise error

    def _read(self, tree: Any) -> Any:
        return plain.from_tree(tree, self._object, nodes=True)

    def _object(self, number: int, *features: str) -> Remote:
        return _kind(frozenset(features))(self, {"handle": number})

    def _show_changes(self, reply: dict[str, Any], sent: list[Any]) -> None:
        """Copy the program's changes of its arguments to the arguments of the tests."""
        if reply.get("value") is not None or not self.works_in_place:
            self.changed_arguments = True
            if self.keeps_arguments:
                return
        try:
            for index, tree in reply["changed"]:
                changes.change(sent[index], self._read(tree))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as broken:
            raise CallFailedError(f"no reply: {broken}") from None


def _exception(reply: dict[str, Any]) -> Exception:
    """The nearest built-in type of the program's exception, ``RuntimeError`` for types that end an iteration."""
    for name in plain.from_tree(reply["error"]):
        kind = getattr(builtins, str(name), None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            continue
        if issubclass(kind, _NEVER):
            return RuntimeError(f"the program raised {name}: {reply['message']}")
        try:
            return kind(*plain.from_tree(reply["args"])) if "args" in reply else kind(reply["message"])
        except TypeError:  # UnicodeDecodeError and its like want more than a message
            continue
    return RuntimeError(reply["message"])


# Types of the values in replies.
_PLAIN = (
    list,
    tuple,
    set,
    frozenset,
    dict,
    deque,
    range,
    plain.Opaque,
    plain.Linked,
    plain.Tree,
    plain.ListNode,
    plain.TreeNode,
)
_PLAIN_MODULES = ("numpy", "fractions", "decimal")
# Built-in types whose values can only be the tests' own.
_OF_TESTS = (
    type,
    types.FunctionType,
    types.MethodType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.ModuleType,
)


def _may_be_of_an_answer(value: Any) -> bool:
    """Whether tests can have this object because of plain data that the program answered."""
    kind = type(value)
    if isinstance(value, _PLAIN) or kind.__module__ in _PLAIN_MODULES:
        return True
    of_a_module = isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType)
    return kind.__module__ in ("builtins", "itertools") and not isinstance(value, _OF_TESTS) and not of_a_module


def outgoing(value: Any, link: ProgramLink) -> Any:
    """The tree of an argument; objects of the program go back as their numbers."""

    def number(remote: Any) -> str:
        if isinstance(remote, Remote):
            return str(remote._number())
        if link.num_calls and _may_be_of_an_answer(remote):
            raise CallFailedError(f"no reply that could be passed on: a {type(remote).__name__}")
        link.unusable = f"the tests pass a {type(remote).__name__} to the program, which cannot be sent"
        raise UnsendableError(link.unusable)

    return json.loads(plain.encode(value, number))


class Remote:
    """A function or object of the program's process: operations that all objects have."""

    def __init__(self, link: ProgramLink, target: dict[str, Any]) -> None:
        self._link = link
        self._target = target
        self._is_made = False  # by the tests, of a class that they name

    def __getattr__(self, name: str) -> Any:
        if name == "__name__" and "name" in self._target:
            return str(self._target["name"]).rpartition(".")[2]
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        if "name" in self._target:
            return named(self._link, f"{self._target['name']}.{name}")
        try:
            return self._link.ask({**self._target, "attribute": name})
        except AttributeError:
            self._link.caught()  # a missing attribute is an answer, as ``hasattr`` expects
            raise

    def _number(self) -> int:
        if "handle" not in self._target:
            found = self._link.ask({**self._target, "find": True})
            if not isinstance(found, Remote):
                raise CallFailedError("no reply: a name of the program is no object")
            self._target = {**found._target, **self._target}
        return int(self._target["handle"])

    def _do(self, what: str, *args: Any) -> Any:
        return self._link.ask({"handle": self._number(), "special": what, "args": outgoing(args, self._link)})

    def _made(self, value: Any) -> Any:
        if isinstance(value, Remote):
            value._is_made = True
        return value

    def _state(self) -> tuple[Any, Any]:
        """The name of the type, and the attributes; None for an object without attributes."""
        name, state = self._do("state")
        return name, state

    def __eq__(self, other: object) -> bool:
        if "name" in self._target:  # perhaps a constant of the program
            value = self._link.ask({"name": self._target["name"]})
            if not isinstance(value, Remote):
                return bool(value == other)
        if not isinstance(other, Remote):
            return False
        if self._number() == other._number():
            return True
        mine, its = self._state(), other._state()
        return mine[1] is not None and mine == its

    def __hash__(self) -> int:
        return hash(str(self._state()[0]))

    def _ordered(self, what: str, other: Any) -> Any:
        return self._do(what, other) is True if isinstance(other, Remote) else NotImplemented

    def __bool__(self) -> bool:
        if "name" in self._target:
            return True
        if not self._is_made and hasattr(type(self), "__iter__"):  # as full as its length says
            return not hasattr(type(self), "__len__") or len(self) != 0  # type: ignore[arg-type]
        return self._do("bool") is True

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and value._do("isinstance", self) is True


def _asking(what: str) -> Any:
    def method(self: Remote, *args: Any) -> Any:
        return self._do(what, *args)

    return method


def _combining(what: str) -> Any:
    """An operation with another object, or of an object that the tests have made."""

    def method(self: Remote, other: Any, *more: Any) -> Any:
        if self._is_made:
            return self._made(self._do(what, other, *more))
        return self._do(what, other, *more) if isinstance(other, Remote) else NotImplemented

    return method


def _standing_for(what: str) -> Any:
    """The number that an object represents: the same at each use, or the program could choose one for each comparison."""

    def method(self: Remote) -> Any:
        if self._is_made:
            return self._do(what)
        known, key = self._link.numbers, (self._number(), what)
        if key not in known:
            known[key] = self._do(what)
        return known[key]

    return method


class _Able(Remote):
    """All operations that an object may have; ``_kind`` selects those of one object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._link.call(self._target, args, kwargs)
        is_class = str(self._target.get("name", "")).rpartition(".")[2][:1].isupper()
        return self._made(value) if is_class else value

    def __len__(self) -> int:
        try:
            return self._do("len")  # type: ignore[no-any-return]
        except TypeError:
            self._link.caught()  # has none: ``list`` asks every object, and goes on
            raise

    def __iter__(self) -> Any:
        return _Iterator(self._do("iter"), self)

    def __reversed__(self) -> Any:
        return _Iterator(self._do("reversed"), self)

    def __next__(self) -> Any:
        value = self._do("next")
        if value is _ENDED:
            raise StopIteration
        return value

    def __contains__(self, item: object) -> bool:
        return any(item is part or item == part for part in self)

    def __await__(self) -> Any:
        return self._do("run")
        yield

    def send(self, value: Any) -> Any:
        """Run a coroutine in the program's own loop to its end, in the form that ``asyncio.run`` expects."""
        raise StopIteration(self._do("run"))

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        return

    def __lt__(self, other: Any) -> Any:
        return self._ordered("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._ordered("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._ordered("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._ordered("ge", other)


_COMBINING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in ("abs", "neg", "getitem", "setitem", "delitem", "enter", "exit"):
    setattr(_Able, f"__{_name}__", _asking(_name))
for _name in ("int", "float", "index"):
    setattr(_Able, f"__{_name}__", _standing_for(_name))
for _name in _COMBINING:
    setattr(_Able, f"__{_name}__", _combining(_name))
for _name in ("str", "repr"):
    setattr(Remote, f"__{_name}__", _asking(_name))
_METHODS = {
    "call": ["__call__", "__instancecheck__"], "iter": ["__iter__", "__contains__"], "next": ["__next__"], "len": ["__len__"],
    "getitem": ["__getitem__"], "setitem": ["__setitem__"], "delitem": ["__delitem__"], "reversed": ["__reversed__"],
    "lt": ["__lt__", "__le__", "__gt__", "__ge__"], "enter": ["__enter__", "__exit__"], "int": ["__int__"],
    "float": ["__float__"], "index": ["__index__"], "await": ["__await__", "send", "throw", "close"],
    "number": ["__abs__", "__neg__", *(f"__{name}__" for name in _COMBINING)],
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def _kind(features: frozenset[str]) -> type[Remote]:
    """The class of objects that can do these things, so that ``callable`` and ``isinstance`` tell the truth."""
    names = [name for feature in sorted(features & _METHODS.keys()) for name in _METHODS[feature]]
    return type("Remote", (Remote,), {name: vars(_Able)[name] for name in names if name in vars(_Able)})


def named(link: ProgramLink, name: str) -> Remote:
    """A name of the program, of a kind unknown so far."""
    return _Able(link, {"name": name})


class _Iterator:
    """An iteration over an object of the program: ends only at its own end, and at its length where known."""

    def __init__(self, remote: Any, owner: Remote) -> None:
        if not isinstance(remote, Remote):
            raise TypeError("the program's iterator is no iterator")
        self._remote = remote
        has_length = "handle" in owner._target and hasattr(type(owner), "__len__") and not owner._is_made
        self._owner: Any = owner if has_length else None
        self._num_parts = 0

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        try:
            part = self._remote.__next__()
        except StopIteration:
            if self._owner is not None and len(self._owner) != self._num_parts:
                raise CallFailedError("an object of another length than it has parts") from None
            raise
        self._num_parts += 1
        return part
