"""Test code and bytes: rows 60 to 65.

60 test code that is read as calls and values, before objects that lie; 61 opaque tests, before programs that end early
or print; 62 entry points with the names of classes; 63 programs that try to drop out of their reward; 64 tests that can
judge no program; 65 bytes that are no text. An opaque verdict can be forged: no row says otherwise.
"""

from __future__ import annotations

from services.envgateway.judge.records import AssertTests, Comparison, ComparisonMode
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.cases.model import RE, TL, WA, Bad, bad

IT = RunStatus.INVALID_TESTS
SECRET = 73_918_264

_LIAR = """
class Z(BASE):
    __add__ = __sub__ = __rsub__ = __mul__ = lambda self, other: 0
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __abs__ = __hash__ = __len__ = __index__ = __int__ = lambda self: 0
    __float__ = lambda self: 0.0
    __bool__ = lambda self: True
    __iter__ = lambda self: iter([])
    __class__ = property(lambda self: int)
    __getattr__ = lambda self, name: lambda *a, **k: True
def NAME(n): return Z()
"""
_READ = {
    "equal": f"assert CALL == {SECRET}",
    "in-a-loop": f"for n, w in [(3, {SECRET})]:\n    assert candidate(n) == w",
    "near": f"for n, w in [(3, {SECRET})]:\n    assert abs(candidate(n) - w) < 1e-6",
    "close": f"import math\nassert math.isclose(CALL, {SECRET}, rel_tol=1e-3)",
    "one-of": f"assert CALL in [{SECRET}, {SECRET + 1}]",
    "as-a-set": f"assert set(CALL) == {{{SECRET}}}",
    "sorted": f"r = CALL\nassert sorted(r) == [{SECRET}]",
    "unittest": f"import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(CALL, {SECRET})",
}
_LIARS = [
    bad(row, f"{name}-{base}", _LIAR.replace("BASE", base).replace("NAME", function), WA, RE, check=lambda r: not r.opaque,
        tests=AssertTests(tests=tests.replace("CALL", f"{function}(3)"), entry_point=function))
    for row, function in ((60, "f"), (62, "Extract"))
    for base in ("object", "int", "list")
    for name, tests in _READ.items()
]  # fmt: skip

_OPAQUE = {
    "comparison": AssertTests(tests="assert candidate(3) > 20 and candidate(3) < 22", entry_point="f"),
    "helper": AssertTests(tests="def same(a, b):\n    assert a == b\nfor n in [3]:\n    same(candidate(n), 7 * n)", entry_point="f"),
    "in-place": AssertTests(tests="x = [3]\ncandidate(x)\nassert x == [21]", entry_point="f"),
    "text-of-the-program": AssertTests(tests="assert eval(candidate(3)) == 21", entry_point="f"),
    "unittest": AssertTests(tests="import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.n = 3\n    def test_a(self): self.assertEqual(candidate(self.n), 21)\nif __name__ == '__main__':\n    unittest.main()", entry_point="f"),
}  # fmt: skip
_EARLY = [
    bad(61, f"{name}-{kind}", code, *verdicts, tests=tests, check=lambda r: r.opaque, wall_s=1.0)
    for kind, tests in _OPAQUE.items()
    for name, code, verdicts in (
        ("leaves", "import os\ndef f(n): os._exit(0)", (WA,)),
        ("leaves-at-once", "import os\nos._exit(0)", (WA,)),
        ("exits", "import sys\ndef f(n): sys.exit(0)", (WA, RE)),
        ("exits-at-once", "raise SystemExit", (WA,)),
        ("prints-a-verdict", "print('OK')\nprint('all tests passed')\ndef f(n): return 1", (WA, RE)),
        ("writes-to-every-descriptor", "import os, struct\nfor fd in range(3, 64):\n    for text in (b'', b'OK', b'{\"value\":1}'):\n        try: os.write(fd, struct.pack('!I', len(text)) + text)\n        except OSError: pass\ndef f(n): os._exit(0)", (WA,)),
        ("raises", "def f(n): raise KeyError(n)", (RE, WA)),
        ("has-no-such-function", "def g(n): return 21", (RE,)),
        ("does-not-end", "def f(n):\n    while True: pass", (TL,)),
        ("does-not-end-at-once", "while True: pass", (TL,)),
    )
]  # fmt: skip

_NO_WAY_OUT = [
    bad(63, name, code, WA, RE, tests=AssertTests(tests=tests, entry_point="f"))
    for name, code, tests in (
        ("sort-of-no-list", "class Z: pass\ndef f(n): return Z()", "r = candidate(3)\nr.sort(key=lambda x: x)\nassert r == [1]"),
        ("context-manager", "class C:\n    value = 5\n    def __enter__(self): return self\n    def __exit__(self, *a): return False\ndef f(n): return C()", "with candidate(3) as c:\n    assert c.value == 6"),
        ("undefined-name", "def f(n): return missing", "assert candidate(3) > 20"),
        ("syntax-error", "def f(n): exec('(')", "assert candidate(3) > 20"),
        ("breaks-the-tests", "import builtins\nbuiltins.len = None\ndef f(n): return [1]", "assert len(candidate(3)) > 1"),
        ("argument-of-its-own", "def f(n): return [n]", "assert candidate(candidate(3)) > [3]"),
    )
]  # fmt: skip

_UNUSABLE = [
    bad(64, name, "def f(n): return 21", IT, tests=tests)
    for name, tests in (
        ("no-python", AssertTests(tests="assert candidate(3 == 21", entry_point="f")),
        ("undefined-name", AssertTests(tests="assert nowhere(candidate(3)) == 21", entry_point="f")),
        ("nothing-asserted", AssertTests(tests="x = candidate(3)", entry_point="f")),
        ("never-called", AssertTests(tests="assert 1 == 1", entry_point="f")),
        ("several-free-names", AssertTests(tests="assert decode(encode(1)) == 1")),
    )
]

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

CASES: list[Bad] = [*_LIARS, *_EARLY, *_NO_WAY_OUT, *_UNUSABLE, *_BYTES]
