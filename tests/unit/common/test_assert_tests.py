"""Which names of test code are the program's, and which tests are refused before a program is judged by them."""

from __future__ import annotations

import builtins
import random
import statistics

import pytest

from services.common.text.programs import (
    PRELUDE_MODULES,
    PRELUDE_NAMES,
    UnusableTestsError,
    completed,
    defined_by,
    in_prelude,
    names_of,
)
from services.envgateway.sandbox.bare import harness


@pytest.mark.parametrize(
    ("tests", "entry_point", "remote"),
    [
        ("def check(fn): assert fn(3) == 21", "f", {"f"}),
        ("assert Counter([f(1)]) == Counter([2])", "", {"f"}),
        ("assert Counter(1, 2) == 3", "", {"Counter"}),
        ("assert math.isclose(f(1), math.pi)", "", {"f"}),
        ("from math import gcd\nassert candidate(4, 6) == gcd(4, 6)", "gcd", set()),
        ("assert candidate([1]) == sum([1])", "sum", set()),
        ("assert sum([1]) == 1", "sum", {"sum"}),
        (
            "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): self.assertEqual(add(1, 2), 3)",
            "",
            {"add"},
        ),
        ("x = Solution()\nassert x.f([1]) == Counter([1])", "", {"Solution"}),
        ("def check(candidate): assert candidate(1) == 2\ncheck(Solution().f)", "", {"Solution"}),
    ],
)
def test_only_what_is_named_is_the_programs(tests: str, entry_point: str, remote: set[str]) -> None:
    assert names_of(tests, entry_point).remote == remote


@pytest.mark.parametrize(
    ("tests", "entry_point", "why"),
    [
        ("assert candidate(", "f", "no Python"),
        ("return 1\nassert candidate(1)", "f", "no Python|never"),
        ("x = candidate(1)", "f", "the tests have no assert"),
        ("assert True", "f", "the tests have no assert"),
        ("def helper(): assert candidate(1)", "f", "functions that assert are never called"),
        ("def test_a(fixture): assert candidate(1)", "f", "takes arguments"),
        ("assert 1 == 1", "f", "never call"),
        ("assert candidate(1) == 1", "", "candidate is not defined"),
        ("assert candidate(missing) == 1", "f", "use missing"),
        ("assert one(1) == two(1)", "", "use one and two"),
        ("assert Counter(math) == candidate(1)", "f", "use math"),
        ("import pytest\nassert candidate(1) == 1", "f", "import pytest"),
        ("from . import x\nassert candidate(1) == 1", "f", "relative"),
        ("assert candidate(1) == 1", "f(", "is no function"),
        ("x" * 2_000_000, "f", "more than"),
    ],
)
def test_tests_that_cannot_judge_are_refused_with_their_fault(tests: str, entry_point: str, why: str) -> None:
    with pytest.raises(UnusableTestsError, match=why):
        names_of(tests, entry_point)


def test_what_the_reference_solution_defines_may_be_used() -> None:
    tests = "assert longest([Pair(1, 2)]) == 1"
    names = defined_by("class Pair: pass\ndef longest(p): pass\ndef helper(): pass", tests)
    assert names == ("Pair", "longest")
    assert names_of(tests, names=names).remote == {"Pair", "longest"}
    assert defined_by("def (", tests) == () == defined_by("def longest(p): pass", "def (")


def test_names_of_a_preamble_are_the_tests_own() -> None:
    preamble = "from typing import List\ndef encode(x): return x\ndef decode(x):\n"
    found = names_of("assert candidate(encode(1)) == 1", "decode", preamble)
    assert found.remote == set() or found.remote == {"decode"}
    assert "encode" not in found.remote and completed(preamble).endswith("pass\n")


def test_the_prelude_has_the_names_that_are_taken_for_granted() -> None:
    namespace: dict[str, object] = {}
    harness.fill(namespace)
    assert set(PRELUDE_NAMES) <= namespace.keys() and set(PRELUDE_MODULES) == set(harness.STAR)
    assert not namespace.keys() & vars(builtins).keys()
    for module in (random, statistics):  # named without an import
        assert set(module.__all__) <= harness.NAMES and all(map(in_prelude, module.__all__))
