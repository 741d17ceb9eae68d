"""Loads a model by shards: every rank reads from the checkpoint's files only the rows that it will hold.

    config -> model on the meta device, where tensors have no memory -> sharded -> memory for the own rows -> read them

So no rank ever holds a whole model, in whatever memory: the peak is its own rows and one tensor's share of them in the
type of the file. The bits are those of ``from_pretrained``. A checkpoint that needs more than reading (names that
transformers converts, quantised weights, files other than safetensors) is left to ``services.common.models``, which
loads it whole. Knows nothing about optimizers or attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from services.common.models import named_weights
from services.trainer.sharding import local_rows

log = structlog.get_logger()

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PATTERNS = ["*.safetensors", _INDEX, "config.json", "generation_config.json"]


class _NotByShardsError(Exception):
    """Why a checkpoint cannot be read by shards; never leaves this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A model without memory, and where the bytes of its weights lie."""

    causal_lm: Any
    files: Mapping[str, Path]  # by name of the weight
    buffers: Mapping[str, torch.Tensor]  # computed, not stored: rotary frequencies

    def materialize(self, root: torch.nn.Module, device: torch.device, offload: bool = False) -> int:
        """Give ``root``, which holds ``causal_lm`` and may be sharded by now, its memory and its values.

        ``offload`` leaves parameters on the host; buffers always go to ``device``. Returns the bytes read.
        """
        root.to_empty(device="cpu" if offload else device)
        self.causal_lm.tie_weights()  # the line above made two of what was one
        for name, value in self.buffers.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self.causal_lm.get_submodule(owner), own_name, value.to(device))
        return _read_rows(self.causal_lm, self.files)


def open_by_shards(path: str | Path, dtype: torch.dtype) -> MetaModel | None:
    """The model at a directory or hub name with weights in ``dtype``; None when it has to be loaded whole.

    Reads the config and the names in the files, no weights.
    """
    try:
        return _open(path, dtype)
    except _NotByShardsError as reason:
        log.info("model.loaded_whole", path=str(path), reason=str(reason))
        return None


def _open(path: str | Path, dtype: torch.dtype) -> MetaModel:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = _directory(path)
    files = _files(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise _NotByShardsError("its weights are quantised")
        with torch.device("meta"):
            causal_lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError) as error:  # loading it whole says it better
        raise _NotByShardsError(f"no model can be made from its config: {error}") from error
    shapes = {name: list(weight.shape) for name, weight in named_weights(causal_lm).items()}
    tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)} - shapes.keys()
    stored = files.keys() - tied
    if stored != shapes.keys():
        first = min(stored ^ shapes.keys())
        raise _NotByShardsError(f"{len(stored ^ shapes.keys())} names differ from the model's, such as {first}")
    buffers = _computed_buffers(causal_lm)
    try:
        causal_lm.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        pass  # not every checkpoint has one; the model's own defaults stay
    causal_lm.config.name_or_path = str(path)
    return MetaModel(causal_lm=causal_lm.eval(), files={name: files[name] for name in shapes}, buffers=buffers)


def _directory(path: str | Path) -> Path:
    """Where the files lie; a hub name is fetched, or found in the cache, once for all processes of a host."""
    if Path(path).is_dir():
        return Path(path)
    if isinstance(path, Path) or path.startswith(("/", ".", "~")):
        raise _NotByShardsError("no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=_PATTERNS))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise _NotByShardsError(f"it cannot be fetched: {error}") from error


def _files(directory: Path) -> dict[str, Path]:
    """The file of every stored tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        if (directory / _INDEX).is_file():
            index = json.loads((directory / _INDEX).read_text())
            return {name: directory / file for name, file in index["weight_map"].items()}
        with safe_open(directory / _SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), directory / _SINGLE)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _NotByShardsError(f"no safetensors: {error}") from error


def _computed_buffers(causal_lm: Any) -> dict[str, torch.Tensor]:
    """The values of buffers, by making the modules that own them a second time, small as they are, with memory."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in causal_lm.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        if own.keys() - module._non_persistent_buffers_set or any(module.parameters(recurse=False)):
            raise _NotByShardsError(f"{prefix} stores buffers")
        try:
            values = dict(type(module)(module.config).named_buffers(recurse=False))
        except (AttributeError, TypeError) as error:
            raise _NotByShardsError(f"the buffers of {prefix} cannot be computed: {error}") from error
        if {name: b.shape for name, b in values.items()} != {name: b.shape for name, b in own.items()}:
            raise _NotByShardsError(f"{prefix} computes other buffers when made again")
        found |= {f"{prefix}.{name}": value for name, value in values.items()}
    return found


def _read_rows(causal_lm: Any, files: Mapping[str, Path]) -> int:
    """Fill this rank's rows of every weight, file by file; the bytes that were read.

    Raises ``ModelMismatchError`` for a tensor of another shape, ``ConfigError`` for a file that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    from services.common.errors import ConfigError, ModelMismatchError

    weights = named_weights(causal_lm)
    num_bytes = 0
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in (name for name, of in files.items() if of == file):
                    stored = opened.get_slice(name)
                    if list(stored.get_shape()) != list(weights[name].shape):
                        raise ModelMismatchError(
                            f"{file}: weights do not fit config.json: {name} has shape {stored.get_shape()}, "
                            f"the model {list(weights[name].shape)}"
                        )
                    rows, first = local_rows(weights[name])
                    if len(rows):
                        values = stored[first : first + len(rows)]
                        num_bytes += values.numel() * values.element_size()
                        rows.copy_(values)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
    return num_bytes
