"""Formats pydantic's errors: path, error, and the setting to write instead."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Tag, ValidationError

Location = Sequence[str | int]

# Settings of other systems -> ours, where the names are not alike.
_FOREIGN = {
    "batch_size": "policies.<name>.batch.size", "train_batch_size": "policies.<name>.batch.size",
    "per_device_train_batch_size": "policies.<name>.batch.size", "ppo_mini_batch_size": "policies.<name>.batch.minibatches",
    "learning_rate": "policies.<name>.optimizer.lr", "model_name": "policies.<name>.model.path",
    "model_path": "policies.<name>.model.path", "model_name_or_path": "policies.<name>.model.path",
    "num_generations": "rollout.group_size", "rollout_n": "rollout.group_size", "group_size": "rollout.group_size",
    "max_tokens": "sampling.max_new_tokens", "max_completion_length": "sampling.max_new_tokens",
    "max_length": "policies.<name>.model.context_length", "max_seq_length": "policies.<name>.model.context_length",
    "max_steps": "run.steps", "num_steps": "run.steps", "total_training_steps": "run.steps", "epochs": "run.steps",
    "num_train_epochs": "run.steps", "output_dir": "run.dir", "dataset": "data.train.path", "train_file": "data.train.path",
    "reward_fn": "workflow.settings.reward", "reward_funcs": "workflow.settings.reward", "reward": "workflow.settings.reward",
    "kl_coef": "policies.<name>.algorithm.kl_coefficient", "beta": "policies.<name>.algorithm.kl_coefficient", "loss": "policies.<name>.algorithm.name",
    "eval_steps": "evaluation.every", "save_steps": "policies.<name>.trainer.checkpoint_every",
    "num_workers": "inference.<name>.num_slots",
}  # fmt: skip
_MOST_PLACES = 3  # that a message lists


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per problem, with the path as the recipe writes it."""
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
        section, given = _section_at(root, location), problem.get("input")
        if section is not None and "path" in section.model_fields and isinstance(given, str):
            message += f", such as {{path: {given}}}"
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
    """The error for a key that its section does not have: a key of another member of a union, or of none."""
    members = _members(_annotation_at(root, location[:-1])) if location else {}
    if owners := [name for name, member in members.items() if key in member.model_fields]:
        *others, last = owners
        have = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        return f"{key} is no setting of {location[-1]}; {have} it"
    section = _section_at(root, location)
    if section is None:
        return "unknown key"
    known = list(section.model_fields)
    if places := _places_of(key, root):
        return f"unknown key; {key} is written as {' or '.join(places)}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return "unknown key; " + (f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(known)}")


def _places_of(key: str, root: type[BaseModel]) -> list[str]:
    """Paths of a recipe at which a setting of this name is, or its equal of another system; empty where it is unknown, or
    too common to point at."""
    places = list(_places(root))
    if key in _FOREIGN and any(f"{_FOREIGN[key]}.".startswith(f"{path}.") for path in places):
        return [_FOREIGN[key]]
    found = [path for path in places if path.rpartition(".")[2] == key]
    return found if len(found) <= _MOST_PLACES else []


def _places(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every setting and section below a section by its path; names of the user's are ``<name>``."""
    for name, field in section.model_fields.items():
        path, inner = f"{above}{name}", _inner(field.annotation)
        if typing.get_origin(inner) is dict:
            path, inner = f"{path}.<name>", _inner(typing.get_args(inner)[1])
        members = [inner] if isinstance(inner, type) else list(_members(inner).values())
        sections = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
        yield f"{above}{name}"
        yield from dict.fromkeys(place for member in sections for place in _places(member, f"{path}."))


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
    """The type at a path of pydantic; None for a path without a type."""
    section: Any = root
    for part in location:
        if isinstance(section, type) and issubclass(section, BaseModel):
            field = section.model_fields.get(str(part))
            section = _inner(field.annotation) if field else None
        elif typing.get_origin(section) is dict:
            section = _inner(typing.get_args(section)[1])
        elif typing.get_origin(section) is list:
            section = _inner(typing.get_args(section)[0])
        else:
            section = _tagged(section).get(str(part))
    return section


def _written(root: type[BaseModel], location: Location) -> list[str]:
    """The path as a recipe has it: pydantic's has the tag of a union's member too."""
    return [str(part) for i, part in enumerate(location) if not _tagged(_annotation_at(root, location[:i]))]


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """Tag -> class of the sections in a union of sections; empty for anything else."""
    return {tag: member for tag, member in _tagged(annotation).items() if isinstance(member, type)}


def _tagged(annotation: Any) -> dict[str, Any]:
    """Tag -> type of the members of a union; empty for anything else."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return {}
    tagged = [typing.get_args(member) for member in typing.get_args(annotation)]
    return {tag.tag: member for member, *marks in filter(None, tagged) for tag in marks if isinstance(tag, Tag)}


def _inner(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and not _tagged(annotation):
        return next((a for a in typing.get_args(annotation) if a is not type(None)), None)
    return annotation
