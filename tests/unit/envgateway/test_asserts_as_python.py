"""Test code that is read as calls and values has the verdict that Python gives by running it."""

from __future__ import annotations

import builtins
import json
import math
import textwrap
from decimal import Decimal
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.text.asserted_calls import AssertedCall
from services.common.text.literals import to_tree
from services.common.text.programs import UnusableTestsError
from services.envgateway.judge.checks import asserted_failure
from services.envgateway.judge.checks import asserted_failure as failure
from services.envgateway.judge.records import AssertTests
from services.envgateway.judge.test_code import _with_calls
from services.envgateway.sandbox.bare import plain

_NAMES = st.sampled_from(["a", "b", "e", "n", "x", "f", "candidate", "inf", "sorted"])
_OWN = st.sampled_from(["a", "b", "e", "n", "a", "b", "x", "inf", "test_a", "sorted", "abs"])
_ATOMS = st.sampled_from(
    ["0", "1", "2", "3", "-1", "2.5", "True", "None", "'a'", "inf", "a", "b", "n", "e", "[1, 2]", "[2, 1, 1]", "{1, 2}", "()",
     "(1,)", "[]", "{}", "{1: 2}", "1 + 1", "2 ** 2", "'a' + 'b'", "1 / 0", "1j", "sorted(set([2, 1, 1]))", "list({2, 1})",
     "tuple(set([3, 1]))", "set([2, 2])", "frozenset({1})", "[a, a]", "[*[1], 2]", "{1: 2, **{3: 4}}", "{1: 1, True: 2}",
     "f(1)", "g(1)", "float('inf')", "float('nan')", "str(3)", "deepcopy(a)", "copy.deepcopy([1])", "sorted([2, 1])", "list(a)"]
)  # fmt: skip
_VALUES = st.one_of(
    _ATOMS,
    st.builds("[{}, {}]".format, _ATOMS, _ATOMS),
    st.builds("({}, {})".format, _ATOMS, _ATOMS),
    st.builds("{{'a': {}}}".format, _ATOMS),
    st.builds("{}({})".format, st.sampled_from(["sorted", "list", "tuple", "set", "deepcopy"]), _ATOMS),
)
_CALLS = st.builds(
    "{}({})".format,
    st.sampled_from(["f"] * 8 + ["candidate", "g"]),
    st.one_of(_VALUES, st.sampled_from(["*a", "x=a", "*[1]", "a, b", "a, a", "**{'x': 1}"])),
)
_APPLIED = st.builds(
    lambda name, call: f"{name}({call})" if name else call,
    st.sampled_from(["", "", "", "sorted", "list", "set", "tuple", "len", "abs", "sum", "str"]),
    _CALLS,
)
_EQUAL = st.builds(
    "f({}) == {}".format,
    st.sampled_from(["1", "2", "a", "b", "n", "e", "x", "[2, 1, 1]", "inf", "b + 1"]),
    st.sampled_from(["1", "2", "4", "a", "b", "n", "e", "x", "[1, 2]", "sorted([2, 1])", "sorted({2, 1})", "[2, 1, 1]", "{2, 1}"]),
)  # fmt: skip
_TESTS = st.one_of(
    st.builds("{} == {}".format, _APPLIED, _VALUES),
    st.builds("{} == {}".format, _VALUES, _APPLIED),
    st.builds("{} in [{}, {}]".format, _APPLIED, _VALUES, _VALUES),
    st.builds("{} is {}".format, _APPLIED, st.sampled_from(["None", "True"])),
    st.builds("abs({} - {}) < {}".format, _APPLIED, _VALUES, st.sampled_from(["1", "1e-6", "a"])),
    st.builds("abs({} - {}) <= 1".format, _VALUES, _APPLIED),
    st.builds("{}({}, {})".format, st.sampled_from(["math.isclose", "isclose"]), _APPLIED, _VALUES),
    st.builds("not {}".format, _APPLIED),
    _APPLIED,
    _EQUAL,
    _EQUAL,
    _EQUAL,
    st.builds("{} == {}".format, _NAMES, _VALUES),
)
_IMPORTS = st.sampled_from(
    ["import math", "from math import *", "from math import isclose", "from math import e as a", "from math import e",
     "from sys import maxsize as inf", "from math import inf", "import copy", "from copy import deepcopy", "from operator import *",
     "from copy import copy as deepcopy", "from cmath import isclose", "import cmath as math", "from math import nan as n"]
)  # fmt: skip
_ITEMS = st.one_of(
    st.builds("[{}, {}]".format, _VALUES, _VALUES),
    st.builds("zip([{}, {}], [{}])".format, _ATOMS, _ATOMS, _ATOMS),
    st.builds("enumerate([{}])".format, _ATOMS),
    st.builds("{{{}: {}, {}: 4}}.items()".format, _ATOMS, _ATOMS, _ATOMS),
    st.sampled_from(
        ["range(3)", "a", "[*a, 3]", "{1, 2}", "[f, g]", "[(1, 2), (2, 4)]", "[(a, 2), (a, 4)]", "zip(a, b)"]
    ),
)
_SIMPLE = st.one_of(
    st.builds("assert {}".format, _TESTS),
    st.builds("assert {}".format, _TESTS),
    st.builds("{} = {}".format, _OWN, st.one_of(_VALUES, _CALLS)),
    st.builds("{}, {} = {}, {}".format, _OWN, _OWN, _VALUES, _VALUES),
    st.builds("{} = f".format, _OWN),
    _IMPORTS,
    st.sampled_from(["pass", "a", "'text'", "a.append(1)", "e = 2", "n = 4", "b = [1]"]),
)  # fmt: skip
_RUNS = st.sampled_from(["test_a()", "test_b()", "check(f)", "check(g)", "check(candidate)", "test_a", "test_a(3)"])


