"""Conditions on the answer of a case, in a form that another process can carry out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.text.asserted_calls import AssertedCall, Relation
from services.envgateway.judge.compare import NO_TREE, ValueRule, difference, distance, equal, shown, truth
from services.envgateway.judge.records import Comparison, ComparisonMode
from services.envgateway.sandbox.bare import plain

_STRICT = ValueRule(strict=True)


@dataclass(frozen=True, slots=True)
class TextCheck:
    """The printed text is the expected one."""

    expected: str
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """The returned value, a tree, is the expected one, or one of ``also``."""

    expected: Any
    rule: ValueRule
    also: Sequence[Any] = ()

    def failure(self, actual: Any) -> str:
        if any(equal(expected, actual, self.rule) for expected in (self.expected, *self.also)):
            return ""
        return f"expected {shown(self.expected)}, got {shown(actual)}"


Check = TextCheck | ValueCheck | AssertedCall


def failure(check: Check, answer: bytes) -> str:
    """The fault of an answer; empty for a right one."""
    if isinstance(check, TextCheck):
        return difference(check.expected, answer, check.comparison)
    try:
        value = plain.parse(answer)
        return asserted_failure(check, value) if isinstance(check, AssertedCall) else check.failure(value)
    except NO_TREE as error:
        return f"the returned value is no data: {error!r}"


def asserted_failure(call: AssertedCall, actual: Any) -> str:
    """Why a returned value is wrong; empty when the value is right."""
    match call.relation:
        case Relation.EQUAL:
            right = equal(call.expected, actual, _STRICT)
        case Relation.IN:
            right = any(equal(expected, actual, _STRICT) for expected in call.expected[1:])
        case Relation.IDENTICAL:
            right = call.expected is actual
        case Relation.TRUE | Relation.FALSE:
            right = truth(actual) is (call.relation is Relation.TRUE)
        case Relation.NEAR:
            apart = distance(call.expected, actual)
            is_decimal = isinstance(actual, list) and actual[0] == "D"  # no float is subtracted from it
            right = apart is not None and apart < call.tolerance and not (is_decimal and type(call.expected) is not int)
        case Relation.CLOSE:
            right = _is_close(call, actual)
    if right:
        return ""
    wanted = shown(call.expected) if call.relation not in (Relation.TRUE, Relation.FALSE) else call.relation.value
    return f"expected {wanted}, got {shown(actual)}"


def _is_close(call: AssertedCall, actual: Any) -> bool:
    apart, sizes = distance(call.expected, actual), (distance(0, call.expected), distance(0, actual))
    if apart is None or None in sizes or math.inf in sizes:
        return apart is not None and None not in sizes and equal(call.expected, actual, _STRICT)
    return apart <= max(call.relative * max(size for size in sizes if size is not None), call.tolerance)


def packed(check: Check) -> bytes:
    if isinstance(check, AssertedCall):
        check = dataclasses.replace(check, args=None, kwargs=None)
    fields = {field.name: getattr(check, field.name) for field in dataclasses.fields(check)}
    return json.dumps([type(check).__name__, fields], default=dataclasses.asdict).encode()


def unpacked(data: bytes) -> Check:
    name, fields = json.loads(data)
    if name == TextCheck.__name__:
        mode, tolerance = fields["comparison"]["mode"], fields["comparison"]["tolerance"]
        return TextCheck(fields["expected"], Comparison(mode=mode and ComparisonMode(mode), tolerance=tolerance))
    if name == ValueCheck.__name__:
        return ValueCheck(fields["expected"], ValueRule(**fields["rule"]), fields["also"])
    return AssertedCall(**fields | {"relation": Relation(fields["relation"])})
