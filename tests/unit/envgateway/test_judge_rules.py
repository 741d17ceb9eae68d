"""The rules of comparison, the tree form of plain data: all without a sandbox."""

from __future__ import annotations

import json
import math
from collections import deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.text.literals import to_tree
from services.envgateway.judge.compare import ValueRule, difference, equal, shown, truth
from services.envgateway.judge.records import (
    CaseResult,
    Comparison,
    ComparisonMode,
    whole_result,
)
from services.envgateway.sandbox.bare import plain
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import profile_of

M = ComparisonMode
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_data_survives_both_ways(value: Any) -> None:
    tree = json.loads(plain.encode(value))
    assert tree == to_tree(value)
    back = plain.from_tree(tree)
    assert back == value and type(back) is type(value)


@given(VALUES, VALUES)
def test_strict_equality_of_trees_is_pythons(first: Any, second: Any) -> None:
    strict = ValueRule(strict=True)
    a, b = to_tree(first), to_tree(second)
    assert equal(a, b, strict) == (first == second)
    assert equal(a, a, strict)


def test_nan_equals_no_value() -> None:
    nan = to_tree(math.nan)
    for rule in (ValueRule(), ValueRule(tolerance=1e9), ValueRule(unordered=True)):
        for value in (nan, ["l", nan], ["s", nan], ["d", "a", nan], ["t", ["l", nan]]):
            assert not equal(value, value, rule)


def test_objects_equal_no_value_and_are_neither_true_nor_false() -> None:
    thing = json.loads(plain.encode(object()))
    assert not equal(thing, thing, ValueRule()) and truth(thing) is None


@pytest.mark.parametrize(
    ("expected", "actual", "rule", "same"),
    [
        ([1, 2], (1, 2), ValueRule(), True),
        ([1, 2], (1, 2), ValueRule(strict=True), False),
        (1, True, ValueRule(strict=True), True),
        (1, 1.0, ValueRule(strict=True), True),
        ("1", 1, ValueRule(), False),
        ([1, 2, 2], [2, 1, 2], ValueRule(unordered=True), True),
        ([1, 2, 2], [2, 1, 1], ValueRule(unordered=True), False),
        ([[1, 2]], [[2, 1]], ValueRule(unordered=True), False),
        (0.3, 0.1 + 0.2, ValueRule(), False),
        ([0.3], [0.1 + 0.2], ValueRule(tolerance=1e-9), True),
        (10000, 10001, ValueRule(tolerance=1e-3), False),
        (math.inf, math.inf, ValueRule(tolerance=1e-3), True),
        (math.inf, 1e308, ValueRule(tolerance=1e-3), False),
        ({"a": 1}, {"a": 1.0}, ValueRule(strict=True), True),
        ({1: "a"}, {"1": "a"}, ValueRule(), False),
        ({"1": "a"}, {1.0: "a"}, ValueRule(), True),
        ({"1.0": "a"}, {1.0: "a"}, ValueRule(), True),
        ({"1.5": "a", "x": 1}, {1.5: "a", "x": 1}, ValueRule(), True),
        ({"1": "a"}, {1.5: "a"}, ValueRule(), False),
        ({"None": "a", "inf": 1}, {1.5: "a", math.inf: 1}, ValueRule(), False),
        ({"(1, 'a', True)": 2}, {(1, "a", True): 2}, ValueRule(), True),
        ({"(1,)": 2}, {(1,): 2}, ValueRule(), True),
        ({"(1, 2)": 2}, {(2, 1): 2}, ValueRule(), False),
        ({"true": 1, "None": 2}, {True: 1, None: 2}, ValueRule(), True),
        ({"True": 1}, {True: 1}, ValueRule(), True),
        ({"True": 1}, {"true": 1}, ValueRule(), False),
        ({"1": 1, "01": 2}, {1: 1, "01": 2}, ValueRule(), True),
        ({"1": 1}, {1: 1, "1": 1}, ValueRule(), False),
        ({"1": 1}, {1.0: 1}, ValueRule(strict=True), False),
        ({1, 2}, frozenset({2, 1}), ValueRule(strict=True), True),
    ],
)
def test_values_compare_by_rule(expected: Any, actual: Any, rule: ValueRule, same: bool) -> None:
    assert equal(to_tree(expected), to_tree(actual), rule) is same


def test_a_list_of_nodes_is_no_list() -> None:
    assert equal(["L", 1, 2], ["L", 1, 2], ValueRule()) and not equal(["L", 1, 2], ["l", 1, 2], ValueRule())


def test_overridden_methods_do_not_affect_the_encoding() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

        def __int__(self) -> int:
            return 42

        __index__ = __int__

        def __repr__(self) -> str:
            return "42"

    class LyingList(list[int]):
        def __iter__(self) -> Any:
            return iter([42])

    assert json.loads(plain.encode([Liar(7), LyingList([7])])) == ["l", 7, ["l", 7]]


