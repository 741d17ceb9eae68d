"""Arguments against a schema: the error is worded so that a model can correct the call."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.text.tools import check_schema, problem_with

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "minLength": 1, "maxLength": 5},
        "times": {"type": "integer", "minimum": 1, "maximum": 3},
        "scale": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "mode": {"enum": ["fast", "slow", 1]},
        "kind": {"const": "a"},
        "flag": {"type": "boolean"},
        "points": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        },
        "free": {"type": "object", "additionalProperties": True},
        "maybe": {"type": ["string", "null"], "pattern": "^a"},
        "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    },
    "required": ["code"],
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"code": "1"}, None),
        ({"code": "1", "times": 2, "scale": 0.5, "mode": 1, "kind": "a", "flag": True}, None),
        ({"code": "1", "points": [{"x": 1}, {"x": 0.5}], "free": {"any": [1]}, "maybe": None}, None),
        ({"code": "1", "either": ["a"], "maybe": "ab"}, None),
        ([], "the arguments must be an object, not a list"),
        ({}, "argument 'code' is missing"),
        ({"Code": "1"}, "argument 'code' is missing; did you mean it by 'Code'?"),
        ({"code": "1", "extra": 1}, "unknown argument 'extra'; there is 'code', 'times'"),
        ({"code": ""}, "argument 'code' must have at least 1 characters, not 0"),
        ({"code": "123456"}, "argument 'code' must have at most 5 characters, not 6"),
        ({"code": 12}, "argument 'code' must be a string, not 12"),
        ({"code": None}, "argument 'code' must be a string, not null"),
        ({"code": "1", "times": 0}, "argument 'times' must be at least 1, not 0"),
        ({"code": "1", "times": 9}, "argument 'times' must be at most 3, not 9"),
        ({"code": "1", "times": 1.5}, "argument 'times' must be an integer, not 1.5"),
        ({"code": "1", "times": True}, "argument 'times' must be an integer, not true"),
        ({"code": "1", "times": "2"}, "argument 'times' must be an integer, not \"2\""),
        ({"code": "1", "scale": 0}, "argument 'scale' must be above 0, not 0"),
        ({"code": "1", "scale": 1.0}, "argument 'scale' must be below 1, not 1.0"),
        ({"code": "1", "scale": float("nan")}, "argument 'scale' must be a number, not NaN"),
        ({"code": "1", "mode": "medium"}, 'argument \'mode\' must be "fast" or "slow" or 1, not "medium"'),
        ({"code": "1", "mode": True}, "argument 'mode' must be"),
        ({"code": "1", "kind": "b"}, 'argument \'kind\' must be "a", not "b"'),
        ({"code": "1", "flag": 1}, "argument 'flag' must be true or false, not 1"),
        ({"code": "1", "points": []}, "argument 'points' must have at least 1 items, not 0"),
        ({"code": "1", "points": [{"x": 1}, {"x": "2"}]}, "argument 'points[1].x' must be a number, not \"2\""),
        ({"code": "1", "points": [{}]}, "argument 'points[0].x' is missing"),
        ({"code": "1", "points": [{"x": 1, "y": 2}]}, "unknown argument 'points[0].y'; there is 'x'"),
        ({"code": "1", "maybe": "b"}, "argument 'maybe' must match ^a, unlike \"b\""),
        ({"code": "1", "maybe": 1}, "argument 'maybe' must be a string or null, not 1"),
        ({"code": "1", "either": [1]}, "argument 'either' must be a string, not a list"),
    ],
)
def test_the_first_problem_is_named(arguments: Any, problem: str | None) -> None:
    found = problem_with(arguments, SCHEMA)
    if problem is None:
        assert found is None
    else:
        assert found is not None and found.startswith(problem)


def test_a_long_value_is_not_repeated_whole() -> None:
    assert len(problem_with({"code": "1", "mode": "x" * 10_000}, SCHEMA) or "") < 200
    assert len(problem_with({"code": "1", "y" * 10_000: 1}, SCHEMA) or "") < 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "x"]), JSON))
def test_any_json_is_judged_and_what_passes_has_its_types(arguments: dict[str, Any]) -> None:
    if problem_with(arguments, SCHEMA) is None:
        assert isinstance(arguments["code"], str) and 1 <= len(arguments["code"]) <= 5
        assert type(arguments.get("times", 1)) is int
        assert set(arguments) <= set(SCHEMA["properties"])


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (None, "must be an object"),
        ({"type": "text"}, "type is 'text'"),
        ({"type": "object", "required": ["a"]}, "names 'a'"),
        ({"type": "object", "properties": {"a": {"multipleOf": 2}}}, "parameters.a.multipleOf is not checked"),
        ({"type": "array", "items": {"oneOf": []}}, r"parameters.items.oneOf is not checked"),
        ({"additionalProperties": {"type": "string"}}, "must be true or false"),
        ({"anyOf": [{"type": "str"}]}, r"anyOf\[0\].type"),
    ],
)
def test_a_schema_with_unchecked_parts_is_refused(schema: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_schema(schema)
    check_schema(SCHEMA)


@pytest.mark.parametrize("pattern", [r"(?<=a)b", r"(a)\1", r"a(?!b)", "["])
def test_a_pattern_without_a_linear_engine_is_refused_with_its_place(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"parameters\.code\.pattern .*linear time"):
        check_schema({"type": "object", "properties": {"code": {"type": "string", "pattern": pattern}}})


def test_a_pattern_that_repeats_a_repetition_is_checked_in_linear_time() -> None:
    schema = {"type": "string", "pattern": r"^(\w+\s?)+$"}
    began = time.process_time()
    assert problem_with("a" * 32_000, schema) is None
    assert problem_with("a" * 32_000 + "!", schema) is not None
    assert problem_with("\ud800", schema) is not None
    assert time.process_time() - began < 1.0  # for ever, with backtracking
