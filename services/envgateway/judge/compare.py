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
themselves, so they equal no expected text. The value modes, for calls, are in ``values``.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

from services.common.text.literals import NotLiteralError, to_tree, tree_of
from services.common.text.programs import parsed_expression
from services.envgateway.judge.records import Comparison, ComparisonMode

# --- Compares plain data in its tree form (``bare.plain``), without building objects from untrusted code.


Tree: TypeAlias = Any
_Number: TypeAlias = int | float | complex | Fraction
_SHOWN_CHARS = 200
_LONGEST_DECIMAL, _LARGEST_EXPONENT = 2000, 5000
_LARGEST_RANGE = 1_000_000
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
        if rule.unordered:
            expected = _listed(expected)
            if _is_range(actual) and not _has_length(expected, actual):
                return False
            actual = _listed(actual)
        if rule.unordered and _is_sequence(expected) and _is_sequence(actual):
            return len(expected) == len(actual) and Counter(map(key, expected[1:])) == Counter(map(key, actual[1:]))
        return _equal(expected, actual, rule)
    except NO_TREE:
        return False


def truth(tree: Tree) -> bool | None:
    """``bool`` of the value; None for an object that is no data."""
    if not isinstance(tree, list):
        return bool(tree)
    try:
        number = _number(tree)
        if number is not None:
            return bool(number)
        if tree[0] == "r":
            return bool(_range(tree))
        if tree[0] == "n":  # an array of one value is as true as this; others are neither
            return truth(tree[3]) if len(tree) == 4 else None
        if tree[0] == "b":
            return bool(tree[1])
        return None if tree[0] not in _BRACKETS else len(tree) > 1
    except NO_TREE:
        return None


def distance(a: Tree, b: Tree) -> float | None:
    """|a - b| of two real numbers; None when one is not."""
    try:
        first, second = _number(a), _number(b)
        if first is None or second is None or isinstance(first, complex) or isinstance(second, complex):
            return None
        return abs(float(first - second))
    except NO_TREE:
        return None


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
    number = _number(leaf)
    if number is None:
        if leaf[0] in ("r", "n"):
            return f"{'range' if leaf[0] == 'r' else 'array'}({leaf[1:_SHOWN_CHARS]})"
        return f"<{leaf[1][:_SHOWN_CHARS].encode('unicode_escape').decode()}>"
    if isinstance(number, Fraction):
        return str(leaf[1:])
    return repr(number) if not isinstance(number, int) else f"{leaf[1][:_SHOWN_CHARS]}"


def _is_range(tree: Tree) -> bool:
    return isinstance(tree, list) and tree[:1] == ["r"]


def _has_length(tree: Tree, other: Tree) -> bool:
    """Whether a tree has as many parts as a range has values: asked before a range of few digits becomes a list."""
    return isinstance(tree, list) and len(tree) - 1 == len(_range(other))


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
        if tree[0] == "F":
            return Fraction(_whole(tree[1]), _whole(tree[2]))
        if tree[0] == "D":
            return _decimal(tree[1])
    return None


def _whole(tree: Tree) -> int:
    number = _number(tree)
    if not isinstance(number, int):
        raise ValueError("a fraction is of integers")
    return number


def _decimal(text: str) -> _Number:
    number = Decimal(text[:_LONGEST_DECIMAL])
    if number.is_finite() and (len(text) > _LONGEST_DECIMAL or abs(number.adjusted()) > _LARGEST_EXPONENT):
        raise ValueError("a decimal that is too long to compare")
    return Fraction(number) if number.is_finite() else float(number)


def _listed(tree: Tree) -> Tree:
    """A range, a deque or an array of numpy as the list of its values; any other tree unchanged."""
    if not isinstance(tree, list) or not tree:
        return tree
    if tree[0] == "q":
        return ["l", *tree[1:]]
    if tree[0] == "r":
        values = _range(tree)
        if len(values) > _LARGEST_RANGE:
            raise ValueError("a range that is too long to compare")
        return ["l", *values]
    if tree[0] == "n":
        return _array(tree)
    return tree