def test_values_without_an_end_are_refused() -> None:
    node = plain.ListNode(1)
    node.next = node
    with pytest.raises(plain.TooLargeError):
        plain.encode(node)
    wide: list[Any] = [1]
    for _ in range(60):
        wide = [wide, wide]
    with pytest.raises(plain.TooLargeError):
        plain.encode(wide)
    own: list[Any] = []
    own.append(own)
    assert '["o","list"]' in plain.encode(own)


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3], [1, None, 2], [1, 2, None, 3, None, 4], [5, 4, 7, 3, None, 2]])
def test_trees_of_nodes_are_written_level_by_level(values: list[Any]) -> None:
    assert json.loads(plain.encode(plain.build_tree(values))) == (["T", *values] if values else None)


@pytest.mark.parametrize(
    ("mode", "expected", "printed", "same"),
    [
        (None, "1\n2\n", b"1 \n2\n\n", True),
        (None, "1 2", b"1  2", False),
        (None, "a\r\nb", b"a\nb\n", True),
        (None, "", b"\n \n", True),
        (None, " 1", b"1", True),
        (None, "1\n2", b"\n 1\n\n2 \n", True),
        (None, "1\n2", b"1", False),
        (None, "1", b"1\n2", False),
        (None, "0.333333", b"0.3333333333", True),
        (None, "2.50000", b"2.5", True),
        (None, "112.00000000", b"112", True),
        (None, "3", b"3.0", True),
        (None, "100000", b"1e5", True),
        (None, "1", b"0.9999999999", True),
        (None, "yes 0.50", b"yes 0.5", True),
        (None, "Infinity", b"inf", True),
        (None, "0.333", b"0.334", False),
        (None, "3", b"3.1", False),
        (None, "100000000", b"100000001", False),
        (None, "100000000", b"100000000.5", False),
        (None, "100000000.0", b"100000001", False),
        (None, "9007199254740993", b"9007199254740992.0", False),
        (None, "0011", b"11", False),
        (None, "1" * 5000, b"1" * 4999 + b"2", False),
        (None, "1e400", b"1e401", False),
        (None, "1e99999999999999999999", b"2e99999999999999999999", False),
        (None, "a b", b"a  b", False),
        (M.EXACT, "1\n", b"1\n", True),
        (M.EXACT, "1\n", b"1", False),
        (M.STRIPPED, "1 2\n", b"\n 1 2", True),
        (M.STRIPPED, "1 2", b"1  2", False),
        (M.TOKENS, "1 2\n3", b"1\n2 3", True),
        (M.TOKENS, "1 2", b"12", False),
        (M.FLOAT, "0.5", b".5", True),
        (M.FLOAT, "1e3", b"1000.0000001", True),
        (M.FLOAT, "1", b"1.1", False),
        (M.FLOAT, "yes 1.0", b"yes 1.0000001", True),
        (M.FLOAT, "1_0", b"10", False),
        (M.FLOAT, "NaN", b"NaN", False),
        (M.FLOAT, "1", b"nan", False),
        (M.FLOAT, "inf", b"-inf", False),
        (M.FLOAT, "007", b"+7", True),
        (M.FLOAT, "-0", b"0", True),
        (M.FLOAT, "9" * 400, b"8" * 400, False),
        (M.UNORDERED_LINES, "a b\nc", b"c\na b", True),
        (M.UNORDERED_LINES, "a\na", b"a\nb", False),
        (M.UNORDERED_TOKENS, "1 2 2", b"2\n1 2", True),
        (M.JSON, '{"a": [1, 2]}', b'{ "a" : [1.0,2] }', True),
        (M.JSON, "1", b'"1"', False),
        (M.JSON, "[1]", b"[1", False),
        (M.JSON, "true", b"1", False),
        (M.JSON, '{"a": [0]}', b'{"a": [false]}', False),
        (M.JSON, "[true, null]", b"[true,null]", True),
        (M.LITERAL, "[True]", b"[1]", True),
        (M.LITERAL, "(1, 'a')", b'(1,"a")', True),
        (M.LITERAL, "[1]", b"(1,)", False),
        (M.LITERAL, "3 * 19", b"57", True),
        (M.LITERAL, "57", b"3*19", False),
        (M.LITERAL, "[1, 2]", b"[1, 1+1]", False),
        (M.LITERAL, "'ab'", b"'a' + 'b'", False),
        (M.LITERAL, "[1, 2]", b"list((1, 2))", False),
        (M.LITERAL, "{2: -1}", b"{2: -1}", True),
        (M.LITERAL, "set()", b"set()", True),
        (M.LITERAL, "1+2j", b"(1+2j)", True),
        (M.FLOAT, "1e400", b"1e999", False),
        (M.FLOAT, "1e400", b"1e400", True),
        (M.FLOAT, "1e400", b"1e99999999999999999999", False),
        (M.LITERAL, "{1: {2, 3}}", b"{1: {3, 2}}", True),
        (M.LITERAL, "1", b"__import__('os')", False),
    ],
)
def test_printed_text_compares_by_mode(mode: ComparisonMode | None, expected: str, printed: bytes, same: bool) -> None:
    assert (difference(expected, printed, Comparison(mode=mode)) == "") is same


