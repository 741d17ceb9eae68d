"""Test code that is run in the process of the program, because its text does not give calls and values.

The verdict can be forged by the program, and is marked as opaque (``JudgeResult.opaque``).
"""

from __future__ import annotations

import ast
import json
from typing import Any

from services.common.text.programs import called_in, completed, is_test_case, is_test_function, names_of, parsed
from services.envgateway.judge.records import AssertTests

_MOST_LIMITS = 20  # the tests may take this many times the limit of one case


def payload_of(tests: AssertTests, nonce: str) -> bytes:
    """The harness's input (``bare.harness``). Raises ``UnusableTestsError``."""
    meant = names_of(tests.tests, tests.entry_point, tests.preamble, tests.names)
    payload: dict[str, Any] = {
        "tests": _with_calls(tests.tests),
        "preamble": completed(tests.preamble),
        "entry_point": meant.entry_point,
        "remote": sorted(meant.remote),
        "supplied": meant.supplied,
        "prelude": meant.has_prelude,
        "nonce": nonce,
    }
    return json.dumps(payload).encode()


def longest(tests: AssertTests, limits: dict[str, float | int], judging_time_s: float) -> dict[str, float | int]:
    """Limits of the tests: the times of a case for each assert, up to ``_MOST_LIMITS``."""
    num_asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(parsed(tests.tests)))
    factor = max(1, min(num_asserts, _MOST_LIMITS))
    times = {name: min(limits[name] * factor, max(judging_time_s, limits[name])) for name in ("wall_s", "cpu_s")}
    return {**limits, **times}


def _with_calls(text: str) -> str:
    """The tests as a script: with the calls of ``check``, test functions and test classes that they leave to a runner.

    >>> print(_with_calls("def test_it():\\n    assert f(1) == 1"))
    def test_it():
        assert f(1) == 1
    test_it()
    """
    parts, body = [text], parsed(text).body
    called = set().union(*map(called_in, body))
    for node in body:
        match node:
            case ast.FunctionDef(name="check", args=ast.arguments(args=[_, *_])) if "check" not in called:
                parts.append("check(candidate)")
            case ast.FunctionDef(name=name) if is_test_function(node) and name not in called:
                parts.append(f"{name}()")
            case ast.ClassDef(name=name) if is_test_case(node):
                parts.append(_RUN_CLASS.format(name))
    return "\n".join(parts)


_RUN_CLASS = """\
__suite__ = __import__("unittest").defaultTestLoader.loadTestsFromTestCase({0})
__result__ = __import__("unittest").TestResult()
__suite__.run(__result__)
assert __result__.wasSuccessful(), (__result__.errors + __result__.failures)[0][1]
"""
