"""Turns pydantic's errors into lines a person can act on: path, what is wrong, what to write instead."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per problem, with the path as it is written in the recipe."""
    return [_line(dict(problem), root) for problem in error.errors()]


def _line(problem: dict[str, Any], root: type[BaseModel]) -> str:
    location = tuple(problem["loc"])
    path = ".".join(str(part) for part in location)
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_nearest(str(location[-1]), _section_at(root, location[:-1]))}"
    if kind == "missing":
        return f"{path}: missing; {_describe(root, location)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        message = "Write keys and values below it"
    if not location:
        return message
    if kind == "value_error":
        return f"{path}: {message}"
    message = message.replace("Input should be", "it should be").partition(", unable to parse")[0]
    return f"{path}: {_shown(problem.get('input'))} is not valid: {message[0].lower()}{message[1:]}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(key: str, section: type[BaseModel] | None) -> str:
    if section is None:
        return ""
    known = list(section.model_fields)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; write one of {', '.join(known)}"


def _describe(root: type[BaseModel], location: tuple[str | int, ...]) -> str:
    section = _section_at(root, location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    text = " ".join((field.description or "").split()) if field else ""
    return f"write it: {text}" if text else "it must be written"


def _section_at(root: type[BaseModel], location: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The section that a path leads to, walking through optional sections and mappings of sections."""
    section: Any = root
    for part in location:
        if isinstance(section, type) and issubclass(section, BaseModel):
            field = section.model_fields.get(str(part))
            section = _inner(field.annotation) if field else None
        elif typing.get_origin(section) is dict:
            section = _inner(typing.get_args(section)[1])
        else:
            return None
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _inner(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((a for a in typing.get_args(annotation) if a is not type(None)), None)
    return annotation
