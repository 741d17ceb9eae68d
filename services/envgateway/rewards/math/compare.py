"""Compares an answer with the reference answer: Math-Verify, with checks before and after.

Runs in the worker. A decimal that is merely near, an answer of another form and a chain of equations
that does not hold are wrong although Math-Verify accepts them; inequalities for intervals, ``7=x`` for ``x=7`` and
``i`` for a root of -1 are right although Math-Verify rejects them. A percent sign may be missing on either side, which
is Math-Verify's rule: 50 and 50% are equal, and 50% is 0.5.
"""

from __future__ import annotations

import itertools
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

from services.common.records.dataset_rows import last_boxed
from services.envgateway.rewards.math.forms import (
    Span,
    equations,
    intervals,
    listed_values,
    named_values,
    other_form,
    rewritten,
    same_words,
)

_MOST_SPANS = 4
_Parsed = list[Any]


class MathComparison:
    """``gold`` and ``answer`` parse; ``wrong`` compares. Untrusted formulas may raise any error."""

    def __init__(self) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        self._parse, self._verify = parse, verify
        self._settings = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]  # boxed answers first

    def gold(self, truth: str) -> _Parsed:
        """The parsed reference answer; empty when the comparison is impossible."""
        truth = rewritten(truth)
        found = self._parsed(truth) if "$" in truth or "\\boxed" in truth else []
        return found or self._parsed(f"${truth}$")

    def answer(self, completion: str) -> _Parsed:
        """Empty when no answer is found."""
        return self._parsed(rewritten(completion))

    def is_equal(self, gold: _Parsed, answer: _Parsed) -> bool:
        """Whether Math-Verify alone finds them equal."""
        return bool(self._verify(gold, answer, timeout_seconds=None, raise_on_error=True))

    def wrong(self, truth: str, gold: _Parsed, completion: str, answer: _Parsed) -> str | None:
        """Why the answer is wrong; empty when the answer is another value, None when the answer is right."""
        wanted, given = _text(gold, truth), _text(answer, completion)
        if wanted == given:
            return None
        if self.is_equal(gold, answer):
            if is_merely_near(gold, answer):
                return "near, and not equal"
            return (
                other_form(rewritten(wanted), rewritten(given))
                or self._broken_chain(given)
                or self._exchanged(wanted, given)
                or None
            )
        if self._same_percent(wanted, given) or same_words(wanted, given):
            return None
        if self._same_intervals(wanted, given) or self._same_turned(gold, given) or self._same_complex(gold, answer):
            return None
        return ""

    def _parsed(self, text: str) -> _Parsed:
        return list(self._parse(text, self._settings, parsing_timeout=None))

    def _same(self, left: str, right: str) -> bool:
        if left == right:
            return True
        first, second = self._parsed(f"${left}$"), self._parsed(f"${right}$")
        return bool(first and second) and self.is_equal(first, second) and not is_merely_near(first, second)

    def _broken_chain(self, given: str) -> str:
        """A number of an equation that differs from the equation's last number, as in 8=7."""
        for *sides, last in equations(given):
            end = self._parsed(f"${last}$")
            for side in sides:
                found = self._parsed(f"${side}$")
                if found and _is_number(found[0]) and end and _is_number(end[0]) and not self.is_equal(end, found):
                    return "an equation that does not hold"
        return ""

    def _exchanged(self, wanted: str, given: str) -> str:
        """2, 1 for x=1, y=2, as Math-Verify takes both for sets."""
        if not named_values(wanted):
            return ""
        left, right = listed_values(wanted), listed_values(given)
        if len(left) != len(right) or all(self._same(a, b) for a, b in zip(left, right, strict=True)):
            return ""
        return "values of names in another order"

    def _same_turned(self, gold: _Parsed, given: str) -> bool:
        """7=x for 7, or for x=7."""
        found = equations(given)
        if len(found) != 1 or len(found[0]) != 2 or not found[0][1].isalpha() or len(found[0][1]) > 1:
            return False
        side, name = found[0]
        return self.is_equal(gold, self._parsed(f"${name}={side}$"))

    def _same_percent(self, wanted: str, given: str) -> bool:
        """Whether the numbers are the same, with a percent sign on one side only."""
        left, right = (text.strip().rstrip(".").rstrip() for text in (wanted, given))
        if left.endswith("%") is right.endswith("%"):
            return False
        return self._same(*(text.removesuffix("%").removesuffix("\\") for text in (left, right)))

    def _same_complex(self, gold: _Parsed, answer: _Parsed) -> bool:
        """Whether they are equal with ``i`` for the root of -1, where each side has another form."""
        import sympy

        if not (_has_i(gold[0]) or _has_i(answer[0])):
            return False
        pair = []
        for found in (gold, answer):
            value = found[0]
            named = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"} if hasattr(value, "free_symbols") else {}  # fmt: skip
            value = value.subs(named) if named else value
            pair.append(value.doit() if hasattr(value, "doit") else value)
        if any(getattr(value, "free_symbols", None) for value in pair):
            return False
        return self.is_equal([pair[0]], [pair[1]])

    def _same_intervals(self, wanted: str, given: str) -> bool:
        """Intervals, where one side writes them as inequalities."""
        left, right = intervals(wanted), intervals(given)
        if left is None or right is None or not (left[1] or right[1]) or len(left[0]) != len(right[0]):
            return False
        if len(left[0]) > _MOST_SPANS:
            return False
        return any(
            all(self._same_span(a, b) for a, b in zip(left[0], order, strict=True))
            for order in itertools.permutations(right[0])
        )

    def _same_span(self, a: Span, b: Span) -> bool:
        if (a.has_low, a.has_high, not a.low, not a.high) != (b.has_low, b.has_high, not b.low, not b.high):
            return False
        return self._same(a.low, b.low) and self._same(a.high, b.high)


