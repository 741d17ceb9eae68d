"""Values of calls against the conditions that test code has for them."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import numpy
import pytest

from services.common.text.literals import to_tree
from services.envgateway.judge.checks import asserted_failure as failure
from services.envgateway.judge.records import AssertTests
from services.envgateway.sandbox.bare import plain


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("abs(f(1) - 0.5) < 1e-6", [0.5, 0.5 + 1e-7], [0, "x", None, math.nan, 0.5 + 1e-5]),
        ("abs(f(1) - 2) <= 0.5", [2.5, 2], [2.5000001, math.inf]),
        ("math.isclose(f(1), 100.0, rel_tol=0.01)", [100, 101.0, 99.0], [102.0, "100", math.inf, math.nan]),
        ("math.isclose(f(1), 0.0)", [0.0], [1e-12]),
        ("math.isclose(f(1), 1.0)", [1.0, 1], [1 + 0j, [1.0], "1.0"]),
        ("math.isclose(f(1), 0.0, abs_tol=1e-9)", [1e-12], [1e-6]),
        ("math.isclose(f(1), inf)", [math.inf], [-math.inf, 1e308]),
        ("f(1) in [1, (2,)]", [1, 1.0, (2,)], [[2], None, 3]),
        ("f(1) is True", [True], [1]),
        ("f(1)", [1, "x", [0]], [0, "", []]),
        ("not f(1)", [0, "", []], [1]),
    ],
)
def test_a_condition_is_that_of_the_test_code(test: str, right: list[Any], wrong: list[Any]) -> None:
    calls = AssertTests(tests=f"import math\nassert {test}", entry_point="f").calls()
    assert calls is not None
    assert [failure(calls[0], to_tree(value)) for value in right] == [""] * len(right)
    assert all(failure(calls[0], to_tree(value)) for value in wrong)


@pytest.mark.parametrize("test", ["f(1)", "not f(1)", "f(1) is True", "f(1) == 1", "f(1) in [1]", "abs(f(1) - 1) < 9"])
def test_an_object_meets_no_condition(test: str) -> None:
    calls = AssertTests(tests=f"assert {test}", entry_point="f").calls()
    assert calls is not None and failure(calls[0], json.loads(plain.encode(object())))


def test_values_of_libraries_meet_a_condition_as_in_python() -> None:
    def answer(test: str, value: Any) -> str:
        calls = AssertTests(tests=f"import math\nassert {test}", entry_point="f").calls()
        assert calls is not None
        return failure(calls[0], json.loads(plain.encode(value)))

    assert answer("f(1) is True", numpy.True_) and not answer("f(1) == True", numpy.True_)
    assert not answer("not f(1)", numpy.False_) and not answer("f(1) == {True: [1]}", {numpy.True_: [1]})
    assert answer("math.isclose(f(1), 1.0)", numpy.array([1.0]))
    assert answer("abs(f(1) - 0.5) < 1", Decimal("0.5")) and not answer("abs(f(1) - 1) < 1", Decimal("0.5"))
