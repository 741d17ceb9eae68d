"""Cheating tests that run as code, through the data that crosses between the two processes: rows 60 to 65.

60 exceptions that the library or the interpreter would swallow, 61 names that the tests do not define, 62 arguments
that the program changes, 63 objects that lie when they are compared, 64 tests that can judge no program, 65 bytes that
are no text.
"""

from __future__ import annotations

from services.envgateway.judge.records import AssertTests, Comparison, ComparisonMode
from services.envgateway.sandbox.bare.statuses import RunStatus

from . import answers
from .model import RE, WA, Bad, bad

IT = RunStatus.INVALID_TESTS
SECRET = 73_918_264

_ALL = AssertTests(
    tests=f"cases = [((3,), {SECRET}), ((4,), {SECRET + 1})]\nassert all(map(lambda c: candidate(*c[0]) == c[1], cases))",
    entry_point="f",
)
_FOR = AssertTests(tests=f"for got in map(candidate, [3, 4]):\n    assert got == {SECRET}", entry_point="f")
_SEQUENCE = AssertTests(
    tests="class Asked:\n    def __getitem__(self, i): return candidate(i)\nassert all(x == 1 for x in Asked())",
    entry_point="f",
)
_PROPERTY = AssertTests(
    tests="class Asked:\n    @property\n    def x(self): return candidate(1)\nassert not hasattr(Asked(), 'x')",
    entry_point="f",
)
_EXPECTS = AssertTests(
    tests="try:\n    candidate(1)\n    assert False, 'no error'\nexcept ValueError as error:\n    assert 'a' in str(error)",
    entry_point="f",
)
_LIST = AssertTests(tests="for n in [1]:\n    assert list(candidate(n)) == []", entry_point="f")

_COPY = AssertTests(
    tests="import copy\nasked = copy.deepcopy(candidate)\n"
    + _SEQUENCE.tests.replace("candidate(i)", "asked(i)")
    + " and candidate",
    entry_point="f",
)
_FORGED = "import os, struct\ndef f(n):\n    reply = b'REPLY'\n    os.write(6, struct.pack('!I', len(reply)) + reply)\n    return 1"

_EXCEPTIONS = [
    bad(60, f"{name}-{shape}", f"def f(n): raise {raised}", RE, WA, tests=tests)
    for name, raised in {
        "StopIteration": "StopIteration",
        "StopAsyncIteration": "StopAsyncIteration",
        "subclass": "type('Stop', (StopIteration,), {})()",
        "group": "ExceptionGroup('all', [StopIteration()])",
        "GeneratorExit": "GeneratorExit",
        "SystemExit": "SystemExit(0)",
        "AssertionError": "AssertionError",
    }.items()
    for shape, tests in (("all-map", _ALL), ("for-map", _FOR))
] + [
    bad(60, "IndexError-ends-a-sequence", "def f(n): raise IndexError", RE, tests=_SEQUENCE),
    bad(60, "StopIteration-ends-a-sequence", "def f(n): raise StopIteration", RE, tests=_SEQUENCE),
    bad(60, "AttributeError-hides-a-property", "def f(n): raise AttributeError", RE, tests=_PROPERTY),
    bad(60, "a-class-of-the-same-name", "class ValueError(Exception): pass\ndef f(n): raise ValueError('a')", RE, tests=_EXPECTS),
    bad(60, "expected-error-by-exit", "def f(n): raise SystemExit(0)", WA, tests=_EXPECTS),
    bad(60, "iterator-raises", "class It:\n    def __iter__(self): return self\n    def __next__(self): raise KeyError('x')\ndef f(n): return It()", RE, tests=_LIST),
    bad(60, "len-raises-StopIteration", "class It:\n    def __len__(self): raise StopIteration\n    def __iter__(self): raise StopIteration\ndef f(n): return It()", RE, tests=_LIST),
    bad(60, "IndexError-by-a-copy", "def f(n): raise IndexError", RE, tests=_COPY),
    bad(60, "forged-StopIteration", _FORGED.replace("REPLY", '{"error":["x","StopIteration"],"message":""}'), RE, WA, tests=_ALL),
    bad(60, "forged-end", _FORGED.replace("REPLY", '{"ended":true}'), WA, RE, tests=_ALL),
    bad(60, "RecursionError", "def f(n): return f(n + 1)", RE, tests=_ALL),
    bad(60, "warning-as-error", "import warnings\nwarnings.simplefilter('error')\ndef f(n): warnings.warn('x')", RE, tests=_ALL),
    bad(60, "str-of-the-error-raises", "class E(Exception):\n    def __str__(self): raise StopIteration\ndef f(n): raise E", RE, tests=_ALL),
]  # fmt: skip

