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
from decimal import Decimal
from typing import Any

from services.common.text.literals import NotLiteralError, to_tree, tree_of
from services.common.text.parsing import parsed_expression
from services.envgateway.judge.records import Comparison, ComparisonMode
from services.envgateway.judge.values import ValueRule, close, equal

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
        return _parsed_difference(_json_tree, "JSON", wanted, printed)
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


def _json_tree(text: bytes) -> Any:
    return to_tree(json.loads(text))


def _literal_tree(text: bytes) -> Any:
    try:
        return tree_of(parsed_expression(text.strip()))
    except NotLiteralError as error:
        raise ValueError(str(error)) from None
