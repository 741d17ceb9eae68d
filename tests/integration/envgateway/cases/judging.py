"""Cheating the judge, and requests that are odd: rows 31, 33 to 37, 42 to 45."""

from __future__ import annotations

from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    Comparison,
    ComparisonMode,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.cases.model import CE, IR, OK, RE, WA, Bad, bad, first

SECRET = 73_918_264  # an expected value; it must be found nowhere
_CALL = CallTests(entry_point="f", cases=(CallCase(args=(3,), expected=SECRET),))
_DIRECT = AssertTests(tests=f"def check(candidate):\n    assert candidate(3) == {SECRET}\n", entry_point="f")
_LOOP = AssertTests(
    tests=f"def check(candidate):\n    for n in [3, 3]:\n        assert candidate(n) == {SECRET}\n    assert set(candidate(3)) == {{1}}\n",
    entry_point="f",
)
_METHOD = AssertTests(
    tests="def check(candidate):\n    assert candidate(n = 3) == [1, 2]\n\ncheck(Solution().f)",
)
_ALL_TESTS = (("call", _CALL), ("assert", _DIRECT), ("loop", _LOOP))

_LIARS = """
class Liar(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __gt__(self, other): return True
    def __bool__(self): return True
    @property
    def __class__(self): return int
def f(n): return Liar(ARGUMENT)
"""
_PATCHES = """
import builtins, json, sys, os, unittest
def always(*args, **kwargs): return True
class Yes:
    def __eq__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
for name in ("isinstance", "all", "any", "abs", "sorted", "len", "repr"):
    pass
json.dumps = json.loads = lambda *a, **k: "73918264"
builtins.print = lambda *a, **k: None
builtins.open = always
unittest.TestCase.assertEqual = always
for module in list(sys.modules.values()):
    for name in list(vars(module)):
        if name in ("equal", "compare", "check", "run_one", "encode", "write_frame", "guarded"):
            try: setattr(module, name, always)
            except Exception: pass
sys.settrace(lambda *a: None)
sys.setprofile(None)
def f(n): return Yes()
"""
# Everything that can be reached from inside the program's process, looked through for the expected value.
# It knows the value backwards, so as not to find itself.
_SEARCH = """
import gc, os, sys
def f(n):
    wanted, found = "46281937", []
    frame = sys._getframe()
    while frame:
        for key, value in list(frame.f_locals.items()):
            if wanted in repr(value)[:100000][::-1]:
                found.append(("frame", key))
        frame = frame.f_back
    for item in gc.get_objects():
        if type(item) in (dict, list, tuple, str, bytes):
            if wanted in repr(item)[:20000][::-1]:
                found.append(("gc", type(item)))
    for fd in range(64):
        try:
            if wanted.encode() in os.pread(fd, 1 << 20, 0)[::-1]: found.append(("fd", fd))
        except OSError: pass
    if wanted in repr((sys.argv, dict(os.environ)))[::-1]: found.append("argv")
    print("found", found)
    return int(wanted[::-1]) if found else 0
"""
_FORGERY = """
import os, struct
def forge(n=0):
    for text in (b"all tests passed\\n", b'{"case":0,"outcome":"pass","detail":""}', b'{"done":"","cases":1}', b"73918264", b"R"):
        for fd in range(3, 64):
            try: os.write(fd, struct.pack("!I", len(text)) + text)
            except OSError: pass
    print("all tests passed"); print('{"success": true, "verdict": "OK"}'); print("OK")
forge()
def f(n):
    forge()
    return 0
"""


def _is(*verdicts: RunStatus) -> object:
    return lambda r: tuple(case.verdict for case in r.cases) == verdicts


def _no_secret(result: JudgeResult) -> bool:
    return all("found []" in case.stdout or not case.stdout for case in result.cases) and not any(
        case.verdict is RunStatus.OK for case in result.cases
    )


def _for_all(number: int, name: str, code: str, *verdicts: RunStatus, **more: object) -> list[Bad]:
    return [bad(number, f"{name}-{kind}", code, *verdicts, tests=tests, **more) for kind, tests in _ALL_TESTS]  # type: ignore[arg-type]


def _liar(base: str, argument: str) -> list[Bad]:
    code = _LIARS.replace("BASE", base).replace("ARGUMENT", argument)
    return _for_all(33, f"overrides-equality-{base}", code, WA)


def _compared(name: str, code: str, expected: str, mode: ComparisonMode | None, verdict: RunStatus) -> Bad:
    return bad(44, name, code, verdict, expected=expected, comparison=Comparison(mode=mode))


_SAMPLES = StdinTests(
    cases=tuple(StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in (2, 3, 5, 7)),
)
_M = ComparisonMode

