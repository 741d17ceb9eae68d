"""Plain data as a JSON tree with tags, so that values cross a process boundary without pickle and without loss.

    None, True, "text", 7 (below 2**53)                themselves
    ["i", "0x..."] ["f", "0x1.8p+1"] ["c", re, im]     big integers; floats exactly, "nan" and "inf" too; complex
    ["b", "ff00"]                                      bytes
    ["l", ...] ["t", ...] ["s", ...] ["z", ...]        list, tuple, set, frozenset
    ["d", key, value, key, value, ...]                 dict
    ["L", ...] ["T", ...]                              linked list of ListNode; tree of TreeNode, level by level
    ["r", 0, 9, 1] ["q", ...]                          range; deque
    ["n", "<f8", ["t", 2, 3], ...]                     array of numpy: type, shape, values in order
    ["N", "Point", ["t", "x"], ...]                    named tuple: type, fields, values
    ["F", 1, 3] ["D", "0.1"]                           Fraction; Decimal
    ["h", 3, "call", ...]                              an object that stays in its process, by number, and what can be
                                                       done with it
    ["o", "deque"]                                     anything else, by the name of its type: equal to no value

``encode`` runs beside untrusted code: ``encode`` reads the real type of each object and calls the methods of the
built-in base class, so no override of ``__class__``, ``__eq__``, ``__iter__`` or ``__index__`` affects the tree.
"""

from __future__ import annotations

import functools
import json
import sys
from _json import encode_basestring_ascii as _quote  # by reference: no program can replace json here
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

from . import broadcasts

MAX_DEPTH = 200
_decode = json.JSONDecoder().decode  # held here, for the same reason as the quote above
_SMALL = 1 << 53
_MAX_NODES = 1_000_000


class TooLargeError(ValueError):
    """A value with too many parts to compare."""


class Linked:
    """A linked list, by its values."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Linked) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


class Tree:
    """A binary tree, level by level, with None where a child is missing and none at the end."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


class Opaque:
    """A value that is not plain data; equal to no value, itself included."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


class ListNode:
    """The node that call-style problems use for linked lists."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    """The node that call-style problems use for binary trees."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


def encode(value: Any, handle: Callable[[Any], str] | None = None) -> str:
    """The tree of a value as JSON text; ``handle`` names objects that are not plain data, as the rest of their trees.

    Raises:
        TooLargeError: the value has more than a million parts.
    """
    return "".join(_Writer(handle).written(value))


