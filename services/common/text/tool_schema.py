"""Checking a tool call's arguments against the tool's JSON schema, in words from which a model can correct itself.

A part of JSON Schema: ``type``, ``properties``, ``required``, ``additionalProperties`` (true or false; false when left
out), ``items``, ``enum``, ``const``, ``anyOf``, ``pattern`` and the bounds of numbers, texts and lists. A schema that
uses another keyword is refused at the registration of its tool, so that each keyword is checked.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from services.common.text.encodable import encodable

_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "format"}
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("a string", (str,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
    "null": ("null", (type(None),)),
}
_BOUNDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "minimum": ((int, float), "must be at least {}"),
    "maximum": ((int, float), "must be at most {}"),
    "exclusiveMinimum": ((int, float), "must be above {}"),
    "exclusiveMaximum": ((int, float), "must be below {}"),
    "minLength": (str, "must have at least {} characters"),
    "maxLength": (str, "must have at most {} characters"),
    "minItems": (list, "must have at least {} items"),
    "maxItems": (list, "must have at most {} items"),
}
_KNOWN = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
    "pattern",
    *_BOUNDS,
}
_MAX_SHOWN_CHARS = 60
_MAX_REASON_CHARS = 120


def check_schema(schema: Any, where: str = "parameters") -> None:
    """Raise ``ValueError`` for parts of a schema that are not checked or make no sense."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} must be an object of JSON Schema, not {schema!r}")
    for keyword in schema:
        if keyword not in _KNOWN | _ANNOTATIONS:
            raise ValueError(f"{where}.{keyword} is not checked here; there is {', '.join(sorted(_KNOWN))}")
    for name in _types(schema):
        if name not in _TYPES:
            raise ValueError(f"{where}.type is {name!r}; there is {', '.join(_TYPES)}")
    if "additionalProperties" in schema and not isinstance(schema["additionalProperties"], bool):
        raise ValueError(f"{where}.additionalProperties must be true or false")
    if "pattern" in schema:
        _pattern(str(schema["pattern"]), where)
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in properties:
            raise ValueError(f"{where}.required names {name!r}, which is none of its properties")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}")
    if "items" in schema:
        check_schema(schema["items"], f"{where}.items")
    for index, inner in enumerate(schema.get("anyOf", ())):
        check_schema(inner, f"{where}.anyOf[{index}]")


@functools.lru_cache(maxsize=1024)
def _pattern(pattern: str, where: str = "pattern") -> SchemaValidator:
    """Raises ``ValueError`` for a pattern that the engine, whose time is linear in the text, does not take."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        why = " ".join(str(error).split())[-_MAX_REASON_CHARS:]
        raise ValueError(
            f"{where}.pattern {pattern!r} cannot be checked in linear time: write it without look-around, references "
            f"to groups and other features that Rust's regex lacks ({why})"
        ) from None


def problem_with(arguments: Any, schema: Mapping[str, Any]) -> str | None:
    """The error in the arguments of a call, or None.

    >>> schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    >>> problem_with({"cod": "1"}, schema)
    "argument 'code' is missing; did you mean it by 'cod'?"
    >>> problem_with({"code": 1}, schema)
    "argument 'code' must be a string, not 1"
    """
    return _problem(arguments, schema, "")


def _problem(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    name = f"argument {path!r}" if path else "the arguments"
    kinds = _types(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{name} must be {_joined(_TYPES[kind][0] for kind in kinds)}, not {_shown(value)}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{name} must be {_shown(schema['const'])}, not {_shown(value)}"
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        return f"{name} must be {_joined(_shown(allowed) for allowed in schema['enum'])}, not {_shown(value)}"
    if isinstance(value, str) and "pattern" in schema and not _pattern(schema["pattern"]).isinstance_python(value):
        return f"{name} must match {schema['pattern']}, unlike {_shown(value)}"
    if "anyOf" in schema:
        problems = [_problem(value, option, path) for option in schema["anyOf"]]
        if all(problems):
            return str(problems[0])
    return _out_of_bounds(value, schema, name) or _inside(value, schema, path)


def _out_of_bounds(value: Any, schema: Mapping[str, Any], name: str) -> str | None:
    for keyword, (kinds, told) in _BOUNDS.items():
        if keyword not in schema or not isinstance(value, kinds) or isinstance(value, bool):
            continue
        bound = schema[keyword]
        size = value if isinstance(value, (int, float)) else len(value)  # type: ignore[arg-type]
        fine = {"m": size >= bound, "M": size <= bound, "e": size > bound, "E": size < bound}
        which = {"minimum": "m", "maximum": "M", "exclusiveMinimum": "e", "exclusiveMaximum": "E"}.get(
            keyword, "m" if keyword.startswith("min") else "M"
        )
        if not fine[which]:
            has = _shown(value) if size is value else f"{size}"
            return f"{name} {told.format(bound)}, not {has}"
    return None


def _inside(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            problem = _problem(item, schema["items"], f"{path}[{index}]")
            if problem is not None:
                return problem
    if not isinstance(value, Mapping) or ("properties" not in schema and "object" not in _types(schema)):
        return None
    properties: Mapping[str, Any] = schema.get("properties", {})
    unknown = [name for name in value if name not in properties and not schema.get("additionalProperties", False)]
    for name in schema.get("required", ()):
        if name not in value:
            alike = difflib.get_close_matches(name, unknown, n=1)
            hint = f"; did you mean it by {alike[0]!r}?" if alike else ""
            return f"argument {_below(path, name)!r} is missing{hint}"
    if unknown:
        known = ", ".join(repr(name) for name in properties) or "none"
        return f"unknown argument {_below(path, unknown[0][:_MAX_SHOWN_CHARS])!r}; there is {known}"
    for name, inner in properties.items():
        if name in value:
            problem = _problem(value[name], inner, _below(path, name))
            if problem is not None:
                return problem
    return None


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):
        return False  # JSON has no such number; Python's reader lets them in
    return isinstance(value, _TYPES[kind][1])


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(encodable(value), ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _joined(options: Iterable[str]) -> str:
    return " or ".join(options)