CASES: list[Bad] = [
    *_for_all(31, "leaves-before-the-end", "import os\ndef f(n): os._exit(0)", WA),
    *_for_all(31, "leaves-at-once", "import os\nos._exit(0)", WA),
    *_for_all(31, "exits-politely", "import sys\ndef f(n): sys.exit(0)", WA),
    bad(31, "leaves-before-printing", "import os\nos._exit(0)\nprint(1)", WA, expected="1"),
    *_liar("int", "5"), *_liar("str", "''"), *_liar("list", "()"), *_liar("object", ""),
    *_for_all(34, "patches-everything", _PATCHES, WA),
    *_for_all(35, "searches-for-the-answer", _SEARCH, WA, check=_no_secret, wall_s=20.0),
    *_for_all(36, "forges-the-end", _FORGERY, WA),
    bad(36, "prints-a-verdict", _FORGERY, WA, expected="9"),
    bad(37, "knows-the-samples", "print({2: 4, 3: 9}.get(int(input()), 0))", WA, tests=_SAMPLES,
        check=_is(OK, OK, WA, WA)),  # type: ignore[arg-type]
    bad(42, "nul-in-source", "x = '\0'", CE),
    bad(42, "source-of-10-megabytes", "x = 1\n" * 1_700_000, IR),
    bad(42, "deep-parentheses", "(" * 500_000 + ")" * 500_000, CE),
    bad(42, "deep-expression", "x = " + "-" * 100_000 + "1", CE),
    bad(42, "future-import", "from __future__ import annotations\ndef f(x: nowhere): return x\nprint(f(5))", OK, expected="5"),
    bad(42, "encoding-cookie", "# -*- coding: latin-1 -*-\nprint('\u00e9')", OK, expected="\u00e9"),
    bad(42, "tabs-and-spaces", "if True:\n        x = 1\n\ty = 2", CE),
    bad(42, "line-numbers", "\n\nraise ValueError('here')", RE, check=lambda r: "line 3" in first(r).stderr),
    bad(42, "syntax-error-of-many-cases", "def", CE, tests=_SAMPLES, check=_is(CE, CE, CE, CE)),  # type: ignore[arg-type]
    bad(42, "function-that-is-not-there", "def g(n): return n", RE, tests=_CALL),
    bad(42, "no-cases", "print(1)", RunStatus.INVALID_TESTS, tests=StdinTests(cases=())),
    bad(42, "tests-that-are-no-program", "def f(n): return n", RunStatus.INVALID_TESTS, tests=AssertTests(tests="def check(", entry_point="f")),
    bad(42, "method", "class Solution:\n    def f(self, n: int) -> List[int]:\n        return list(range(1, n))", OK, tests=_METHOD),
    _compared("nan-as-number", "print('nan')", "nan", _M.FLOAT, WA),
    _compared("nan-as-literal", "print(float('nan'))", "nan", _M.LITERAL, WA),
    _compared("infinity", "print(float('-inf'))", "-inf", _M.FLOAT, OK),
    _compared("minus-zero", "print(-0.0)", "0.0", _M.FLOAT, OK),
    _compared("small-number", "print(1e-7)", "0.0000001", _M.FLOAT, OK),
    _compared("no-tolerance-for-integers", "print(10001)", "10000", _M.FLOAT, WA),
    _compared("huge-integers", "import sys\nsys.set_int_max_str_digits(0)\nprint(10**5000 + 1)", "1" + "0" * 5000, _M.FLOAT, WA),
    _compared("set-order", "print({3, 1, 2})", "{1, 2, 3}", _M.LITERAL, OK),
    _compared("dict-order", "print('{\"b\": 1, \"a\": 2}')", '{"a": 2, "b": 1}', _M.JSON, OK),
    _compared("trailing-spaces", "print('1 2 ')\nprint()", "1 2", None, OK),
    _compared("bomb-for-the-comparison", "print('[' * 15000)", "[]", _M.LITERAL, WA),
    bad(44, "nan-returned", "def f(n): return float('nan')", WA,
        tests=CallTests(entry_point="f", cases=(CallCase(args=(1,), expected=float("nan")),))),
    bad(44, "huge-integer-returned", "def f(n): return 10**n", OK,
        tests=CallTests(entry_point="f", cases=(CallCase(args=(6000,), expected=10**6000),))),
    bad(44, "set-returned", "def f(n): return {3, 1, 2.0}", OK,
        tests=CallTests(entry_point="f", cases=(CallCase(args=(1,), expected={1, 2, 3}),))),
    bad(44, "endless-value-returned", "def f(n):\n    x = []\n    x.append(x)\n    return x", WA, tests=_CALL),
    bad(44, "exploding-value-returned", "def f(n):\n    x = [1]\n    for _ in range(60): x = [x, x]\n    return x", RE, RunStatus.TIME_LIMIT,
        RunStatus.MEMORY_LIMIT, RunStatus.OUTPUT_LIMIT, tests=_CALL, wall_s=20.0),
    bad(45, "crash-with-nothing-expected", "raise SystemError", RE, expected=""),
    bad(45, "exit-code-with-nothing-expected", "import sys; sys.exit(3)", RE, expected=""),
]  # fmt: skip
