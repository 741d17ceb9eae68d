"""Finds missing, broken and truncated files in a local model directory, without loading the model.

Reads names, ``config.json`` and the headers of safetensors files, so a model of any size is looked through at once.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from services.common.config.recipe import Recipe
from services.common.text.huggingface import vocabulary_difference

_LENGTH = struct.Struct("<Q")  # of the header, before it
_HEADER_BYTES = 100_000_000  # safetensors refuses longer ones


def model_problems(recipe: Recipe) -> list[str]:
    """A line for each model directory that cannot be used; names of a hub are taken as they are."""
    problems = []
    for name, policy in recipe.policies.items():
        named = {f"policies.{name}.model.path": policy.model.path}
        of_teacher, teacher = _teacher(recipe, name)
        named |= {of_teacher: teacher} if of_teacher else {}
        folders = {
            where: Path(path).expanduser() for where, path in named.items() if path is not None and _is_local(path)
        }
        found = [
            f"{where}: {problem}"
            for where, folder in folders.items()
            if (problem := _problem(folder)) is not None
            and not (where == of_teacher and name in recipe.teachers)  # reported as a policy of its own
        ]
        if not found and len(folders) == 2:
            own, other = folders.values()
            found = _other_vocabulary(own, other, of_teacher)
        problems += found
    return problems


def _teacher(recipe: Recipe, policy: str) -> tuple[str, str | None]:
    """The key that names a policy's teacher, empty without one, and where the teacher's model is."""
    distillation = recipe.policies[policy].algorithm.distillation
    where = f"policies.{policy}.algorithm.distillation"
    if policy in recipe.teachers:
        return f"{where}.teacher", recipe.policies[recipe.teachers[policy]].model.path
    if distillation is not None and distillation.teacher_model is not None:
        return f"{where}.teacher_model", distillation.teacher_model
    return "", None


def _is_local(path: str) -> bool:
    return Path(path).expanduser().is_dir() or path.startswith(("/", ".", "~"))


def _other_vocabulary(own: Path, teacher: Path, where: str) -> list[str]:
    vocabularies = [_vocabulary(folder) for folder in (own, teacher)]
    if vocabularies[0] is None or vocabularies[1] is None:
        return []  # the trainer compares what it loads
    difference = vocabulary_difference(vocabularies[0], vocabularies[1])
    return [] if difference is None else [f"{where}: vocabulary does not match {own}: {difference}"]


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id by ``tokenizer.json``; None where there is none, or of a kind that lists its tokens in another way."""
    try:
        tree = json.loads((folder / "tokenizer.json").read_bytes())
        return {**tree["model"]["vocab"], **{token["content"]: token["id"] for token in tree["added_tokens"]}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _problem(folder: Path) -> str | None:
    if not folder.is_dir():
        return (
            f"{folder} is no directory, so it holds no config.json; write a Hugging Face model directory or a hub name"
        )
    for needed in ("config.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            return f"{folder} holds no {needed}; write a Hugging Face model directory or a hub name"
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        return f"{folder / 'config.json'} cannot be read ({error}): copy it again from where the model came from"
    if not isinstance(config, dict):
        return f"{folder / 'config.json'} is no JSON object: copy it again from where the model came from"
    tensors = sorted(folder.glob("*.safetensors"))
    if not tensors and (pickled := sorted(folder.glob("*.bin"))):
        return (
            f"{folder} holds pickled weights only ({pickled[0].name}), which are not read: convert them to safetensors"
        )
    if not tensors:
        return f"{folder} holds no weights (*.safetensors): copy the whole model directory"
    for file in tensors:
        if (broken := _broken(file)) is not None:
            return f"{file} {broken}: copy it again from where the model came from"
    return None


def _broken(file: Path) -> str | None:
    """The defect of a safetensors file, from its header and its size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            if length > min(size, _HEADER_BYTES):
                return f"is no safetensors file, or was cut off ({size} bytes)"
            header = json.loads(opened.read(length))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "is no safetensors file, or was cut off"
    expected = _LENGTH.size + length + max(ends, default=0)
    if size != expected:
        return f"has {size} bytes of {expected}"
    return None
