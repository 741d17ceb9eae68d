"""Answers that are objects of the program and lie, and other means to pass a check silently: rows 60 to 64 again, by
other means than in ``exchange``."""

from __future__ import annotations

from services.envgateway.judge.records import AssertTests
from services.envgateway.sandbox.bare.statuses import RunStatus

from .model import RE, WA, Bad, bad

SECRET = 73_918_264

_NUMBER = """
class Z:
    def __add__(self, other): return 0
    __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __and__ = __or__ = __xor__ = __matmul__ = __add__
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
    __float__ = lambda self: 0.0
    __abs__ = lambda self: 0
    __round__ = lambda self, *digits: 0
    __bool__ = lambda self: True
def f(*args): return Z()
"""
_EACH = f"for n, w in [(3, {SECRET})]:\n    assert "
_TESTS_CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): "


def _asserts(tests: str) -> AssertTests:
    return AssertTests(tests=tests, entry_point="f")


_LEAKS = [
    bad(63, f"is-never-handed-what-is-expected-{name}", _NUMBER, WA, RE, tests=_asserts(tests))
    for name, tests in (
        ("difference", _EACH + "abs(candidate(n) - w) < 1e-6"),
        ("difference-fabs", _EACH + "math.fabs(candidate(n) - w) < 1e-6"),
        ("difference-is-0", _EACH + "candidate(n) - w == 0"),
        ("difference-rounded", _EACH + "round(candidate(n) - w, 3) == 0"),
        ("quotient", _EACH + "candidate(n) / w == 0"),
        ("remainder", _EACH + "candidate(n) % w == 0"),
        ("xor", _EACH + "not (candidate(n) ^ w)"),
        ("sum", _EACH + "candidate(n) + -w == 0"),
        ("almost-equal", _TESTS_CASE + f"self.assertAlmostEqual(candidate(3), {SECRET})"),
        ("greater", _TESTS_CASE + f"self.assertGreater(candidate(3), {SECRET})"),
    )
]
_MADE = "class Z:\n    def __add__(self, other): return 0\n    __sub__ = __rsub__ = __add__\nclass V:\n    def __init__(self, x): pass\n    def norm(self): return Z()\ndef f(n): return Z()"  # fmt: skip
_LEAKS += [
    bad(63, f"is-never-handed-what-is-expected-{name}", _MADE, WA, RE, tests=AssertTests(tests=tests, entry_point="f", names=("V",)))
    for name, tests in (
        ("by-a-method", "for n in [3]:\n    assert abs(V(n).norm() - 5.0) < 1e-6"),
        ("reflected", "for n in [3]:\n    assert abs(5.0 - candidate(n)) < 1e-6"),
        ("in-place", "left = 5\nfor n in [3]:\n    left -= candidate(n)\nassert left == 0"),
    )
]  # fmt: skip
_CHOSEN = "class X:\n    asked = -1\n    def __float__(self):\n        X.asked += 1\n        return [1.0, -0.25][X.asked % 2]\nheld = X()\ndef f(xs): return held"  # fmt: skip
_ROOT = "def poly(xs, x): return xs[0] * math.pow(x, 0) + xs[1] * math.pow(x, 1)\nfor xs in [[0, 4], [1, 8]]:\n    x = float(candidate(xs))\n    assert abs(poly(xs, candidate(xs))) < 1e-4 and x != -0.125"  # fmt: skip
_LEAKS.append(bad(63, "another-number-each-time", _CHOSEN, WA, RE, tests=_asserts("import math\n" + _ROOT)))

