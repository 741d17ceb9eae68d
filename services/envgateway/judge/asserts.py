"""Judges the value of a call that was read from assert-style tests (``services.common.text.asserted_calls``)."""

from __future__ import annotations

import math
from typing import Any

from services.common.text.asserted_calls import AssertedCall, Relation, asserted_calls
from services.envgateway.judge.records import AssertTests
from services.envgateway.judge.values import ValueRule, distance, equal, shown, truth

_STRICT = ValueRule(strict=True)


def read(tests: AssertTests) -> tuple[AssertedCall, ...] | None:
    """The calls, or None for opaque tests. Raises ``UnusableTestsError``."""
    return asserted_calls(tests.tests, tests.entry_point, tests.preamble, tests.names)


def failure(call: AssertedCall, actual: Any) -> str:
    """Why a returned value is wrong; empty when the value is right."""
    match call.relation:
        case Relation.EQUAL:
            right = equal(call.expected, actual, _STRICT)
        case Relation.IN:
            right = any(equal(expected, actual, _STRICT) for expected in call.expected[1:])
        case Relation.IDENTICAL:
            right = call.expected is actual
        case Relation.TRUE:
            right = truth(actual) is True
        case Relation.FALSE:
            right = truth(actual) is False
        case Relation.NEAR:
            apart = distance(call.expected, actual)
            right = apart is not None and apart < call.tolerance
        case Relation.CLOSE:
            right = equal(call.expected, actual, _STRICT) or _is_close(call, actual)
    if right:
        return ""
    wanted = shown(call.expected) if call.relation not in (Relation.TRUE, Relation.FALSE) else call.relation.value
    return f"expected {wanted}, got {shown(actual)}"


def _is_close(call: AssertedCall, actual: Any) -> bool:
    apart, sizes = distance(call.expected, actual), (distance(0, call.expected), distance(0, actual))
    if apart is None or None in sizes or math.inf in sizes:
        return False
    return apart <= max(call.relative * max(size for size in sizes if size is not None), call.tolerance)