class _Writer:
    def __init__(self, handle: Callable[[Any], str] | None) -> None:
        self._handle = handle
        self._parts: list[str] = []

    def written(self, value: Any) -> list[str]:
        self._write(value, 0)
        return self._parts

    def _write(self, value: Any, depth: int) -> None:
        kind = type(value)
        parts = self._parts
        if len(parts) > _MAX_NODES:
            raise TooLargeError("the value has too many parts")
        if value is None:
            parts.append("null")
        elif kind is bool:
            parts.append("true" if value else "false")
        elif issubclass(kind, int):
            self._write_int(int.__int__(value))
        elif issubclass(kind, float):
            parts.append(f'["f","{float.hex(float.__float__(value))}"]')
        elif issubclass(kind, str):
            parts.append(_quote(str.__str__(value)))
        elif issubclass(kind, (bytes, bytearray)):
            parts.append(f'["b","{bytes.hex(value) if issubclass(kind, bytes) else bytearray.hex(value)}"]')
        elif issubclass(kind, complex):
            exact = complex.__complex__(value)
            parts.append(f'["c","{float.hex(exact.real)}","{float.hex(exact.imag)}"]')
        elif depth >= MAX_DEPTH:
            self._write_other(value, kind)
        elif issubclass(kind, list):
            self._write_all("l", list.__iter__(value), depth)
        elif issubclass(kind, tuple):
            self._write_tuple(value, kind, depth)
        elif issubclass(kind, set):
            self._write_all("s", set.__iter__(value), depth)
        elif issubclass(kind, frozenset):
            self._write_all("z", frozenset.__iter__(value), depth)
        elif issubclass(kind, dict):
            self._write_all("d", (part for pair in dict.items(value) for part in pair), depth)
        else:
            self._write_object(value, kind, depth)

    def _write_int(self, number: int) -> None:
        small = -_SMALL < number < _SMALL
        self._parts.append(int.__repr__(number) if small else f'["i","{hex(number)}"]')

    def _write_all(self, tag: str, values: Any, depth: int) -> None:
        self._parts.append(f'["{tag}"')
        for value in values:
            self._parts.append(",")
            self._write(value, depth + 1)
        self._parts.append("]")

    def _write_tuple(self, value: Any, kind: type, depth: int) -> None:
        fields = vars(kind).get("_fields") if self._handle is not None and kind is not tuple else None
        if type(fields) is tuple and len(fields) == tuple.__len__(value) and all(type(name) is str for name in fields):
            name = type.__getattribute__(kind, "__name__")
            self._parts.append(f'["N",{_quote(str(name))},["t"{"".join("," + _quote(field) for field in fields)}]')
            for part in tuple.__iter__(value):
                self._parts.append(",")
                self._write(part, depth + 1)
            self._parts.append("]")
        else:
            self._write_all("t", tuple.__iter__(value), depth)

    def _write_library(self, value: Any, kind: type, depth: int) -> bool:
        """Values of the library that are plain data as well; False for all others."""
        module = type.__getattribute__(kind, "__module__")
        if kind is range:
            self._write_all("r", iter((value.start, value.stop, value.step)), depth)
        elif kind is deque:
            self._write_all("q", deque.__iter__(value), depth)
        elif module == "numpy" and issubclass(kind, sys.modules["numpy"].generic):
            self._write(value.item(), depth + 1)
        elif (
            module == "numpy"
            and kind in (sys.modules["numpy"].ndarray, broadcasts.empty_type())
            and value.dtype.kind in "biufcU"
        ):
            if value.dtype.itemsize > 16 and value.dtype.kind != "U":  # wider than Python's own numbers
                return False
            shape = ",".join(map(int.__repr__, value.shape))
            self._parts.append(f'["n",{_quote(value.dtype.str)},["t"{"," if shape else ""}{shape}]')
            for part in list.__iter__(value.ravel().tolist()):
                self._parts.append(",")
                self._write(part, depth + 1)
            self._parts.append("]")
        elif module == "fractions" and kind is sys.modules["fractions"].Fraction:
            self._write_all("F", iter((value.numerator, value.denominator)), depth)
        elif module == "decimal" and kind is sys.modules["decimal"].Decimal:
            self._parts.append(f'["D",{_quote(kind.__str__(value))}]')
        else:
            return False
        return True

    def _write_object(self, value: Any, kind: type, depth: int) -> None:
        name = type.__getattribute__(kind, "__name__")
        try:
            if name == "ListNode":
                self._write_all("L", list.__iter__(_linked_values(value)), depth)
                return
            if name == "TreeNode":
                self._write_all("T", list.__iter__(_tree_values(value)), depth)
                return
            if self._write_library(value, kind, depth):
                return
        except (AttributeError, KeyError):  # only named like a node
            pass
        self._write_other(value, kind)

    def _write_other(self, value: Any, kind: type) -> None:
        if self._handle is not None:
            self._parts.append(f'["h",{self._handle(value)}]')
        else:
            self._parts.append(f'["o",{_quote(str(type.__getattribute__(kind, "__name__")))}]')


def _linked_values(node: Any) -> list[Any]:
    values = []
    while node is not None:
        values.append(node.val)
        node = node.next
        if len(values) > _MAX_NODES:
            raise TooLargeError("the linked list does not end")
    return values


def _tree_values(root: Any) -> list[Any]:
    values: list[Any] = []
    level = [root]
    while level:
        following = []
        for node in level:
            if node is None:
                values.append(None)
                continue
            values.append(node.val)
            following += [node.left, node.right]
        if len(values) > _MAX_NODES:
            raise TooLargeError("the tree does not end")
        level = following if any(node is not None for node in following) else []
    while values and values[-1] is None:
        values.pop()
    return values