_SEQUENCE = "class A:\n    def __getitem__(self, i):\n{}\nassert all(x == 1 for x in A())"
_SWALLOWED = [
    bad(60, f"{name}-swallowed", f"def f(n): raise {raised}", RE, tests=_asserts(tests))
    for name, raised, tests in (
        ("after-with", "IndexError", "import threading\nlock = threading.Lock()\n" + _SEQUENCE.format("        with lock: return candidate(i)")),
        ("after-two-withs", "IndexError", "import contextlib\nn = contextlib.nullcontext\n" + _SEQUENCE.format("        with n(), n():\n            with n(): got = candidate(i)\n        return got")),
        ("after-a-later-with", "IndexError", "import contextlib\n" + _SEQUENCE.format("        for k in (1, 2):\n            with contextlib.nullcontext():\n                if k == 2: return candidate(i)")),
        ("after-raise", "IndexError", _SEQUENCE.format("        try: return candidate(i)\n        except Exception: raise")),
        ("after-raise-by-name", "IndexError", _SEQUENCE.format("        try: return candidate(i)\n        except ValueError: return 0\n        except Exception as e: raise e")),
        ("after-raise-in-a-with", "IndexError", "import contextlib\n" + _SEQUENCE.format("        with contextlib.suppress(KeyError):\n            try: return candidate(i)\n            except LookupError: raise")),
        ("with-in-a-property", "AttributeError", "import contextlib\nclass A:\n    @property\n    def x(self):\n        with contextlib.nullcontext(): return candidate(1)\nassert getattr(A(), 'x', 5) == 5"),
    )
]  # fmt: skip
_NEXT = f"assert all(map(lambda c: next({{}}) == c[1], [(3, {SECRET})]))"
_SWALLOWED += [
    bad(60, f"next-of-{name}-ends-a-map", f"def f(n): return {value}", RE, tests=_asserts(_NEXT.format(asked)))
    for name, value, asked in (
        ("an-iterator", "iter([])", "candidate(c[0])"),
        ("a-generator", "(x for x in [])", "candidate(c[0])"),
        ("a-list", "[]", "iter(candidate(c[0]))"),
        ("a-filter", "[1]", "x for x in candidate(c[0]) if x == c[1]".join("()")),
    )
]

_REF = "def ref(x): return max(x, default=None)\n"
_EMPTIED = [
    bad(62, f"emptied-for-None-{name}", code, WA, tests=_asserts(tests))
    for name, code, tests in (
        ("by-a-reference", "def f(x): x.clear()", _REF + "for x in [[3, 1], [2]]:\n    assert candidate(x) == ref(x)"),
        ("in-the-test", "def f(x): x.clear()", "for x in [[3, 1], [2]]:\n    got = candidate(x)\n    assert got == (max(x) if x else None)"),
        ("dict", "def f(d, k): d.clear()", "for k in 'ab':\n    d = {'a': 1, 'b': 2}\n    assert candidate(d, k) == d.get(k)"),
        ("set", "def f(s): s.clear()", "for s in [{1, 2}]:\n    assert candidate(s) == next(iter(sorted(s)), None)"),
        ("inside", "def f(x): x[0].clear()", _REF + "for x in [[3, 1], [2]]:\n    assert candidate([x]) == ref(x)"),
    )
]  # fmt: skip
_DROPS_OUT = [
    bad(64, f"is-no-way-out-{name}", code, WA, RE, tests=AssertTests(tests=tests, entry_point="f", names=("make",)))
    for name, code, tests in (
        ("method-of-a-list", "def f(n): return 'abc'\ndef make(): return []", "s = make()\nassert candidate(s.pop) == 5"),
        ("method-of-a-text", "def f(n): return 'abc'", "for n in [1]:\n    assert candidate(candidate(n).count) == 3"),
        ("keys", "def f(n): return {1: 2}", "for n in [1]:\n    assert candidate(candidate(n).keys()) == 5"),
        ("iterator", "def f(n): return [1]", "for n in [1]:\n    assert candidate(iter(candidate(n))) == 5"),
        ("zip", "def f(n): return [1]", "for n in [1]:\n    assert candidate(zip(candidate(n), [1])) == 5"),
        ("chain", "def f(n): return [1]", "import itertools\nfor n in [1]:\n    assert candidate(itertools.chain(candidate(n))) == 5"),
        ("not-implemented", "def f(n): return 5", "for n in [1]:\n    assert candidate(candidate(n).__lt__('a')) == 5"),
        ("slice", "def f(n): return 5", "for n in [1]:\n    assert candidate(slice(candidate(n))) == 5"),
        ("ellipsis", "def f(n): return 5", "for n in [1]:\n    assert candidate(... if candidate(n) == 5 else 1) == 5"),
    )
] + [
    bad(64, f"still-cannot-judge-{name}", "def f(*n): return 21", RunStatus.INVALID_TESTS, tests=_asserts(tests))
    for name, tests in (
        ("function", "for n in [1]:\n    assert candidate(n) == 21\n    assert candidate(print) == 21"),
        ("own-function", "twice = lambda x: x\nfor n in [1]:\n    assert candidate(n) == 21\n    assert candidate(twice) == 21"),
        ("generator", "for n in [1]:\n    assert candidate(n) == 21\n    assert candidate(x for x in [1]) == 21"),
        ("type", "for n in [1]:\n    assert candidate(n) == 21\n    assert candidate(n, int) == 21"),
        ("own-class", "class A: pass\nfor n in [1]:\n    assert candidate(n) == 21\n    assert candidate(A()) == 21"),
        ("first-of-all", "assert candidate(zip([1], [2])) == 21\nassert candidate(2) == 21"),
    )
]  # fmt: skip

