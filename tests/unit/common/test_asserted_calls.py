"""Which test code is read as calls and values, and which is opaque."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from services.common.text.asserted_calls import AssertedCall, Relation, asserted_calls
from services.common.text.literals import NotLiteralError, to_tree, tree_of
from services.common.text.programs import UnusableTestsError


def _check(*lines: str, after: str = "") -> tuple[AssertedCall, ...]:
    body = "\n".join(f"    {line}" for line in lines)
    calls = asserted_calls(f"def check(candidate):\n{body}\n{after}", "" if after else "f")
    assert calls is not None
    return calls


def test_asserts_are_read_as_calls_and_values() -> None:
    calls = _check(
        '"""words"""', "assert candidate(1, k=[2]) == 3, 'why'", "assert 3 == candidate(1)", "assert not candidate(2)",
        "assert candidate(3)", "assert candidate(4) is None", "assert abs(candidate(5) - 0.5) < 1e-6", "assert True",
        "assert candidate(6) in [1, 2]",
    )  # fmt: skip
    assert [call.relation.value for call in calls] == ["equal", "equal", "false", "true", "identical", "near", "in"]
    assert calls[0].args == ["t", 1] and calls[0].kwargs == ["d", "k", ["l", 2]] and calls[0].expected == 3
    assert all(call.entry_point == "f" for call in calls)


def test_bare_asserts_and_methods_name_their_own_entry() -> None:
    calls = asserted_calls("import math\nassert total(1, 2) == 3\nassert Solution().f(1) == [1]", names=("Solution",))
    assert calls is not None and [call.entry_point for call in calls] == ["total", "Solution().f"]
    assert _check("assert candidate(n = 1) == 2", after="\n\ncheck(Solution().f)")[0].entry_point == "Solution().f"


def _calls(tests: str) -> list[tuple[object, object]]:
    found = asserted_calls(tests, "f")
    assert found is not None, tests
    return [(call.args[1:], call.expected) for call in found]


@pytest.mark.parametrize(
    ("tests", "calls"),
    [
        ("for n in [1, 2]:\n    assert f(n) == n * n + 1", [([1], 2), ([2], 5)]),
        ("for n, w in [(1, 2), (3, [4])]:\n    assert f(n, n + 1) == w", [([1, 2], 2), ([3, 4], ["l", 4])]),
        ("given, wanted = [[1], [2, 3]], [1, 5]\nfor a, w in zip(given, wanted):\n    assert f(*a) == w", [([1], 1), ([2, 3], 5)]),
        ("for i, w in enumerate(['a', 'b']):\n    assert f(i) == w", [([0], "a"), ([1], "b")]),
        ("for n in range(2, 8, 3):\n    assert f(n) == str(n)", [([2], "2"), ([5], "5")]),
        ("cases = {1: 2}\nfor n, w in cases.items():\n    assert f(n) == w", [([1], 2)]),
        ("for a in [1]:\n    for b in (2, 3):\n        assert f(a, b) == 0", [([1, 2], 0), ([1, 3], 0)]),
        ("g = 1\nassert f(g) == 1", [([1], 1)]),
        ("x = f(1)\nassert x == 1\nx = f(2)\nassert x == 2", [([1], 1), ([2], 2)]),
        ("def test_it():\n    x = 3\n    assert f(x) == 1\ntest_it()", [([3], 1)]),
        ("if __name__ == '__main__':\n    assert f(1) == 1", [([1], 1)]),
        ("import unittest\nclass T(unittest.TestCase):\n  def test_a(self):\n    self.assertEqual(f(1), 2)\n    self.assertIsNone(f(2), 'why')\nif __name__ == '__main__':\n  unittest.main()", [([1], 2), ([2], None)]),
    ],
)  # fmt: skip
def test_loops_names_and_test_functions_over_literals_are_read(tests: str, calls: list[tuple[object, object]]) -> None:
    assert _calls(tests) == calls


@pytest.mark.parametrize(
    ("test", "applied", "relation"),
    [
        ("sorted(f(1)) == [1, 2]", ("sorted",), Relation.EQUAL),
        ("set(f(1)) == set([1, 2])", ("set",), Relation.EQUAL),
        ("tuple(f(1)) == tuple([1])", ("tuple",), Relation.EQUAL),
        ("len(set(f(1))) == 2", ("set", "len"), Relation.EQUAL),
        ("math.isclose(f(1), 1.5, rel_tol=1e-3)", (), Relation.CLOSE),
        ("abs(f(1) - 2) <= 0.5", (), Relation.NEAR),
        ("f(1) is True", (), Relation.IDENTICAL),
    ],
)
def test_functions_of_the_value_and_tolerances_are_read(
    test: str, applied: tuple[str, ...], relation: Relation
) -> None:
    calls = asserted_calls(f"import math\nassert {test}", "f")
    assert calls is not None and (calls[0].applied, calls[0].relation) == (applied, relation)


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(1) == f(2)",
        "assert f(1) > 1",
        "assert f(1) != 1",
        "assert f(1).x == 1",
        "assert eval(f(1)) == 1",  # runs text of the program
        "exec(f(1))\nassert f(1) == 1",
        "assert all(f(n) == n for n in [1, 2])",
        "def helper(): return f(1)\nassert helper() == 1",
        "assert f(1) == 1 and f(2) == 2",
        "assert f(lambda x: x) == 1",
        "r = f(1)\nassert len(r) == 2\nassert 3 in r",  # two conditions on one value
        "r = f(1)\nassert f(2) == 1",  # a call whose failure fails the test
        "x = [1]\nf(x)\nassert f(x) == 1",  # in place
        "x = 1\ndef test_a(): assert f(x) == 1\nx = 2\ntest_a()",  # the function sees the last value
        "from numpy import isclose\nassert isclose(f(1), 1)",  # another function of the name
        "from operator import abs\nassert abs(f(1) - 2) < 1",
        "for n in [1]:\n    if n: assert f(n) == 1",
        "while True:\n    assert f(1) == 1\n    break",
        "for n in range(10 ** 9):\n    assert f(n) == 1",
        "import random\nfor n in range(2):\n    x = random.random()\n    assert f(x) == 1",
        "import unittest\nclass T(unittest.TestCase):\n  def setUp(self): self.x = 1\n  def test_a(self): self.assertEqual(f(self.x), 2)",
        "with open('x'):\n    assert f(1) == 1",
        "assert f(*range(10 ** 6)) == 1",
        "a = [1] \nb = [a, a]\n" + "".join(f"b = [{', '.join('bbbbbbbbb')}]\n" for _ in range(12)) + "assert f(b) == 1",
        "str = 'abc'\nassert str(f(1)) == '1'",
    ],
)  # fmt: skip
def test_anything_else_is_opaque(tests: str) -> None:
    assert asserted_calls(tests, "f") is None


def test_an_object_is_read_in_one_check_only_because_it_may_keep_a_state() -> None:
    calls = asserted_calls("s = Solution()\nassert s.f(1) == 2\nassert Solution().f(2) == 3")
    assert calls is not None and [(call.entry_point, call.expected) for call in calls] == [("Solution().f", 2), ("Solution().f", 3)]  # fmt: skip
    assert asserted_calls("s = Solution()\nassert s.f(1) == 2\nassert s.f(2) == 3") is None
    assert asserted_calls("s = Stack(3)\nassert s.f(1) == 2\nassert s.f(2) == 3", names=("Stack",)) is None


@pytest.mark.parametrize(
    "tests",
    [
        "assert f([2, 1]) == list(set([2, 1]))", "assert f({'a': tuple({1, 2})}) == 1", "assert f(list(frozenset([1]))) == 1",
        "n = 5\ndef test_f(n=3):\n  assert f(n) == 6", "n = 5\ndef test_f(*n):\n  assert f(n) == 6",
        "n = 5\ndef test_f(*, n=3):\n  assert f(n) == 6", "n = 5\ndef test_f(n=3, /):\n  assert f(n) == 6",
        "n = 5\ndef check(candidate, *, n=3):\n  assert candidate(n) == 6",
        "import unittest\nclass T(unittest.TestCase):\n  def test_f(self, *, n=3):\n    self.assertEqual(f(1), 6)",
        "n = 5\ndef test_f():\n  assert f(n) == 6\n  n = 3",  # a local name without a value
        "def check(fn):\n  assert fn(2) == 4\ncheck(f)\ncheck(max)", "def check(fn):\n  assert fn(2) == 4\nassert fn(1) == 1",
        "base = {1: 2}\nfor k, v in {2: 4, **base}.items():\n  assert f(k) == v", "for k, v in {2: 5, 2.0: 4}.items():\n  assert f(k) == v",
        "a = [1]\nfor x in [*a, 3]:\n  assert f(x) == x", "for a, b in zip([1, 2, 1 / 0], [1, 2]):\n  assert f(a) == b",
        "a = 2\nfrom math import pi as a\nassert f(a) == 4", "e = 2\nfrom math import *\nassert f(e) == 4",
        "from sys import maxsize as inf\nassert f(1) == inf", "def test_a():\n  inf = 3\n  assert f(inf) == inf",
        "from functools import reduce as deepcopy\nassert f(1) == deepcopy([1])", "from operator import *\nassert abs(f(1) - 2) < 1",
        "from numpy import *\nassert sum(f(1)) == 3", "from unittest import IsolatedAsyncioTestCase as TestCase\nclass T(TestCase):\n  def test_a(self): self.assertEqual(f(1), 1)",
        "a = [1, 2]\nassert f(a) == 3\nassert f(a) == 3", "a = [1]\nassert f(a) == a", "a = [1]\nb = (a, a)\nassert f(b) == 1",
        "a = [1]\nfor x in [a]:\n  assert f(x) == 1\nassert f(2) == a", "a = {}\nassert f(a, a) == 1",
        "def test_a():\n  assert f(2) == 5\ndef test_a():\n  assert f(2) == 4", "def check(candidate):\n  assert candidate(2) == 5\ndef check(candidate):\n  assert candidate(2) == 4",
        "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): self.assertEqual(f(2), 5)\n  def test_a(self): self.assertEqual(f(2), 4)",
        "import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n  def test_a(self): self.assertEqual(f(2), 5)",
        "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): self.assertSetEqual(f(2), (5,))",
        "import unittest\nclass T(unittest.TestCase):\n  def test_a(self):\n    x = f(3)\n    self.assertEqual(f(2), 5, x)",
        "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): self.assertAlmostEqual(f(2), float('inf'))",
        "import unittest\nclass T(unittest.TestCase):\n  def test_a(f): f.assertEqual(f(2), 5)",
        "assert abs(f(1) - (1 + 2j)) < 1e-6", "test_a()\ndef test_a():\n  assert f(2) == 5", "def test_a():\n  assert f(2) == 5\ntest_a(3)",
    ],
)  # fmt: skip
def test_a_name_an_object_or_a_literal_of_uncertain_meaning_is_opaque(tests: str) -> None:
    assert asserted_calls(tests, "f") is None


def test_a_function_of_the_row_s_program_is_no_function_of_the_library() -> None:
    assert asserted_calls("assert isclose(f(1), 2)", "f", names=("f", "isclose")) is None
    assert asserted_calls("assert f(1) == inf", "f", preamble="inf = 10 ** 9\ndef f(x):\n") is None
    calls = asserted_calls("assert sum(1, 2) == 3", names=("sum",))
    assert calls is not None and calls[0].entry_point == "sum"


@pytest.mark.parametrize("tests", ["def", "assert candidate(1) == 1", "\0", "(" * 100_000, "x" * 2_000_000])
def test_unreadable_tests_raise_an_error(tests: str) -> None:
    with pytest.raises(UnusableTestsError):
        asserted_calls(tests)


# --- literals, from their syntax alone


def _tree(text: str) -> Any:
    return tree_of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 * 19", 57),
        ("[1, -2.5, (3,), {4}, {'a': None}]", [1, -2.5, (3,), {4}, {"a": None}]),
        ("'ab' + 'c'", "abc"),
        ("0 ** 0", 1),
        ("float('inf')", math.inf),
        ("tuple([1, 2])", (1, 2)),
        ("set()", set()),
        ("str(3 + 4)", "7"),
        ("sorted([3, 1])", [1, 3]),
        ("sorted({3, 1, 3})", [1, 3]),
        ("sorted(set([2, 1, 1]))", [1, 2]),
        ("copy.deepcopy([1])", [1]),
    ],
)
def test_literals_are_read_from_their_text(text: str, value: Any) -> None:
    assert _tree(text) == to_tree(value)


def test_nodes_are_read_from_their_values() -> None:
    assert _tree("list_node([1, 2])") == ["L", 1, 2] and _tree("list_node([])") is None
    assert _tree("tree_node([1, None, 2, None])") == ["T", 1, None, 2]


@pytest.mark.parametrize(
    "text",
    [
        "f(1)", "x", "10 ** 10 ** 10", "9 ** 99", "[x for x in y]", "1 / 0", "'a' * 9", "{**x}", "...", "2 << 9",
        "sorted([1, 'a'])", "sorted([True, False])", "sorted([1.5, 2])", "str([1])", "str(1.0)", "str(True)",
        "list({1, 2})", "tuple(set([1, 1]))", "{'a': list(frozenset([1]))}", "list_node({1})",
    ],
)  # fmt: skip
def test_only_small_literals_are_accepted(text: str) -> None:
    with pytest.raises(NotLiteralError):
        _tree(text)
