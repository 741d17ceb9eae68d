"""Reads facts of a model from its files: positions and chat template. Looks in the model's directory, or in the hub's cache.

Reads no weights and does not fetch files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # in the names of architectures
_MOST_HEADER_BYTES = 100_000_000  # as safetensors allows
_STRETCHED = ("yarn", "linear", "dynamic")  # kinds of rope scaling whose positions config.json does not count


def file_of(model: str, name: str) -> Path | None:
    """A file of a model, in its directory or in the hub's cache; None where neither has it."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if not model or model.startswith(("/", ".", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:  # a machine that only submits runs may not have the package
        return None
    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def config_of(model: str) -> Mapping[str, Any]:
    """The model's ``config.json``; empty where there is none, or none that can be read."""
    file = file_of(model, "config.json")
    try:
        tree = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def positions(model: str) -> int | None:
    """The longest sequence of a model by its ``config.json``, rope scaling included; None where it does not say."""
    config = config_of(model)
    text = config.get("text_config")  # of models that also see
    for section in (config, text if isinstance(text, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "n_ctx"):
            found = section.get(key)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return int(found * _stretched_by(section))
    return None


def _stretched_by(section: Mapping[str, Any]) -> float:
    for key in ("rope_scaling", "rope_parameters"):
        scaling = section.get(key)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in _STRETCHED:
            factor = scaling.get("factor", 1.0)
            if scaling.get("original_max_position_embeddings") not in (None, section.get("max_position_embeddings")):
                return 1.0  # they are counted
            return float(factor) if isinstance(factor, int | float) and factor > 1 else 1.0
    return 1.0


def weight_names(model: str) -> frozenset[str]:
    """Names of a model's weights, from the index or the header of its safetensors; empty where neither can be read."""
    index, whole = file_of(model, "model.safetensors.index.json"), file_of(model, "model.safetensors")
    try:
        if index is not None:
            names = json.loads(index.read_bytes())["weight_map"]
        elif whole is not None:
            with whole.open("rb") as file:
                names = json.loads(file.read(_header_bytes(file)))
        else:
            return frozenset()
        return frozenset(name for name in names if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def _header_bytes(file: BinaryIO) -> int:
    """The length of a safetensors header, which comes first; ``ValueError`` for one that cannot be."""
    length = int.from_bytes(file.read(8), "little")
    if length > _MOST_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    return length


def other_architecture(model: str) -> str | None:
    """The architecture of a model that does not generate text, by its ``config.json``; None of one that does, or is unknown."""
    named = config_of(model).get("architectures")
    found = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if not found or any(part in name for name in found for part in _GENERATING):
        return None
    return found[0]


def lacks_chat_template(model: str) -> bool:
    """Whether the files of a model's tokenizer are here and hold no chat template."""
    config = file_of(model, "tokenizer_config.json")
    if config is None or not any(file_of(model, name) for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return False  # it is fetched later, or another check tells what is missing
    if file_of(model, "chat_template.jinja") or file_of(model, "chat_template.json"):
        return False
    try:
        tree = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return False
    return not (isinstance(tree, dict) and tree.get("chat_template"))
