"""Reads names and places in the safetensors files of a model directory of another author, and checks each value.

Reads no weights. Every value of a header is the author's: lengths, nesting and places are bounded before they are used, and an
index names files of its own directory only. Needs neither torch nor safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000  # as safetensors allows
_BITS = {"BOOL": 8, "C64": 64, "F4": 4}  # others say their bits: F8_E4M3, BF16, U64
_AGAIN = "copy it again from where the model came from"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of a file."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object of any author. Raises ``ConfigError`` with the file and the remedy."""
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): {_AGAIN}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is no JSON object: {_AGAIN}")
    return tree


def file_of(model: str, name: str) -> Path | None:
    """A file of a model, in its directory or in the hub's cache; None where neither has it."""
    folder = Path(model)
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
        return {} if file is None else read_object(file)
    except ConfigError:
        return {}


def model_directory(path: str | Path, patterns: Sequence[str] = ("*.safetensors", INDEX)) -> Path:
    """The directory of a model; a hub name is downloaded, or found in the cache, once for all processes of a host.

    Raises:
        ConfigError: no such directory, or the hub does not give it.
    """
    if Path(path).is_dir():
        return Path(path)
    if isinstance(path, Path) or path.startswith(("/", ".", "~")):
        raise ConfigError(f"{path}: no such directory")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"{path} is no directory, and huggingface_hub, which would fetch it, is not installed"
        ) from None
    try:
        return Path(snapshot_download(path, allow_patterns=list(patterns)))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(f"{path} cannot be fetched: {error}") from error


def weight_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor by an index, or by the header of a single file.

    Raises:
        ConfigError: an index or a header is damaged, or the index names a place outside of the directory.
    """
    if not (directory / INDEX).is_file():
        return dict.fromkeys(places(directory / SINGLE), directory / SINGLE)
    named = read_object(directory / INDEX).get("weight_map")
    if not isinstance(named, dict):
        raise ConfigError(f"{directory / INDEX} has no weight_map: {_AGAIN}")
    for file in set(map(str, named.values())):
        if Path(file).name != file or file in ("", "..") or "\0" in file:
            raise ConfigError(
                f"{directory / INDEX} names the file {file[:200]!r}, and weights are files beside it: {_AGAIN}"
            )
        if not (directory / file).is_file():
            raise ConfigError(
                f"{directory / INDEX} names the file {file[:200]}, which is not there: copy the whole directory again"
            )
    return {name: directory / str(file) for name, file in named.items()}


def places(file: Path) -> dict[str, Place]:
    """The tensors of a safetensors file by name. Raises ``ConfigError`` with the file, the defect and the remedy."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        found, end = {}, 8 + length
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            found[name] = _place(file, entry, end, name)
            end = 8 + length + entry["data_offsets"][1]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): {_AGAIN}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{file} is no safetensors file, or was cut off ({str(error)[:200]}): {_AGAIN}") from None
    if size != end:
        raise ConfigError(f"{file} has {size} bytes of {end}: {_AGAIN}")
    return found


def _place(file: Path, entry: Mapping[str, Any], begin: int, name: str) -> Place:
    """A tensor whose bytes follow on those of the one before; ``ValueError`` for another."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(offsets) != 2:
        raise ValueError(f"{name[:200]} has no type, shape and two offsets")
    if any(type(value) is not int or not 0 <= value < 1 << 63 for value in (*shape, *offsets)):
        raise ValueError(f"{name[:200]} has the shape {shape} and the offsets {offsets}")
    bits = _BITS.get(dtype) or int("".join(c for c in dtype.partition("_")[0] if c.isdigit()) or 0)
    if offsets[1] - offsets[0] != -(-math.prod(shape) * bits // 8) or not bits:
        raise ValueError(f"{name[:200]} has {offsets[1] - offsets[0]} bytes for the shape {shape} of {dtype[:20]}")
    return Place(file=file, dtype=dtype, shape=tuple(shape), offset=begin)
