"""Checks the JSON schemas of MCP tools, and arguments against them, by the rules of JSON Schema 2020-12.

A reference may point inside the schema only: nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from mcp.types import CallToolResult
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from services.common.text.tool_calls import ToolStatus, cut_text
from services.common.tools import ToolResult

_MAX_SHOWN_CHARS = 200


class ArgumentSchema:
    """The schema of one tool's arguments, known to be valid."""

    def __init__(self, schema: Any) -> None:
        """Raises ``ValueError`` with the part that is wrong."""
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise ValueError(f"inputSchema must be a JSON Schema of `type: object`, not {str(schema)[:60]}")
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"{_place('inputSchema', error)}: {error.message[:_MAX_SHOWN_CHARS]}") from None
        except RecursionError:
            raise ValueError("inputSchema is nested too deeply") from None
        _check_references(schema)
        # An empty registry, without a way to retrieve: a reference to an address would be fetched otherwise.
        self._validator = Draft202012Validator(schema, registry=Registry())
        try:
            self.problem_with({})
        except RecursionError:
            raise ValueError("inputSchema refers to itself without end") from None

    def problem_with(self, arguments: Mapping[str, Any]) -> str | None:
        """The error in the arguments of a call, in words for the policy; None when they match."""
        error = best_match(self._validator.iter_errors(arguments))
        return None if error is None else f"{_place('argument', error)}: {error.message[:_MAX_SHOWN_CHARS]}"


def _check_references(schema: Mapping[str, Any]) -> None:
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(
                f"inputSchema refers to {reference!r}: only references inside the schema (#/...) are followed"
            )
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(f"inputSchema refers to {reference}, which it does not have") from None


def _references(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            if key in ("$ref", "$dynamicRef"):
                yield value
            else:
                yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def _place(root: str, error: ValidationError | SchemaError) -> str:
    inside = ".".join(map(str, error.absolute_path))
    return f"{root} {inside}" if inside else {"argument": "the arguments"}.get(root, root)


_NO_TEXT = "(no output)"


def tool_result(result: CallToolResult, max_chars: int) -> ToolResult:
    """Text blocks one below the other; another block is named with its kind and size; structured content alone is shown as
    JSON. ``is_error`` is the tool's own failure, which the policy is told."""
    text = "\n".join(part for part in map(_shown, result.content) if part)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    text = bounded(text or _NO_TEXT, max_chars)
    if result.is_error:
        return ToolResult(text=f"Error: {text}", status=ToolStatus.TOOL_ERROR)
    return ToolResult(text=text)


def bounded(text: str, max_chars: int) -> str:
    """At most ``max_chars`` characters; the end of a text that is cut says so.

    >>> bounded("0123456789" * 20, 70)
    '0123456789012345678 ...(cut)...  (200 characters, cut to 70)'
    """
    if len(text) <= max_chars:
        return text
    told = f" ({len(text)} characters, cut to {max_chars})"
    return cut_text(text, max(max_chars - len(told), 16), "end") + told


def _shown(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"({block.type} {block.mime_type}, {len(block.data) * 3 // 4} bytes, not shown)"
        case "resource":
            resource = block.resource
            return str(getattr(resource, "text", f"(resource {resource.uri}, not shown)"))
        case _:
            return f"({block.type} {getattr(block, 'uri', '')}, not shown)"