def _text(parsed: _Parsed, source: str) -> str:
    """The text that was read as the answer."""
    return last_boxed(source) or next((part for part in parsed if isinstance(part, str)), source)


def _is_number(value: Any) -> bool:
    return bool(getattr(value, "is_number", False))


def _has_i(value: Any) -> bool:
    return any(symbol.name == "i" for symbol in getattr(value, "free_symbols", ()))


_LEAST_DIGITS = 6
_DIGITS = 60  # of the evaluation of values other than decimals
_SAME = 1e-40  # of two such values, relatively


def is_merely_near(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers (lists as Math-Verify's ``parse`` gives them) are unequal numbers.

    Math-Verify compares decimals after rounding both to six places, so that 0.0000002 passes for 0.0000001. Here a
    decimal counts for a number only if both are equal; or, for a number without an exact decimal (1/3, a root, pi), if
    the decimal is the number rounded at the decimal's last place and shows at least six significant digits.

    Other numbers are compared exactly if both are rational, else by their first digits. Sets, tuples, intervals and
    matrices are compared part by part. False for other values: percentages, symbols.
    """
    if not gold or not answer or any("%" in str(part) for part in (*gold[1:], *answer[1:])):
        return False
    return _are_apart(gold[0], answer[0])


def _are_apart(first: Any, second: Any) -> bool:
    import sympy

    if all(
        isinstance(value, (sympy.FiniteSet, sympy.Tuple, sympy.Interval, sympy.MatrixBase)) for value in (first, second)
    ):
        ours, theirs = (value if isinstance(value, sympy.MatrixBase) else value.args for value in (first, second))
        if isinstance(first, sympy.FiniteSet) or isinstance(second, sympy.FiniteSet):
            return any(all(_are_apart(one, other) for other in theirs) for one in ours)
        return any(map(_are_apart, ours, theirs))
    left, right = _number(first), _number(second)
    if left is None or right is None:
        return False
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        return left != right
    if isinstance(right, Decimal):
        left, right = right, left
    if isinstance(left, Decimal):
        return not _is_rounded(left, right)
    left, right = left.doit(), right.doit()
    if left.is_Rational and right.is_Rational:
        return bool(left != right)
    largest = max(abs(number.evalf(_DIGITS)) for number in (left, right))
    return bool(abs((left - right).evalf(_DIGITS)) > largest * _SAME)


def _number(value: Any) -> Any:
    """A ``Decimal`` for a decimal, the sympy number for another real number, None for other values."""
    if getattr(value, "rhs", None) is not None and getattr(value, "lhs", None) is not None:
        value = value.rhs  # x = 0.5
    if getattr(value, "is_Float", False):
        try:
            return Decimal(str(value))
        except InvalidOperation:
            return None
    is_number = bool(getattr(value, "is_number", False)) and getattr(value, "is_real", False) is True
    return value if is_number else None


def _is_rounded(decimal: Decimal, number: Any) -> bool:
    """Whether the decimal is the number, or the number rounded at the decimal's last place."""
    with localcontext() as context:
        context.prec = 2 * _DIGITS
        if getattr(number, "is_Rational", False):
            exact = Decimal(int(number.p)) / Decimal(int(number.q))
        else:
            exact = Decimal(str(number.evalf(_DIGITS)))
        if exact == decimal:
            return True
        shown = decimal.normalize()
        if len(shown.as_tuple().digits) < _LEAST_DIGITS:
            return False
        exponent = shown.as_tuple().exponent
        assert isinstance(exponent, int)  # finite, because read from digits
        return abs(exact - decimal) <= Decimal(1).scaleb(exponent) / 2