def _block(head: str, body: list[str]) -> str:
    return head + "\n" + textwrap.indent("\n".join(body), "  ")


_BODIES = st.lists(_SIMPLE, min_size=1, max_size=4)
_LOOPS = st.builds(
    lambda name, items, body: _block(f"for {name} in {items}:", body), st.one_of(_OWN, st.sampled_from(["a, b", "n, x"])), _ITEMS, _BODIES
)  # fmt: skip
_FUNCTIONS = st.builds(
    lambda head, body: _block(head, body),
    st.sampled_from(
        ["def test_a():", "def test_a():", "def test_b():", "def test_b(a=3):", "def test_b(*a):", "def test_b(*, n=3):", "def check(fn):",
         "def check(candidate):", "def check(f):", "def check(candidate, n=3):", "@staticmethod\ndef test_b():", "def g():", "def f(x):"]
    ),
    st.lists(st.one_of(_SIMPLE, _LOOPS), min_size=1, max_size=4),
)  # fmt: skip
_METHODS = st.builds(
    lambda head, checks: _block(head, checks),
    st.sampled_from(["def test_a(self):", "def test_a(self):", "def test_b(self):", "def test_b(f):", "def test_b(self, a=3):"]),
    st.lists(
        st.one_of(
            st.builds("self.{}({}, {})".format, st.sampled_from(["assertEqual", "assertListEqual", "assertAlmostEqual"]), _APPLIED, _VALUES),
            st.builds("self.assertTrue({})".format, _TESTS),
            st.builds("self.assertIsNone({}, {})".format, _APPLIED, _VALUES),
            _SIMPLE,
        ), min_size=1, max_size=3,
    ),
)  # fmt: skip
_CLASSES = st.builds(
    lambda methods: _block("class T(__import__('unittest').TestCase):", methods),
    st.lists(_METHODS, min_size=1, max_size=2),
)
_CHECKED = st.builds("assert {}".format, _EQUAL)
_MODULES = st.builds(
    lambda before, parts, last: "\n".join([before, *parts, last]),
    st.sampled_from(["a, b, e, n, x = [2, 1], 1, 2, 3, 4", "a = [1, 2]\nb, e, n, x = 2, 2, 2, 2", "a = (1, 2)\nb = 1\ne = 2\nn = 3\nx = [1]"]),
    st.lists(st.one_of(_CHECKED, _SIMPLE, _LOOPS, _FUNCTIONS, _FUNCTIONS, _CLASSES, _RUNS), min_size=1, max_size=4),
    _CHECKED,
)  # fmt: skip
_PROGRAMS = st.sampled_from(
    ["x", "2 * x", "len(x)", "sorted(x)", "sorted(set(x))", "list(x)", "x[0]", "x is None", "4", "2", "None", "True", "[1, 2]",
     "[2, 1, 1]", "float(x)", "{1, 2}", "x.append(1)", "x.sort() or x", "x.clear() or [1]", "1 / x", "complex(x)", "(1,)",
     "float('inf')", "'ab'", "{'a': x}", "x == [1, 2]", "rest"]
).map(lambda value: f"def f(x=1, *rest):\n    return {value}\ndef g(*values):\n    return 4")  # fmt: skip


def _is_right_in_python(program: str, tests: str) -> bool:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("import copy, math\nfrom copy import deepcopy\nfrom math import inf, isclose", names)
    exec(program, names)
    names["candidate"] = names["f"]
    try:
        exec(_with_calls(tests), names)
    except Exception:
        return False
    return True


def _is_right(program: str, call: AssertedCall) -> bool:
    names: dict[str, Any] = {}
    exec(program, names)
    try:
        value = names[call.entry_point](*plain.from_tree(call.args), **plain.from_tree(call.kwargs))
        for name in call.applied:
            value = getattr(builtins, name)(value)
    except Exception:
        return False
    return not asserted_failure(call, json.loads(plain.encode(value)))


@settings(max_examples=400, deadline=None)
@given(_MODULES, st.lists(_PROGRAMS, min_size=3, max_size=3))
def test_tests_that_are_read_have_the_verdict_of_python(tests: str, programs: list[str]) -> None:
    try:
        calls = AssertTests(tests=tests, entry_point="f", names=("f", "g")).calls()
    except UnusableTestsError:
        return
    for program in programs if calls is not None else ():
        assert all(_is_right(program, call) for call in calls or ()) == _is_right_in_python(program, tests), program


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
