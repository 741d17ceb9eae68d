"""Finds answers that Math-Verify accepts and a reward must not: numbers that are merely near.

Math-Verify compares decimals after rounding both to six places, so that 0.0000002 passes for 0.0000001. Here a decimal
counts for a number only if both are equal; or, for a number without an exact decimal (1/3, a root, pi), if the decimal is
the number rounded at the decimal's last place and shows at least six significant digits.

Runs in the worker, after Math-Verify has accepted an answer; needs sympy.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

_LEAST_DIGITS = 6
_DIGITS = 60  # of the evaluation of values other than decimals


def is_merely_near(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers (lists as Math-Verify's ``parse`` gives them) are unequal numbers.

    False unless both are plain numbers and one of them is a decimal: percentages, sets, symbols.
    """
    if not gold or not answer or any("%" in str(part) for part in (*gold[1:], *answer[1:])):
        return False
    left, right = _number(gold[0]), _number(answer[0])
    if left is None or right is None:
        return False
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        return left != right
    if isinstance(right, Decimal):
        left, right = right, left
    return not _is_rounded(left, right) if isinstance(left, Decimal) else False


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
