"""Compares a program's output with the expected text: the rules, one function each.

    exact             the same bytes
    stripped          the same bytes, without white space at both ends of the whole
    lines             the same lines, without white space at both ends of each and without blank lines; numbers in any form, those
                      with a decimal part within 1e-6 or one part in 100,000, integers exactly
    tokens            the same words
    float             the same words; numbers within the tolerance unless both are integers; NaN equals no value
    unordered_lines   the same lines in any order, as often, without white space at their ends and blank lines at the end
    unordered_tokens  the same words in any order, as often
    json              both are JSON and equal as such: true is not 1, and 1.0 is 1; NaN equals no value
    literal           both are Python literals and equal as values: True is 1; NaN equals no value

Everywhere but in ``exact`` a CRLF is a line feed. White space is ASCII white space; bytes that are no UTF-8 equal only
themselves, so they equal no expected text. The value modes are for calls.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

from services.common.text.literals import NotLiteralError, to_tree, tree_of
from services.common.text.programs import parsed_expression
from services.envgateway.judge.records import Comparison, ComparisonMode
from services.envgateway.sandbox.bare import plain

# --- Compares plain data in its tree form (``bare.plain``): of a tree from untrusted code only built-in values are made.


Tree: TypeAlias = Any
_Number: TypeAlias = int | float | complex | Fraction
_NUMBERS = (int, float, complex, Fraction)
_SHOWN_CHARS = 200
_LONGEST_DECIMAL, _LARGEST_EXPONENT = 2000, 5000
_MOST_DIMENSIONS = 64
_BRACKETS = {"q": "[]", "l": "[]", "t": "()", "s": "{}", "z": "{}", "d": "{}", "L": "[]", "T": "[]"}
# errors that a program can cause by a false tree or frame in place of its harness's: none is a failure of ours
NO_TREE = (RecursionError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRule:
    """Values that count as equal beyond Python's own ``==``.

    >>> equal(["l", 1], ["t", 1], ValueRule()), equal(["l", 1], ["t", 1], ValueRule(strict=True))
    (True, False)
    """

    strict: bool = False  # a list is no tuple
    booleans: bool = False  # true and false are no numbers, as in JSON
    tolerance: float | None = None  # of numbers that are not both integers: relative or absolute
    unordered: bool = False  # the outermost list or tuple is a multiset


def equal(expected: Tree, actual: Tree, rule: ValueRule) -> bool:
    """Whether two trees represent equal values; False for a value that is not a tree."""
    try:
        first, second = (_value(tree, rule.strict) for tree in (expected, actual))
        if rule.unordered:
            first, second = _expanded(first, second), _expanded(second, first)
            if type(first) is tuple and type(second) is tuple:
                return len(first) == len(second) and Counter(map(_frozen, first)) == Counter(map(_frozen, second))
        return _equal(first, second, rule)
    except NO_TREE:
        return False


def truth(tree: Tree) -> bool | None:
    """``bool`` of the value; None for an object that is no data, and for an array of several values."""
    try:
        value = _value(tree, strict=True)
        if isinstance(value, _Array):
            return bool(value[0]) if len(value) == 1 else None
        return None if isinstance(value, _Thing) else bool(value)
    except NO_TREE:
        return None


def distance(a: Tree, b: Tree) -> float | None:
    """|a - b| of two real numbers; None when one is not."""
    try:
        first, second = _value(a, strict=True), _value(b, strict=True)
        if not isinstance(first, (int, float, Fraction)) or not isinstance(second, (int, float, Fraction)):
            return None
        return abs(float(first - second))
    except NO_TREE:
        return None


class _Deque(tuple[Any, ...]):
    pass


class _LinkedList(tuple[Any, ...]):
    pass


class _BinaryTree(tuple[Any, ...]):
    pass


class _Array(tuple[Any, ...]):
    """The values of an array of numpy, which equals no list where the rule is strict."""


class _Thing:
    """An object that is no data: equal to no value."""


def _value(tree: Tree, strict: bool) -> Any:
    """The value of a tree: a list as a tuple, unless the rule is strict, a set as a frozenset. Raises one of ``NO_TREE``."""
    if not isinstance(tree, list):
        return tree
    tag, parts = tree[0], tree[1:]
    match tag:
        case "i" | "f" | "c" | "b":
            return plain.LEAVES[tag](parts)
        case "F":
            return Fraction(*_whole(parts))
        case "D":
            return _decimal(parts[0])
        case "r":
            return range(*_whole(parts))
        case "o":
            return _Thing()
    values = [_value(part, strict) for part in parts]
    match tag:
        case "l":
            return values if strict else tuple(values)
        case "t":
            return tuple(values)
        case "s" | "z":
            return frozenset(map(_frozen, values))
        case "d":
            return dict(zip(map(_frozen, values[::2]), values[1::2], strict=True))
        case "q":
            return _Deque(values) if strict else tuple(values)
        case "L":
            return _LinkedList(values)
        case "T":
            return _BinaryTree(values)
        case "n":
            return _Array(values[2:]) if strict else _nested(values[1], values[2:])
    raise ValueError(f"no tag {tag!r}")


def _whole(trees: list[Tree]) -> list[int]:
    numbers = [_value(tree, strict=True) for tree in trees]
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError("not an integer")
    return numbers


def _decimal(text: str) -> _Number:
    number = Decimal(text[:_LONGEST_DECIMAL])
    if number.is_finite() and (len(text) > _LONGEST_DECIMAL or abs(number.adjusted()) > _LARGEST_EXPONENT):
        raise ValueError("a decimal that is too long to compare")
    return Fraction(number) if number.is_finite() else float(number)


def _nested(shape: tuple[int, ...], values: list[Any]) -> Any:
    """An array as tuples. Raises ``ValueError`` for another number of values than the shape has."""
    if len(shape) > _MOST_DIMENSIONS:  # numpy's own bound; the product of so many would take long
        raise ValueError("an array of too many dimensions")
    if math.prod(shape) != len(values) or (not values and shape[0]):  # an empty one is compared by its first axis only
        raise ValueError("an array of another shape")
    if not shape:
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    return tuple(_nested(shape[1:], values[index * step : (index + 1) * step]) for index in range(shape[0]))


def _expanded(value: Any, other: Any) -> Any:
    """A range as the tuple of its values, where it is compared with a tuple of as many: a range of few digits may be long."""
    return tuple(value) if isinstance(value, range) and type(other) is tuple and len(value) == len(other) else value


def _frozen(value: Any) -> Any:
    """The value in a form that has a hash."""
    if isinstance(value, dict):
        return dict, frozenset((key, _frozen(held)) for key, held in value.items())
    if isinstance(value, _Array) and len(value) == 1:
        return value[0]
    if not isinstance(value, (list, tuple)):
        return value
    kind = () if type(value) in (list, tuple) else (type(value),)
    return (*kind, *map(_frozen, value))


def close(expected: _Number, actual: _Number, tolerance: float | None) -> bool:
    """Integers exactly; others within the tolerance, where there is one."""
    if expected == actual:
        return True
    if tolerance is None or (isinstance(expected, int) and isinstance(actual, int)):
        return False
    first, second = complex(expected), complex(actual)
    difference = abs(first - second)
    return math.isfinite(difference) and difference <= tolerance * max(1.0, abs(first))


def _equal(a: Any, b: Any, rule: ValueRule) -> bool:
    if isinstance(b, _Array) and len(b) == 1:  # numpy compares part by part; here the result is one
        while type(a) in (list, tuple) and len(a) == 1:
            a = a[0]
        b = b[0]
    if not rule.strict:
        a, b = _expanded(a, b), _expanded(b, a)
    if rule.booleans and isinstance(a, bool) is not isinstance(b, bool):
        return False
    if isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
        return close(a, b, rule.tolerance)
    if type(a) is not type(b) or isinstance(a, _Array):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, rule) for x, y in zip(a, b, strict=True))
    return _equal_dicts(a, b, rule) if isinstance(a, dict) else bool(a == b)


def _equal_dicts(a: dict[Any, Any], b: dict[Any, Any], rule: ValueRule) -> bool:
    # JSON has text keys only, so the intended types are unknown
    if not rule.strict and a.keys() != b.keys() and all(isinstance(key, str) for key in a):
        spelt = {_spelt(key, a): held for key, held in b.items()}
        if len(spelt) != len(b):
            return False
        b = spelt
    return a.keys() == b.keys() and all(_equal(held, b[key], rule) for key, held in a.items())


def _spelt(key: Any, texts: dict[str, Any]) -> str:
    """A key as one of the texts spells it, in the form of JSON or of Python; 1 and 1.0 are one key."""
    if isinstance(key, str):
        return key
    spelt = [str(key)]
    if isinstance(key, bool) or key is None:
        spelt.insert(0, {True: "true", False: "false", None: "null"}[key])
    elif isinstance(key, (int, float)) and key == key // 1:
        spelt += [str(int(key)), f"{int(key)}.0"]
    return next((text for text in spelt if text in texts), spelt[0])


def shown(tree: Tree) -> str:
    """A short text for people."""
    parts: list[str] = []
    try:
        _show(tree, parts)
    except NO_TREE:
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
    match leaf[0]:
        case "f" | "c":
            return repr(_value(leaf, strict=True))
        case "i":
            return str(leaf[1][:_SHOWN_CHARS])
        case "F" | "D":
            return str(leaf[1:])
        case "r" | "n":
            return f"{'range' if leaf[0] == 'r' else 'array'}({leaf[1:_SHOWN_CHARS]})"
    return f"<{leaf[1][:_SHOWN_CHARS].encode('unicode_escape').decode()}>"


_LARGEST_PARSED = 1 << 18  # bytes of a JSON or literal text: parsing untrusted text costs a multiple in memory
_INTEGER = re.compile(rb"[+-]?\d+")
_NUMBER = re.compile(rb"[+-]?(?:\d++\.?+\d*+|\.\d++)(?:[eE][+-]?\d{1,9}+)?")
_INFINITE = re.compile(rb"([+-]?)inf(?:inity)?", re.IGNORECASE)
_LONGEST_NUMBER = 400  # bytes of a word that is compared as a number; integers are compared as text, at any length
_ABSOLUTE, _RELATIVE = 1e-6, 1e-5  # distance of numbers with a decimal part; the wider of the two
_SHOWN_BYTES = 100
VALUE_MODES = (ComparisonMode.VALUE, ComparisonMode.VALUE_UNORDERED, ComparisonMode.VALUE_FLOAT)


def value_rule(comparison: Comparison) -> ValueRule:
    """The rule for returned values; a list equals a tuple, because JSON requests do not distinguish them."""
    mode = comparison.mode
    return ValueRule(
        tolerance=comparison.tolerance if mode is ComparisonMode.VALUE_FLOAT else None,
        unordered=mode is ComparisonMode.VALUE_UNORDERED,
    )


def difference(expected: str, printed: bytes, comparison: Comparison) -> str:
    """The difference in words; empty when the rule is satisfied."""
    mode = comparison.mode or ComparisonMode.LINES
    try:
        wanted = expected.encode()
    except UnicodeEncodeError:  # a lone surrogate: no bytes encode one
        return "the expected output is no text"
    if mode is ComparisonMode.EXACT:
        return _first_difference([wanted], [printed], "output")
    wanted, printed = wanted.replace(b"\r\n", b"\n"), printed.replace(b"\r\n", b"\n")
    if mode is ComparisonMode.FLOAT:
        same = partial(_close_words, tolerance=comparison.tolerance)
        return _first_difference(wanted.split(), printed.split(), "word", same)
    if mode is ComparisonMode.JSON:
        return _parsed_difference(lambda text: to_tree(json.loads(text)), "JSON", wanted, printed)
    if mode is ComparisonMode.LITERAL:
        return _parsed_difference(_literal_tree, "literal", wanted, printed)
    if mode is ComparisonMode.LINES:
        return _first_difference(_filled_lines(wanted), _filled_lines(printed), "line", _same_line)
    split, ordered, what = _RULES[mode]
    wanted_parts, printed_parts = split(wanted), split(printed)
    if ordered:
        return _first_difference(wanted_parts, printed_parts, what)
    if Counter(wanted_parts) == Counter(printed_parts):
        return ""
    return f"other {what}s than expected, or not as often: {len(printed_parts)} instead of {len(wanted_parts)}"


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


_RULES: dict[ComparisonMode, tuple[Callable[[bytes], list[bytes]], bool, str]] = {
    ComparisonMode.STRIPPED: (lambda text: [text.strip()], True, "output"),
    ComparisonMode.TOKENS: (lambda text: text.split(), True, "word"),
    ComparisonMode.UNORDERED_LINES: (_lines, False, "line"),
    ComparisonMode.UNORDERED_TOKENS: (lambda text: text.split(), False, "word"),
}


def _first_difference(
    wanted: list[bytes], printed: list[bytes], what: str, same: Callable[[bytes, bytes], bool] = operator.eq
) -> str:
    for number, (expected, actual) in enumerate(zip(wanted, printed, strict=False), start=1):
        if not same(expected, actual):
            where = what if what == "output" else f"{what} {number}"
            return f"{where}: expected {_shown(expected)}, got {_shown(actual)}"
    return "" if len(wanted) == len(printed) else f"{len(printed)} {what}s instead of {len(wanted)}"


def _filled_lines(text: bytes) -> list[bytes]:
    return [stripped for line in text.split(b"\n") if (stripped := line.strip())]


def _same_line(expected: bytes, actual: bytes) -> bool:
    """Equal, or word by word with numbers in another form. Blanks between words count where all words are equal."""
    if expected == actual:
        return True
    words, given = expected.split(), actual.split()
    return len(words) == len(given) and words != given and all(map(_same_word, words, given))


def _same_word(expected: bytes, actual: bytes) -> bool:
    if expected == actual:
        return True
    if max(len(expected), len(actual)) > _LONGEST_NUMBER or not _are_both(_NUMBER, expected, actual):
        return _are_both(_INFINITE, expected, actual) and (expected[:1] == b"-") == (actual[:1] == b"-")
    if _are_both(_INTEGER, expected, actual):  # leading zeros count: they are digits of another thing than a number
        return expected.removeprefix(b"+") == actual.removeprefix(b"+")
    exact, given = Decimal(expected.decode()), Decimal(actual.decode())
    if exact == given or (exact == exact.to_integral_value() and given == given.to_integral_value()):
        return exact == given
    apart = abs(float(exact) - float(given))
    return apart <= max(_ABSOLUTE, 0 if _INTEGER.fullmatch(expected) else _RELATIVE * abs(float(exact)))


def _are_both(form: re.Pattern[bytes], expected: bytes, actual: bytes) -> bool:
    return bool(form.fullmatch(expected) and form.fullmatch(actual))


def _shown(text: bytes) -> str:
    return repr(text[:_SHOWN_BYTES].decode(errors="replace")) + ("…" if len(text) > _SHOWN_BYTES else "")


def _close_words(expected: bytes, actual: bytes, tolerance: float) -> bool:
    if expected.lower().lstrip(b"+-") == b"nan":
        return False
    if _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(actual):  # of any length, so never as floats
        return _plain_integer(expected) == _plain_integer(actual)
    if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(actual):
        wanted, given = float(expected), float(actual)
        if math.isinf(wanted) or math.isinf(given):  # beyond the range of a float: compared as text
            return expected == actual
        return close(wanted, given, tolerance)
    infinite, also = _INFINITE.fullmatch(expected), _INFINITE.fullmatch(actual)
    if infinite and also:
        return (infinite[1] == b"-") == (also[1] == b"-")
    return expected == actual


def _plain_integer(text: bytes) -> bytes:
    digits = text.lstrip(b"+-").lstrip(b"0")
    return b"-" + digits if text.startswith(b"-") and digits else digits


def _parsed_difference(parse: Callable[[bytes], Any], what: str, wanted: bytes, printed: bytes) -> str:
    if len(printed) > max(_LARGEST_PARSED, 2 * len(wanted)):
        return f"{len(printed)} bytes are too many to be the {what} that was expected"
    if what == "literal" and (wrong := _why_no_value(printed)):
        return wrong
    trees = []
    for text, whose in ((wanted, "the expected output"), (printed, "the output")):
        try:
            trees.append(parse(text))
        except (ValueError, RecursionError, MemoryError, SyntaxError) as error:
            return f"{whose} is no {what}: {str(error)[:_SHOWN_BYTES]}"
    rule = ValueRule(strict=True, booleans=what == "JSON")
    return "" if equal(trees[0], trees[1], rule) else f"another value than the expected {what}"


def _why_no_value(printed: bytes) -> str:
    """Why the text is not a value: a program must print a value, not an expression such as ``3 * 19`` or ``list((1,
    2))``."""
    try:
        tree = parsed_expression(printed.strip())
    except (ValueError, RecursionError, MemoryError, SyntaxError):
        return ""  # the detail comes from the reading function
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="set" | "frozenset" | "float")):
                continue
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=complex())):
                continue
            case ast.Call() | ast.BinOp():
                return "the output is no literal: it is an expression"
    return ""


def _literal_tree(text: bytes) -> Any:
    try:
        return tree_of(parsed_expression(text.strip()))
    except NotLiteralError as error:
        raise ValueError(str(error)) from None
