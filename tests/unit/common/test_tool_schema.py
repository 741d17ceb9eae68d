"""Arguments against a schema: the error is worded so that a model can correct the call."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.text.tools import ArgumentSchema
from services.common.tools import FunctionTool, ToolResult, schema_of, tool

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
CHECKED = ArgumentSchema(SCHEMA)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"code": "1"}, None),
        ({"code": "1", "times": 2, "scale": 0.5, "mode": 1, "kind": "a", "flag": True}, None),
        ({"code": "1", "points": [{"x": 1}, {"x": 0.5}], "free": {"any": [1]}, "maybe": None}, None),
        ({"code": "1", "either": ["a"], "maybe": "ab"}, None),
        ([], "the arguments: [] is not of type 'object'"),
        ({"Code": "1"}, "argument 'code' is missing; did you mean it by 'Code'?"),
        ({"code": "1", "extra": 1}, "unknown argument 'extra'; there is 'code', 'times'"),
        ({"code": "123456"}, "argument 'code': '123456' is too long"),
        ({"code": "1", "times": 0}, "argument 'times': 0 is less than the minimum of 1"),
        ({"code": "1", "times": 1.0}, "argument 'times': 1.0 is not of type 'integer'"),
        ({"code": "1", "times": True}, "argument 'times': True is not of type 'integer'"),
        ({"code": "1", "mode": True}, "argument 'mode': True is not one of ['fast', 'slow', 1]"),
        ({"code": "1", "points": [{"x": 1}, {"x": "2"}]}, "argument 'points[1].x': '2' is not of type 'number'"),
        ({"code": "1", "points": [{}]}, "in points[0]: argument 'x' is missing"),
        ({"code": "1", "points": [{"x": 1, "y": 2}]}, "in points[0]: unknown argument 'y'; there is 'x'"),
        ({"code": "1", "maybe": "b"}, "argument 'maybe': 'b' does not match '^a'"),
        ({"code": "1", "either": [1]}, "argument 'either[0]': 1 is not of type 'string'"),
        ({"code": "1", "mode": "x" * 10_000}, "argument 'mode': 'xxx"),
        ({"code": "1", "y" * 10_000: 1}, "unknown argument 'yyy"),
    ],
)
def test_the_worst_problem_is_named_in_short(arguments: Any, problem: str | None) -> None:
    found = CHECKED.problem_with(arguments)
    if problem is None:
        assert found is None
    else:
        assert found is not None and found.startswith(problem) and len(found) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "x"]), JSON))
def test_any_json_is_judged_and_what_passes_has_its_types(arguments: dict[str, Any]) -> None:
    if CHECKED.problem_with(arguments) is None:
        assert isinstance(arguments["code"], str) and 1 <= len(arguments["code"]) <= 5
        assert type(arguments.get("times", 1)) is int
        assert set(arguments) <= set(SCHEMA["properties"])


def described(**code: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"code": {"type": "string", **code}}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (None, "must be a JSON Schema of `type: object`"),
        ({"type": "text"}, "must be a JSON Schema of `type: object`"),
        ({"type": "object", "required": ["a"]}, "names 'a'"),
        (described(pattern=r"(?<=a)b"), r"parameters\.code\.pattern .*linear time"),
        (described(pattern=r"(a)\1"), "linear time"),
        (described(type="str"), r"parameters\.properties\.code\.type: 'str'"),
        (described(pattern="["), "is not a 'regex'"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}, "#/\\$defs/A, which it does not have"),
        (
            {"type": "object", "properties": {"a": {"$ref": "https://x.org/a.json"}}},
            "only references inside the schema",
        ),
        ({"type": "object", "$ref": "#"}, "refers to itself without end"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_with_its_place(schema: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ArgumentSchema(schema)


def test_a_pattern_that_repeats_a_repetition_is_checked_in_linear_time() -> None:
    schema = ArgumentSchema(described(pattern=r"^(\w+\s?)+$"))
    began = time.process_time()
    assert schema.problem_with({"code": "a" * 32_000}) is None
    assert schema.problem_with({"code": "a" * 32_000 + "!"}) is not None
    assert schema.problem_with({"code": "\ud800"}) is not None
    assert time.process_time() - began < 1.0  # for ever, with backtracking


def test_an_open_schema_takes_what_it_does_not_name_and_follows_its_references() -> None:
    parts = {"text": {"$ref": "#/$defs/Text"}, "n": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}
    text = {"type": "string", "maxLength": 3, "pattern": "(?=a)"}
    schema = {"type": "object", "properties": parts, "required": ["text"], "$defs": {"Text": text}}
    checked = ArgumentSchema(schema, "inputSchema", is_closed=False)
    assert checked.problem_with({"text": "abc", "n": None, "more": 1}) is None
    for wrong in ({"text": "abcd"}, {"text": "b"}, {"text": "abc", "n": "1"}, {}):
        assert checked.problem_with(wrong)


# --- tools made of functions


@tool
def book(
    city: Annotated[str, "where to"], nights: int = 1, kind: Literal["single", "double"] = "single",
    extras: list[str] | None = None, prices: dict[str, float] | None = None, gateway: Any = None,
) -> str:  # fmt: skip
    """Book a room
    in a city."""
    return f"{kind} in {city}, {nights}, {extras}, {prices}, {gateway}"


def test_the_schema_is_that_of_the_function_without_the_gateway() -> None:
    function = schema_of(book)["function"]
    assert (function["name"], function["description"]) == ("book", "Book a room in a city.")
    parameters = function["parameters"]
    assert list(parameters["properties"]) == ["city", "nights", "kind", "extras", "prices"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "where to"}
    assert parameters["properties"]["kind"] == {"enum": ["single", "double"]}
    assert parameters["required"] == ["city"]


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"city": "Ulm"}, True),
        ({"city": "Ulm", "extras": ["bath"], "prices": {"bath": 2.5}, "kind": "double"}, True),
        ({"city": "Ulm", "extras": None}, True),
        ({"city": "Ulm", "extras": [1]}, False),
        ({"city": "Ulm", "kind": "triple"}, False),
        ({"city": 3}, False),
        ({}, False),
        ({"city": "Ulm", "gateway": "x"}, False),
    ],
)
def test_arguments_are_checked_against_it(arguments: dict[str, Any], fits: bool) -> None:
    assert (ArgumentSchema(book.parameters).problem_with(arguments) is None) == fits


async def test_a_call_passes_arguments_and_the_gateway_on() -> None:
    assert book.call({"city": "Ulm", "nights": 2}, gateway="G") == "single in Ulm, 2, None, None, G"
    assert book("Ulm") == "single in Ulm, 1, None, None, None", "the function itself stays callable"

    @tool(name="shout", timeout_s=1.5)
    async def loud(text: str) -> ToolResult:
        """Say it loudly."""
        return ToolResult(text=text.upper(), status="too_loud")

    assert isinstance(loud, FunctionTool) and (loud.name, loud.timeout_s) == ("shout", 1.5)
    assert await loud.call({"text": "a"}) == ToolResult(text="A", status="too_loud")


def no_docstring(text: str) -> str:
    return text


def no_type(text) -> str:  # type: ignore[no-untyped-def]
    """Says it."""
    return str(text)


def odd_type(text: set[str]) -> str:
    """Says it."""
    return str(text)


def any_number(*texts: str) -> str:
    """Says them."""
    return " ".join(texts)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (no_docstring, "the tool no_docstring has no docstring"),
        (no_type, "the parameter text of the tool no_type needs a name and a type: write `text: str`"),
        (odd_type, "has no JSON schema here: write one of str"),
        (any_number, r"the parameter \*texts.* needs a name and a type"),
    ],
)
def test_a_function_that_makes_no_tool_is_refused_with_its_line(function: Any, told: str) -> None:
    with pytest.raises(TypeError, match=rf"^{__file__}:{function.__code__.co_firstlineno}: .*{told}"):
        tool(function)