def _range(tree: Tree) -> range:
    return range(*map(_whole, tree[1:]))


def _array(tree: Tree) -> Tree:
    shape, values = [_whole(part) for part in tree[2][1:]], tree[3:]
    if math.prod(shape) != len(values) or (not values and shape[0]):  # an empty one is compared by its first axis only
        raise ValueError("an array of another shape")
    return _nested(shape, values)


def _nested(shape: list[int], values: list[Any]) -> Tree:
    if not shape:
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    return ["l", *(_nested(shape[1:], values[index * step : (index + 1) * step]) for index in range(shape[0]))]


def close(expected: _Number, actual: _Number, tolerance: float | None) -> bool:
    """Integers exactly; others within the tolerance, where there is one."""
    if expected == actual:
        return True
    if tolerance is None or (isinstance(expected, int) and isinstance(actual, int)):
        return False
    first, second = complex(expected), complex(actual)
    difference = abs(first - second)
    return math.isfinite(difference) and difference <= tolerance * max(1.0, abs(first))


def _equal(a: Tree, b: Tree, rule: ValueRule) -> bool:
    if _is_range(a) and _is_range(b):
        return _range(a) == _range(b)
    if not rule.strict:
        a = _listed(a)
        if _is_range(b) and not _has_length(a, b):
            return False
        b = _listed(b)
    elif isinstance(b, list) and b[:1] == ["n"] and len(b) == 4:  # numpy compares part by part; here the result is one
        a, b = _only_value(a), b[3]
    if rule.booleans and isinstance(a, bool) is not isinstance(b, bool):
        return False
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
    if kind in ("L", "T", "q"):
        return _all_equal(a, b, rule)
    if kind == "d":
        return _equal_dicts(a, b, rule)
    return kind == "b" and bool(a[1] == b[1])


def _only_value(tree: Tree) -> Tree:
    while isinstance(tree, list) and len(tree) == 2 and tree[0] in ("l", "t"):
        tree = tree[1]
    return tree


def _all_equal(a: list[Any], b: list[Any], rule: ValueRule) -> bool:
    return len(a) == len(b) and all(_equal(x, y, rule) for x, y in zip(a[1:], b[1:], strict=True))


def _equal_dicts(a: list[Any], b: list[Any], rule: ValueRule) -> bool:
    first = {key(k): v for k, v in zip(a[1::2], a[2::2], strict=True)}
    second = {key(k): v for k, v in zip(b[1::2], b[2::2], strict=True)}
    # JSON has text keys only, so the intended types are unknown
    if not rule.strict and first.keys() != second.keys() and all(isinstance(k, str) for k in a[1::2]):
        first = dict(zip(a[1::2], a[2::2], strict=True))
        second = {_spelt(k, first): v for k, v in zip(b[1::2], b[2::2], strict=True)}
        if 2 * len(second) != len(b) - 1:
            return False
    return first.keys() == second.keys() and all(_equal(value, second[k], rule) for k, value in first.items())


