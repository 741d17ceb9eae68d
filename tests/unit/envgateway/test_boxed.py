"""Reading boxes and plain comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.dataset_rows import last_boxed
from services.common.errors import InvalidRequestError
from services.envgateway.calls import RewardOutcome, truth_of
from services.envgateway.rewards.math import as_integer, boxed_match

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
