"""Reading boxes, plain comparison, and numbers that are merely near, which do not pass."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from services.common.dataset_rows import last_boxed
from services.common.errors import InvalidRequestError
from services.envgateway.calls import RewardOutcome, truth_of
from services.envgateway.rewards.math import as_integer, boxed_match, is_merely_near

R = RewardOutcome


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        (r"so \boxed{1786}", R.CORRECT),
        (r"\boxed{ 1786 }", R.CORRECT),
        (r"\boxed{+01786}", R.CORRECT),
        (r"first \boxed{3}, no: \boxed{1786}", R.CORRECT),
        (r"<think>\boxed{3}</think> \boxed{1786}", R.CORRECT),
        (r"<think>\boxed{1786}</think> I give up", R.UNPARSED),
        (r"\boxed{1787}", R.WRONG),
        (r"\boxed{1786} no, \boxed{3}", R.WRONG),
        (r"\boxed{1786.0}", R.WRONG),
        (r"\boxed{[1, 2, 1786]}", R.WRONG),
        (r"\boxed{1786", R.UNPARSED),
        (r"\boxed{}", R.UNPARSED),
        (r"boxed{1786}", R.UNPARSED),
        ("1786", R.UNPARSED),
        ("", R.UNPARSED),
        (r"\boxed{1786} and then \boxed{17", R.UNPARSED),
    ],
)
def test_boxed_match(completion: str, outcome: RewardOutcome) -> None:
    result = boxed_match({"answer": 1786}, completion)
    assert (result.outcome, result.reward) == (outcome, 1.0 if outcome is R.CORRECT else 0.0)


def test_nested_and_escaped_braces_stay_together() -> None:
    assert last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


@given(st.integers(), st.integers())
def test_integers_are_compared_exactly(answer: int, truth: int) -> None:
    result = boxed_match({"answer": truth}, rf"\boxed{{{answer}}}")
    assert (result.outcome is R.CORRECT) == (answer == truth)


@pytest.mark.parametrize("text", ["", "1,000", "1.0", "²", "١", "1e3", "0x10", "--1", "9" * 5000])
def test_only_plain_integers_are_integers(text: str) -> None:
    assert as_integer(text) is None


def test_a_task_without_an_answer_is_refused_with_the_keys_it_may_use() -> None:
    with pytest.raises(InvalidRequestError, match=r"reward_model\.ground_truth; it has prompt"):
        truth_of({"prompt": "x"})


def parsed(text: str) -> list[Any]:
    """The result of Math-Verify's parse: an expression and its text."""
    return [sympy.sympify(text.replace("%", "/100"), rational=False), text]


@pytest.mark.parametrize(
    ("gold", "answer", "near"),
    [
        ("10000.5", "10000.50", False),
        ("10000.5", "10000.500001", True),
        ("0.0000001", "0.0000002", True),
        ("1/10000000", "0.0000002", True),
        ("1/10000000", "0.0000001", False),
        ("1/3", "0.333333", False),
        ("1/3", "0.333334", True),
        ("1/3", "0.3333", True),
        ("2/3", "0.666667", False),
        ("2/3", "0.6666666", True),  # cut, not rounded
        ("pi", "3.14159265", False),
        ("pi", "3.141593", False),
        ("pi", "3.14159", False),
        ("pi", "3.1416", True),
        ("sqrt(2)", "1.41421356", False),
        ("1/2", "0.5", False),
        ("3", "3.0", False),
        ("3", "3.0000001", True),
        ("25%", "25.0", False),
        ("x", "0.5", False),
        ("7", "8", True),
        ("pi", "22/7", True),
    ],
)
def test_a_decimal_counts_for_the_number_that_it_is(gold: str, answer: str, near: bool) -> None:
    assert is_merely_near(parsed(gold), parsed(answer)) is near
    assert is_merely_near(parsed(answer), parsed(gold)) is near


def test_a_text_without_a_number_is_left_to_other_rules() -> None:
    for odd in ([], ["only text"], [sympy.FiniteSet(1, 2), "{1,2}"], [sympy.zoo, "zoo"], [sympy.nan, "nan"]):
        assert not is_merely_near(odd, parsed("0.5")) and not is_merely_near(parsed("0.5"), odd)


@given(st.fractions(max_denominator=10**6), st.integers(1, 12))
def test_only_the_number_itself_or_its_rounding_passes(number: Fraction, places: int) -> None:
    last_place = Decimal(1).scaleb(-places)
    shown = round(number * 10**places) * last_place
    gold = [sympy.Rational(number.numerator, number.denominator), str(number)]
    near = is_merely_near(gold, [sympy.Float(str(shown), dps=40), str(shown)])
    if Fraction(shown) == number:
        assert not near
    else:
        assert near is (len(shown.normalize().as_tuple().digits) < 6)
    beside = shown + 10 * last_place
    assert Fraction(beside) == number or is_merely_near(gold, [sympy.Float(str(beside), dps=40), str(beside)])
