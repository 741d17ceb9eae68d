"""Checks the JSON schemas of MCP tools, and arguments against them, by the rules of JSON Schema 2020-12.

A reference may point inside the schema only: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

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
