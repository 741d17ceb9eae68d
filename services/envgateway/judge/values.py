"""Comparing plain data in its tree form (``bare.plain``), without ever building the objects of a stranger.

Nothing here hashes or orders a value that a program chose (texts excepted, whose hashes it cannot foresee), so no
choice of values makes a comparison slow. Numbers compare by value, exactly; NaN equals nothing, itself included.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

Tree: TypeAlias = Any
_Number: TypeAlias = int | float | complex
_SHOWN_CHARS = 200
_BRACKETS = {"l": "[]", "t": "()", "s": "{}", "z": "{}", "d": "{}", "L": "[]", "T": "[]"}
_NO_TREE = (RecursionError, ValueError, OverflowError, IndexError, TypeError)  # what a stranger's tree may lead to


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRule:
    """What counts as equal beyond Python's own ``==``.

    >>> equal(["l", 1], ["t", 1], ValueRule()), equal(["l", 1], ["t", 1], ValueRule(strict=True))
    (True, False)
    """

    strict: bool = False  # a list is no tuple
    tolerance: float | None = None  # of numbers that are not both integers: relative or absolute
    unordered: bool = False  # the outermost list or tuple is a multiset


def equal(expected: Tree, actual: Tree, rule: ValueRule) -> bool:
    """Whether two trees stand for equal values; False for what is no tree."""
    try:
        if rule.unordered and _is_sequence(expected) and _is_sequence(actual):
            return _same_multiset(expected[1:], actual[1:], rule)
        return _equal(expected, actual, rule)
    except _NO_TREE:
        return False


def truth(tree: Tree) -> bool | None:
    """``bool`` of the value; None for an object that is no data."""
    if not isinstance(tree, list):
        return bool(tree)
    try:
        number = _number(tree)
        if number is not None:
            return bool(number)
        if tree[0] == "b":
            return bool(tree[1])
        return None if tree[0] not in _BRACKETS else len(tree) > 1
    except _NO_TREE:
        return None


def distance(a: Tree, b: Tree) -> float | None:
    """|a - b| of two real numbers; None when one is not."""
    try:
        first, second = _number(a), _number(b)
        if first is None or second is None or isinstance(first, complex) or isinstance(second, complex):
            return None
        return abs(float(first - second))
    except _NO_TREE:
        return None


def shown(tree: Tree) -> str:
    """A short text for people."""
    parts: list[str] = []
    try:
        _show(tree, parts)
    except _NO_TREE:
        return "<no data>"
    text = "".join(parts)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _show(tree: Tree, parts: list[str]) -> None:
    if sum(map(len, parts[-50:])) > 2 * _SHOWN_CHARS or len(parts) > 2 * _SHOWN_CHARS:
        return
    if not isinstance(tree, list):
        parts.append(repr(tree)[: 2 * _SHOWN_CHARS])
    elif not tree or tree[0] not in _BRACKETS:
        parts.append(_shown_leaf(tree))
    else:
        parts.append(_BRACKETS[tree[0]][0])
        for index, part in enumerate(tree[1:]):
            separator = ": " if tree[0] == "d" and index % 2 else ", "
            parts.append(separator if index else "")
            _show(part, parts)
            if len(parts) > 2 * _SHOWN_CHARS:
                break
        parts.append(_BRACKETS[tree[0]][1])


def _shown_leaf(leaf: list[Any]) -> str:
    number = _number(leaf)
    if number is None:
        return f"<{leaf[1]}>"
    return repr(number) if not isinstance(number, int) else f"{leaf[1][:_SHOWN_CHARS]}"


def _is_sequence(tree: Tree) -> bool:
    return isinstance(tree, list) and bool(tree) and tree[0] in ("l", "t")


def _number(tree: Tree) -> _Number | None:
    if isinstance(tree, (bool, int)):
        return int(tree)
    if isinstance(tree, float):  # JSON written by others
        return tree
    if isinstance(tree, list) and tree:
        if tree[0] == "i":
            return int(tree[1], 16)
        if tree[0] == "f":
            return float.fromhex(tree[1])
        if tree[0] == "c":
            return complex(float.fromhex(tree[1]), float.fromhex(tree[2]))
    return None


def close(expected: _Number, actual: _Number, tolerance: float | None) -> bool:
    """Integers exactly; others within the tolerance, where there is one."""
    if expected == actual:
        return True
    if tolerance is None or (isinstance(expected, int) and isinstance(actual, int)):
        return False
    difference = abs(expected - actual)
    return math.isfinite(difference) and difference <= tolerance * max(1.0, abs(expected))


def _equal(a: Tree, b: Tree, rule: ValueRule) -> bool:
    first, second = _number(a), _number(b)
    if first is not None and second is not None:
        return close(first, second, rule.tolerance)
    if first is not None or second is not None:
        return False
    if not isinstance(a, list) or not isinstance(b, list):
        return type(a) is type(b) and a == b
    kind, other = a[0], b[0]
    if kind in ("l", "t") and other in ("l", "t"):
        return (kind == other or not rule.strict) and _all_equal(a, b, rule)
    if kind in ("s", "z") and other in ("s", "z"):
        return set(map(key, a[1:])) == set(map(key, b[1:]))
    if kind != other:
        return False
    if kind in ("L", "T"):
        return _all_equal(a, b, rule)
    if kind == "d":
        return _equal_dicts(a, b, rule)
    return kind == "b" and bool(a[1] == b[1])


def _all_equal(a: list[Any], b: list[Any], rule: ValueRule) -> bool:
    return len(a) == len(b) and all(_equal(x, y, rule) for x, y in zip(a[1:], b[1:], strict=True))


def _equal_dicts(a: list[Any], b: list[Any], rule: ValueRule) -> bool:
    first = {key(k): v for k, v in zip(a[1::2], a[2::2], strict=True)}
    second = {key(k): v for k, v in zip(b[1::2], b[2::2], strict=True)}
    return first.keys() == second.keys() and all(_equal(value, second[k], rule) for k, value in first.items())


def _same_multiset(a: list[Any], b: list[Any], rule: ValueRule) -> bool:
    if len(a) != len(b):
        return False
    return Counter(map(key, a)) == Counter(map(key, b))


def key(tree: Tree) -> str:
    """A text that equal values share. Raises ``ValueError`` for NaN and for what is no data."""
    number = _number(tree)
    if number is not None:
        if number != number:
            raise ValueError("NaN equals nothing")
        if isinstance(number, complex):
            number = number.real if number.imag == 0 else number
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        return hex(number) if isinstance(number, int) else repr(number)
    if isinstance(tree, str):
        return "'" + tree.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if tree is None:
        return "None"
    kind, parts = tree[0], tree[1:]
    if kind == "b":
        return f"b'{parts[0]}'"
    if kind in ("o", "h"):
        raise ValueError("an object is no data")
    keys = [key(part) for part in parts]
    if kind in ("s", "z"):
        kind, keys = "s", sorted(set(keys))
    elif kind == "d":
        keys = sorted(f"{k}:{v}" for k, v in zip(keys[::2], keys[1::2], strict=True))
    elif kind == "t":
        kind = "l"
    return f"{kind}[{','.join(keys)}]"