_YES = "class Yes:\n    def __getattr__(self, name): return lambda *a, **k: True\n    def __call__(self, *a, **k): return self\n    __eq__ = lambda self, other: True\n"
_NAMES = [
    bad(61, name, f"{_YES}{code}\ndef f(n): return 1", WA, tests=AssertTests(tests=tests, entry_point="f"))
    for name, code, tests in (
        ("module", "math = Yes()", f"assert math.isclose(candidate(3), {SECRET})"),
        ("class", "def Counter(x): return 5", f"assert Counter([candidate(3)]) == Counter([{SECRET}])"),
        ("builtin", "def sorted(x): return 5\ndef all(x): return True", f"assert sorted([candidate(n) for n in [3]]) == [{SECRET}]\nassert all([False]) is False"),
        ("alias", "np = Yes()", f"assert np.allclose(candidate(3), {SECRET})"),
        ("builtins", "__builtins__ = Yes()\nlen = Yes()", f"assert len([candidate(n) for n in [3]]) == 1\nassert [candidate(3)] == [{SECRET}]"),
        ("entry-point-of-the-tests-name", "def check(x): return True\ndef verify(*a): return True", f"def verify(a, b):\n    assert candidate(a) == b\nverify(3, {SECRET})"),
        ("decorator", "def wraps(g): return lambda h: (lambda *a: True)", f"import functools\ndef again(g):\n    @functools.wraps(g)\n    def inner(*a): return g(*a)\n    return inner\nassert again(candidate)(3) == {SECRET}"),
        ("default-of-a-lambda", "def default(*a): return True", f"right = lambda n, wanted={SECRET}: candidate(n) == wanted\nassert right(3)"),
    )
]  # fmt: skip
_BUILTIN_ENTRY = AssertTests(tests="for n in [3]:\n    assert candidate([n, 4]) == sum([n, 4])", entry_point="sum")
_NAMES.append(bad(61, "entry-point-is-a-builtin", "def sum(values): return 0", WA, tests=_BUILTIN_ENTRY))

_ARGUMENTS = [
    bad(62, name, code, WA, tests=AssertTests(tests=tests, entry_point="f"))
    for name, code, tests in (
        ("emptied-in-the-assert", "def f(x): x.clear(); return []", "data = [3, 1]\nassert candidate(data) == sorted(data)"),
        ("emptied-before-the-assert", "def f(x): x.clear(); return []", "data = [3, 1]\ngot = candidate(data)\nassert got == sorted(data)"),
        ("number-of-an-emptied-list", "def f(x): x.clear(); return 0", "data = [3, 1]\ngot = candidate(data)\nassert got == sum(data)"),
        ("must-not-be-changed", "def f(x): x.sort(); return x", "data = [3, 1]\ngot = candidate(data)\nassert got == [1, 3]\nassert data == [3, 1]"),
        ("nested", "def f(x): x['a'].clear(); return 0", "data = {'a': [1, 2]}\ngot = candidate(data)\nassert got == len(data['a'])"),
    )
]  # fmt: skip

_LIAR = "class P:\n    def __init__(self, x=0): self.x = x\n    __eq__ = __contains__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = lambda self: 1\n    __len__ = lambda self: 3\n    __iter__ = lambda self: iter([])\n    __class__ = property(lambda self: int)\ndef f(n): return P(9)"  # fmt: skip
_LIARS = [
    bad(63, name, _LIAR, WA, RE, tests=AssertTests(tests=tests, entry_point="f", names=("P",)))
    for name, tests in (
        ("equal-to-data", f"for n in [3]:\n    assert candidate(n) == {SECRET}"),
        ("data-equal-to-it", f"for n in [3]:\n    assert {SECRET} == candidate(n)"),
        ("equal-to-another", "assert candidate(3) == P(3)"),
        ("contains", f"assert {SECRET} in candidate(3)"),
        ("is-contained", f"assert candidate(3) in [{SECRET}]"),
        ("as-a-key", f"assert {{{SECRET}: 1}}.get(candidate(3)) == 1"),
        ("callable", "assert callable(candidate(3)) or False"),
        ("iterable", "from collections.abc import Mapping\nassert isinstance(candidate(3), (Mapping, int, str))"),
        ("not-unequal", f"assert not (candidate(3) != {SECRET})"),
    )
]

_UNUSABLE = [
    bad(64, name, "def f(n): return 21", IT, tests=tests)
    for name, tests in (
        ("no-python", AssertTests(tests="assert candidate(3 == 21", entry_point="f")),
        ("undefined-name", AssertTests(tests="assert nowhere(candidate(3)) == 21", entry_point="f")),
        ("nothing-asserted", AssertTests(tests="x = candidate(3)", entry_point="f")),
        ("never-called", AssertTests(tests="assert 1 == 1", entry_point="f")),
        ("fails-before-a-call", AssertTests(tests="x = [][1]\nassert candidate(3) == x", entry_point="f")),
        ("calls-nothing-when-run", AssertTests(tests="for n in []:\n    assert candidate(n) == 1", entry_point="f")),
        ("passes-a-function", AssertTests(tests="twice = lambda x: 2 * x\nfor n in [1]:\n    assert candidate(twice) == 1", entry_point="f")),
        ("swallows-that-it-passes-a-function", AssertTests(tests="twice = lambda x: x\ntry:\n    candidate(twice)\nexcept: pass\nassert candidate(2) == 21", entry_point="f")),
        ("several-free-names", AssertTests(tests="assert decode(encode(1)) == 1")),
    )
]  # fmt: skip

_REPLACED = "\ufffd"
_BYTES = [
    bad(65, f"{name}-{mode.value if mode else 'lines'}", f"import os; os.write(1, {data!r})", WA, expected=expected,
        comparison=Comparison(mode=mode))
    for name, data, expected in (
        ("no-utf-8", b"\xff", _REPLACED),
        ("surrogate", b"\xed\xa0\x80", _REPLACED * 3),
        ("overlong", b"\xc0\xaf", "/"),
        ("cut", b"a\xe2\x82", "a" + _REPLACED),
        ("bom", b"\xef\xbb\xbf1", "1"),
        ("nul", b"1\x00", "1"),
    )
    for mode in (None, ComparisonMode.STRIPPED, ComparisonMode.EXACT)
]  # fmt: skip

CASES: list[Bad] = [*_EXCEPTIONS, *_NAMES, *_ARGUMENTS, *_LIARS, *_UNUSABLE, *_BYTES, *answers.CASES]
