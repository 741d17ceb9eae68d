"""Turns pydantic's errors into lines a person can act on: path, what is wrong, what to write instead."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Tag, ValidationError

Location = Sequence[str | int]


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per problem, with the path as it is written in the recipe."""
    return [_line(dict(problem), root) for problem in error.errors()]


def _line(problem: dict[str, Any], root: type[BaseModel]) -> str:
    location = tuple(problem["loc"])
    path = ".".join(_written(root, location))
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{path}: {_unknown(str(location[-1]), root, location[:-1])}"
    if kind == "union_tag_invalid":
        return f"{path}.name: {problem['ctx']['tag']!r} is not valid: it should be {problem['ctx']['expected_tags']}"
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


def _unknown(key: str, root: type[BaseModel], location: Location) -> str:
    """What is wrong with a key that its section does not have: it is of another member of a union, or of none."""
    members = _members(_annotation_at(root, location[:-1])) if location else {}
    if owners := [name for name, member in members.items() if key in member.model_fields]:
        *others, last = owners
        have = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        return f"{key} is no setting of {location[-1]}; {have} it"
    section = _section_at(root, location)
    if section is None:
        return "unknown key"
    known = list(section.model_fields)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return "unknown key; " + (f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(known)}")


def _describe(root: type[BaseModel], location: tuple[str | int, ...]) -> str:
    section = _section_at(root, location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    text = " ".join((field.description or "").split()) if field else ""
    return f"write it: {text}" if text else "it must be written"


def _section_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The section that a path leads to, walking through optional sections, mappings and unions of sections."""
    section = _annotation_at(root, location)
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _annotation_at(root: type[BaseModel], location: Location) -> Any:
    """The type that a path of pydantic leads to; None where it leads nowhere."""
    section: Any = root
    for part in location:
        if isinstance(section, type) and issubclass(section, BaseModel):
            field = section.model_fields.get(str(part))
            section = _inner(field.annotation) if field else None
        elif typing.get_origin(section) is dict:
            section = _inner(typing.get_args(section)[1])
        else:
            section = _members(section).get(str(part))
    return section


def _written(root: type[BaseModel], location: Location) -> list[str]:
    """The path as a recipe has it: pydantic's has the tag of a union's member too."""
    return [str(part) for i, part in enumerate(location) if not _members(_annotation_at(root, location[:i]))]


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """Tag -> class of a union of sections; empty for anything else."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return {}
    tagged = [typing.get_args(member) for member in typing.get_args(annotation)]
    return {tag.tag: member for member, *marks in filter(None, tagged) for tag in marks if isinstance(tag, Tag)}


def _inner(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and not _members(annotation):
        return next((a for a in typing.get_args(annotation) if a is not type(None)), None)
    return annotation