@given(st.text(), st.binary(), st.sampled_from([mode for mode in M if not mode.value.startswith("value")]))
def test_no_output_breaks_a_comparison(expected: str, printed: bytes, mode: ComparisonMode) -> None:
    if mode is M.EXACT:
        assert (difference(expected, printed, Comparison(mode=mode)) == "") == (expected.encode() == printed)
    assert isinstance(difference(expected, printed, Comparison(mode=mode)), str)


Point = namedtuple("Point", "x y")
LIBRARY = [
    (range(3), [0, 1, 2]),
    (range(5, 0, -2), [5, 3, 1]),
    ([range(2)], [[0, 1]]),
    (deque([1, "a"]), [1, "a"]),
    (Fraction(1, 2), 0.5),
    (Fraction(3), 3),
    (Decimal("0.25"), 0.25),
    (Decimal("inf"), math.inf),
    (Point(1, 2), (1, 2)),
    (numpy.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
    (numpy.array(5), 5),
    (numpy.array(["a", "bc"]), ["a", "bc"]),
    (numpy.array([]), []),
]


@pytest.mark.parametrize(("value", "same"), LIBRARY, ids=lambda value: type(value).__name__)
def test_values_of_the_library_cross_and_compare_as_the_data_that_they_hold(value: Any, same: Any) -> None:
    tree = json.loads(plain.encode(value))
    other = [same, "more"] if not isinstance(same, list) else [*same, "more"]
    assert equal(to_tree(same), tree, ValueRule()) and not equal(to_tree(other), tree, ValueRule())


def test_a_range_is_no_list_where_the_rule_is_strict() -> None:
    tree = json.loads(plain.encode(range(2)))
    assert not equal(["l", 0, 1], tree, ValueRule(strict=True)) and equal(["r", 0, 2, 1], tree, ValueRule(strict=True))
    one = json.loads(plain.encode(numpy.array([7])))
    assert equal(["l", 7], one, ValueRule(strict=True)) and not equal(["l", 8], one, ValueRule(strict=True))


TAGS = st.sampled_from(
    ["i", "f", "c", "b", "l", "t", "s", "z", "d", "L", "T", "r", "q", "n", "N", "F", "D", "h", "o", "", "x"]
)
NUMBERS = st.integers(-3, 3) | st.sampled_from([10**30, 10**9, -(10**9), 0.5])
TREES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text(max_size=3)
    | st.sampled_from(["0x1", "nan", "<f8", "1e999999999", "O"]),
    lambda inner: st.builds(lambda tag, parts: [tag, *parts], TAGS, st.lists(inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=60)
@given(TREES, TREES, st.booleans())
def test_no_untrusted_tagged_tree_breaks_a_comparison(first: Any, second: Any, strict: bool) -> None:
    for rule in (ValueRule(strict=strict), ValueRule(unordered=True), ValueRule(tolerance=0.1)):
        assert equal(first, second, rule) in (True, False)
    assert truth(first) in (True, False, None) and isinstance(shown(first), str)
    try:
        plain.from_tree(first)
    except ValueError:
        return


def _case(index: int, verdict: RunStatus) -> CaseResult:
    return CaseResult(index=index, verdict=verdict, detail=verdict.value)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([RunStatus.OK, RunStatus.OK], RunStatus.OK),
        ([RunStatus.OK, RunStatus.TIME_LIMIT, RunStatus.WRONG_ANSWER], RunStatus.TIME_LIMIT),
        ([RunStatus.INFRA_ERROR, RunStatus.OK], RunStatus.INFRA_ERROR),
        ([RunStatus.INFRA_ERROR, RunStatus.WRONG_ANSWER], RunStatus.WRONG_ANSWER),
    ],
)
def test_the_first_failure_decides_and_never_the_machinery_where_the_program_failed(
    verdicts: list[RunStatus], whole: RunStatus
) -> None:
    result = whole_result([_case(i, v) for i, v in enumerate(verdicts)], len(verdicts), "2")
    assert result.verdict is whole


@pytest.mark.parametrize(
    ("code", "profile"),
    [
        ("import math", "plain"),
        ("import numpy as np", "scientific"),
        ("    from sympy import Symbol", "scientific"),
        ("import os, numpy", "scientific"),
        ("# import numpy", "plain"),
        ("print('numpy')", "plain"),
        ("import numpydoc", "plain"),
    ],
)
def test_the_imports_say_which_interpreter_suits(code: str, profile: str) -> None:
    assert profile_of(code.encode()) == profile
