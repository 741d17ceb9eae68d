"""Plain data as a JSON tree with tags, so that values cross a process boundary without pickle and without loss.

    None, True, "text", 7 (below 2**53)                themselves
    ["i", "0x..."] ["f", "0x1.8p+1"] ["c", re, im]     big integers; floats exactly, "nan" and "inf" too; complex
    ["b", "ff00"]                                      bytes
    ["l", ...] ["t", ...] ["s", ...] ["z", ...]        list, tuple, set, frozenset
    ["d", key, value, key, value, ...]                 dict
    ["L", ...] ["T", ...]                              linked list of ListNode; tree of TreeNode, level by level
    ["r", 0, 9, 1] ["q", ...]                          range; deque
    ["n", "<f8", ["t", 2, 3], ...]                     array of numpy: type, shape, values in order
    ["F", 1, 3] ["D", "0.1"]                           Fraction; Decimal
    ["o", "deque"]                                     anything else, by the name of its type: equal to no value

``encode`` runs beside untrusted code: ``encode`` reads the real type of each object and calls the methods of the
built-in base class, so no override of ``__class__``, ``__eq__``, ``__iter__`` or ``__index__`` affects the tree.
"""

from __future__ import annotations

import json
import sys
from _json import encode_basestring_ascii as _quote  # by reference: no program can replace json here
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200
_decode = json.JSONDecoder().decode  # held here, for the same reason as the quote above
_SMALL = 1 << 53
_MAX_NODES = 1_000_000


class TooLargeError(ValueError):
    """A value with too many parts to compare."""


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


def encode(value: Any) -> str:
    """The tree of a value as JSON text.

    Raises:
        TooLargeError: the value has more than a million parts.
    """
    return "".join(_Writer().written(value))


class _Writer:
    def __init__(self) -> None:
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
            self._write_all("t", tuple.__iter__(value), depth)
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

    def _write_library(self, value: Any, kind: type, depth: int) -> bool:
        """Values of the library that are plain data as well; False for all others."""
        module = type.__getattribute__(kind, "__module__")
        if kind is range:
            self._write_all("r", iter((value.start, value.stop, value.step)), depth)
        elif kind is deque:
            self._write_all("q", deque.__iter__(value), depth)
        elif module == "numpy" and issubclass(kind, sys.modules["numpy"].generic) and value.dtype.kind != "b":
            self._write(value.item(), depth + 1)
        elif module == "numpy" and (kind is sys.modules["numpy"].ndarray or kind is sys.modules["numpy"].bool_):
            form = value.dtype.kind
            if form not in "biufcU" or (value.dtype.itemsize > 16 and form != "U"):  # wider than Python's own numbers
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


LEAVES: dict[str, Callable[[list[Any]], Any]] = {
    "i": lambda parts: int(parts[0], 16),
    "f": lambda parts: float.fromhex(parts[0]),
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "b": lambda parts: bytes.fromhex(parts[0]),
}


_HOLDERS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "d": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "L": lambda parts: build_list(parts),
    "T": lambda parts: build_tree(parts),
}


def from_tree(tree: Any) -> Any:
    """The value of a tree of arguments: of literals, and of lists and trees of nodes.

    Raises:
        ValueError: the tree has not this form.
    """
    if not isinstance(tree, list):
        return tree
    try:
        tag, parts = tree[0], tree[1:]
        return LEAVES[tag](parts) if tag in LEAVES else _HOLDERS[tag]([from_tree(part) for part in parts])
    except (KeyError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no tree of plain data: {error!r}") from error


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
