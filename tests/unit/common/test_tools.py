"""Tools made of functions: their schemas, and the refusals at their definition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from services.common.text.tools import ArgumentSchema
from services.common.tools import FunctionTool, ToolResult, schema_of, tool


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