_BAG = "class L:\n    def __init__(self, n, true=True): self.n, self.true = n, true\n    def __len__(self): return self.n\n    def __iter__(self): return iter(())\n    def __bool__(self): return self.true\ndef f(n): return "  # fmt: skip
_EMPTY = [
    bad(63, f"is-empty-{name}", code, WA, RE, tests=_asserts(tests))
    for name, code, tests in (
        ("of-a-length", _BAG + "L(3)", "for n in [3]:\n    r = candidate(n)\n    assert len(r) == 3 and all(x in (7, 8, 9) for x in r)"),
        ("of-a-length-reversed", _BAG + "L(3)\nL.__reversed__ = L.__iter__", "for n in [3]:\n    r = candidate(n)\n    assert len(r) == 3 and all(x > 7 for x in reversed(r))"),
        ("and-true", _BAG + "L(0)", "for n in [3]:\n    r = candidate(n)\n    assert r and all(x in (7, 8, 9) for x in r)"),
        ("and-counted-the-same", _BAG + "L(2)", _TESTS_CASE + "self.assertCountEqual(candidate(3), [1, 2])"),
        ("list-near-a-number", "def f(n): return []", "import numpy as np\nassert np.allclose(candidate(3), 5.0)"),
        ("tuple-near-a-list-of-one", "def f(n): return ()", "from numpy import allclose\nassert allclose(candidate(3), [5.0])"),
        ("array-near-a-row", "import numpy as np\ndef f(n): return np.empty((0, 3))", "assert np.allclose(candidate(3), [1, 2, 3])"),
        ("array-equal-to-a-number", "import numpy as np\ndef f(n): return np.array([])", "import numpy as np\nassert (candidate(3) == 5).all()"),
        ("array-equal-to-a-row", "import numpy as np\ndef f(n): return np.empty((0, 2))", "import numpy as np\nassert (np.array([1, 2]) == candidate(3)).all()"),
        ("array-equal-without-import", "import numpy as np\ndef f(n): return np.array([])", "for n in [3]:\n    assert (candidate(n) == 5).all()"),
        ("array-handed-back", "import numpy as np\ndef f(n): return np.array([])", "for n in [3]:\n    assert (candidate(candidate(n)) == 5).all()"),
        ("list-close", "def f(n): return []", "import numpy as np\nassert np.isclose(candidate(3), 5.0).all()"),
        ("list-in-numpys-tests", "def f(n): return []", "import numpy as np\nfor n in [3]:\n    np.testing.assert_allclose(candidate(n), 5.0)\n    assert n"),
    )
]  # fmt: skip

CASES: list[Bad] = [*_EMPTY, *_EMPTIED, *_DROPS_OUT, *_LEAKS, *_SWALLOWED]
