"""Which names of test code are the program's, and which tests are refused before a program is judged by them."""

from __future__ import annotations

import builtins
import gc
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


# --- threads that parse at the same time


def _let_others_run(_phase: str, _facts: dict[str, int]) -> None:
    time.sleep(0)


@pytest.fixture
def switches() -> Iterator[None]:
    """Threads change places in the middle of the making of a tree: the sweeper runs then, and calls a function."""
    threshold = gc.get_threshold()
    gc.set_threshold(10)
    gc.callbacks.append(_let_others_run)
    yield
    gc.callbacks.remove(_let_others_run)
    gc.set_threshold(*threshold)


def _read(number: int) -> tuple[str, tuple[str, ...]]:
    tests = "\n".join(f"assert g([[{i}, {{'a': ({number}, -{i})}}]]) == {i}" for i in range(20))
    program = f"def g(x):\n    return [[x + {number} * 2]]\nprint(g(int(input())))"
    return names_of(tests, "g").entry_point, defined_by(program, tests)


@pytest.mark.usefixtures("switches")
def test_threads_that_parse_at_once_get_the_trees_of_one_thread() -> None:
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(_read, range(64)))
    assert told == [("g", ("g",))] * 64
