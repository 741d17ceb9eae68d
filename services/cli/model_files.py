"""What is wrong with a local model directory, seen without loading it: missing, broken and cut-off files.

Reads names, ``config.json`` and the headers of safetensors files, so a model of any size is looked through at once.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from services.common.config.recipe import Recipe

_LENGTH = struct.Struct("<Q")  # of the header, before it
_HEADER_BYTES = 100_000_000  # safetensors refuses longer ones


def model_problems(recipe: Recipe) -> list[str]:
    """A line for each policy whose model directory cannot be used; names of a hub are taken as they are."""
    problems = []
    for name, policy in recipe.policies.items():
        path = policy.model.path
        if path is None:
            continue
        folder = Path(path).expanduser()
        if not folder.is_dir() and not path.startswith(("/", ".", "~")):
            continue  # a hub name
        if (problem := _problem(folder)) is not None:
            problems.append(f"policies.{name}.model.path: {problem}")
    return problems


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
    if not tensors and not any(folder.glob("*.bin")):
        return f"{folder} holds no weights (*.safetensors): copy the whole model directory"
    for file in tensors:
        if (broken := _broken(file)) is not None:
            return f"{file} {broken}: copy it again from where the model came from"
    return None


def _broken(file: Path) -> str | None:
    """What is wrong with a safetensors file, by its header and its size."""
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