@functools.lru_cache(maxsize=64)
def _named(name: str, fields: tuple[str, ...]) -> Any:
    """One type for all named tuples of a name and fields."""
    return namedtuple(name, fields)


_READ: dict[str, Callable[[list[Any]], Any]] = {
    "i": lambda parts: int(parts[0], 16),
    "f": lambda parts: float.fromhex(parts[0]),
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "b": lambda parts: bytes.fromhex(parts[0]),
    "o": lambda parts: Opaque(parts[0]),
}


_READ_ALL: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "d": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "L": Linked,
    "T": Tree,
    "r": lambda parts: range(*parts),
    "q": deque,
    "n": lambda parts: _array(parts[0], parts[1], parts[2:]),
    "N": lambda parts: _named(parts[0], parts[1])(*parts[2:]),
    "F": lambda parts: __import__("fractions").Fraction(*parts),
    "D": lambda parts: __import__("decimal").Decimal(parts[0]),
}


def _array(kind: str, shape: tuple[int, ...], values: list[Any]) -> Any:
    import numpy

    if kind[1:2] not in "biufcU" or (kind[1:2] != "U" and int(kind[2:]) > 16):
        raise ValueError(f"an array of {kind!r} is no plain data")
    made = numpy.array(values) if kind[1:2] == "U" else numpy.array(values, dtype=numpy.dtype(kind))
    return made.reshape(shape) if made.size else broadcasts.empty(made.reshape(shape))


def from_tree(tree: Any, resolve: Callable[..., Any] | None = None, nodes: bool = False) -> Any:
    """The value of a tree; ``resolve`` finds the object of a handle; ``nodes`` builds ListNode and TreeNode.

    Raises:
        ValueError: the tree has not this form.
    """
    if not isinstance(tree, list):
        return tree
    try:
        tag, parts = tree[0], tree[1:]
        if tag in _READ:
            return _READ[tag](parts)
        if tag == "h" and resolve is not None:
            return resolve(*parts)
        values = [from_tree(part, resolve, nodes) for part in parts]
        if nodes and tag == "L":
            return build_list(values)
        if nodes and tag == "T":
            return build_tree(values)
        return _READ_ALL[tag](values)
    except (KeyError, IndexError, TypeError, AttributeError, ArithmeticError, ImportError) as error:
        raise ValueError(f"no tree of plain data: {error!r}") from error


def to_tree(value: Any) -> Any:
    """The tree of a value of ours. Raises ``ValueError`` for other than plain data."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -_SMALL < value < _SMALL else ["i", hex(value)]
    if isinstance(value, float):
        return ["f", value.hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, bytes):
        return ["b", value.hex()]
    if isinstance(value, dict):
        return ["d", *(to_tree(part) for pair in value.items() for part in pair)]
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return [tag, *map(to_tree, value)]
    if isinstance(value, Linked):
        return ["L", *map(to_tree, value.values)]
    if isinstance(value, Tree):
        return ["T", *map(to_tree, value.values)]
    raise ValueError(f"a {type(value).__name__} is no plain data")


def parse(text: bytes | str) -> Any:
    """JSON text to a tree, for text that may be hostile. Raises ``ValueError``."""
    try:
        return _decode(text if isinstance(text, str) else text.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def build_list(values: list[Any]) -> ListNode | None:
    head: ListNode | None = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def build_tree(values: list[Any]) -> TreeNode | None:
    """A tree level by level, as ``_tree_values`` writes the levels: a missing node has no places for children."""
    if not values or values[0] is None:
        return None
    rest = iter(values[1:])
    root = TreeNode(values[0])
    level = [root]
    while level:
        following = []
        for node in level:
            for side in ("left", "right"):
                value = next(rest, None)
                if value is not None:
                    child = TreeNode(value)
                    setattr(node, side, child)
                    following.append(child)
        level = following
    return root