def _spelt(tree: Tree, texts: dict[str, Tree]) -> str:
    """A key as one of the texts spells it, in the form of JSON or of Python; 1 and 1.0 are one key."""
    number = _number(tree)
    if isinstance(tree, bool) or tree is None:
        spelt = [{True: "true", False: "false", None: "null"}[tree], str(tree)]
    elif isinstance(number, (int, float)):
        spelt = [str(number), *((str(int(number)), f"{int(number)}.0") if number == number // 1 else ())]
    elif isinstance(tree, list) and tree[0] == "t":
        parts = [
            repr(part) if isinstance(part, (str, bool)) or part is None else str(_number(part)) for part in tree[1:]
        ]
        spelt = [f"({', '.join(parts)}{',' * (len(parts) == 1)})"]
    else:
        spelt = [tree if isinstance(tree, str) else key(tree)]
    return next((text for text in spelt if text in texts), spelt[0])


def key(tree: Tree) -> str:
    """A text that equal values share. Raises ``ValueError`` for NaN and for a tree that is not data."""
    number = _number(tree)
    if number is not None:
        if number != number:
            raise ValueError("NaN equals no value")
        if isinstance(number, complex):
            number = number.real if number.imag == 0 else number
        if isinstance(number, Fraction):
            number = number.numerator if number.denominator == 1 else _as_float(number)
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
    if kind == "o":
        raise ValueError("an object is no data")
    if kind == "r":
        values = _range(tree)
        return f"r:{len(values)},{values[0]},{values.step}" if len(values) > 1 else f"r:{list(values)}"
    if kind in ("q", "n"):
        return key(parts[2]) if kind == "n" and parts[1] == ["t"] else f"{kind}:" + key(_listed(tree))
    keys = [key(part) for part in parts]
    if kind in ("s", "z"):
        kind, keys = "s", sorted(set(keys))
    elif kind == "d":
        keys = sorted(f"{k}:{v}" for k, v in zip(keys[::2], keys[1::2], strict=True))
    elif kind == "t":
        kind = "l"
    return f"{kind}[{','.join(keys)}]"


def _as_float(number: Fraction) -> float | Fraction:
    """A float of the same value, where there is one."""
    try:
        near = float(number)
    except OverflowError:
        return number
    return near if near == number else number


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
        return "" if wanted == printed else _first_difference([wanted], [printed], "output")
    wanted, printed = wanted.replace(b"\r\n", b"\n"), printed.replace(b"\r\n", b"\n")
    if mode is ComparisonMode.FLOAT:
        return _float_difference(wanted.split(), printed.split(), comparison.tolerance)
    if mode is ComparisonMode.JSON:
        return _parsed_difference(lambda text: to_tree(json.loads(text)), "JSON", wanted, printed)
    if mode is ComparisonMode.LITERAL:
        return _parsed_difference(_literal_tree, "literal", wanted, printed)
    if mode is ComparisonMode.LINES:
        return _lines_difference(_filled_lines(wanted), _filled_lines(printed))
    split, ordered, what = _RULES[mode]
    wanted_parts, printed_parts = split(wanted), split(printed)
    if wanted_parts == printed_parts or (not ordered and Counter(wanted_parts) == Counter(printed_parts)):
        return ""
    if ordered:
        return _first_difference(wanted_parts, printed_parts, what)
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


def _first_difference(wanted: list[bytes], printed: list[bytes], what: str) -> str:
    for number, (expected, actual) in enumerate(zip(wanted, printed, strict=False), start=1):
        if expected != actual:
            where = what if what == "output" else f"{what} {number}"
            return f"{where}: expected {_shown(expected)}, got {_shown(actual)}"
    return f"{len(printed)} {what}s instead of {len(wanted)}"


def _filled_lines(text: bytes) -> list[bytes]:
    return [stripped for line in text.split(b"\n") if (stripped := line.strip())]


def _lines_difference(wanted: list[bytes], printed: list[bytes]) -> str:
    if len(wanted) == len(printed) and all(map(_same_line, wanted, printed)):
        return ""
    same = [a if _same_line(e, a) else e for e, a in zip(wanted, printed, strict=False)]
    return _first_difference([*same, *wanted[len(same) :]], printed, "line")


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


def _float_difference(wanted: list[bytes], printed: list[bytes], tolerance: float) -> str:
    if len(wanted) != len(printed):
        return f"{len(printed)} words instead of {len(wanted)}"
    for number, (expected, actual) in enumerate(zip(wanted, printed, strict=True), start=1):
        if not _close_words(expected, actual, tolerance):
            return f"word {number}: expected {_shown(expected)}, got {_shown(actual)}"
    return ""


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
