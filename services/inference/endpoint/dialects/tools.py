"""Validates the tools of a request, and converts them into the form that chat templates list: OpenAI's chat functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_DEPTH = 32


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as templates list it. Fields that are None are left out."""
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Raise ``ValueError`` for a tool that is no function, has no name, twice the same, or an invalid schema."""
    names = set()
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise ValueError(
                f"tool {i} is of type {tool.get('type')!r}; only functions can be called here: turn this tool off in the "
                "agent"
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool {i} has no name")
        if name in names:
            raise ValueError(f"two tools have the name {name!r}")
        names.add(name)
        if (schema := function.get("parameters")) is not None:
            check_schema(schema, f"the parameters of {name!r}", 0)
            if isinstance(schema, Mapping) and schema and schema.get("type", "object") != "object":
                raise ValueError(f"the parameters of {name!r} are of type {schema['type']!r}; must be 'object'")
    return tools


Tools = Annotated[list[dict[str, Any]] | None, AfterValidator(check_tools)]


def check_schema(schema: Any, where: str, depth: int) -> None:
    """Raise ``ValueError`` for what is no JSON Schema. Keywords that are not known are left to the agent."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} are no JSON Schema but {type(schema).__name__}; write an object")
    if depth > _DEPTH:
        raise ValueError(f"{where} are nested more than {_DEPTH} deep")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ValueError(f"{where} have the type {kind!r}; there is {', '.join(sorted(_TYPES))}")
    properties = {} if schema.get("properties") is None else schema["properties"]
    if not isinstance(properties, Mapping):
        raise ValueError(f"{where}.properties must be an object, not {type(properties).__name__}")
    required = [] if schema.get("required") is None else schema["required"]
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{where}.required must be a list of names")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise ValueError(f"{where}.enum must be a list of values")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}", depth + 1)
    if isinstance(items := schema.get("items"), Mapping):
        check_schema(items, f"{where}.items", depth + 1)
    for keyword in ("anyOf", "allOf", "oneOf"):
        options = schema.get(keyword, [])
        if not isinstance(options, list):
            raise ValueError(f"{where}.{keyword} must be a list of schemas")
        for i, inner in enumerate(options):
            check_schema(inner, f"{where}.{keyword}[{i}]", depth + 1)
