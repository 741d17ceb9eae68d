"""Loads a model by shards: every rank reads only its own rows from the checkpoint's files.

    config -> model on the meta device, where tensors have no memory -> sharded -> memory for the own rows -> read them

So no rank ever holds a whole model: the peak is the rank's rows and one tensor's share of them in the type of the file.
The result has the same bits as ``from_pretrained``. ``services.common.text.huggingface`` loads all other checkpoints whole:
names that transformers converts in other ways, quantised weights, files other than safetensors.

Checkpoints store the matrices of each expert, transformers computes with one tensor of all experts:

    experts.E.gate_proj, experts.E.up_proj  [wide, hidden]   ->   experts.gate_up_proj[E]  [2 wide, hidden]
    experts.E.down_proj                     [hidden, wide]   ->   experts.down_proj[E]     [hidden, wide]

A rank holds some experts whole (sharding cuts along the first dimension), so it reads their matrices and no others. Which
names belong together is transformers' own table; conversions of any other kind are left to loading the whole model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from services.common.errors import ConfigError, ModelMismatchError
from services.common.lora import base_weights
from services.common.safetensors_files import INDEX, SINGLE, places, weight_files
from services.common.system.memory import available_bytes
from services.common.text.huggingface import named_weights
from services.trainer.ranks.sharding import local_rows

log = structlog.get_logger()

_GIB = 1 << 30
_PATTERNS = ["*.safetensors", INDEX, "config.json", "generation_config.json"]

Sources = tuple[str, ...]  # stored matrices of one expert, in the order of their rows

# By name, in order: stack the experts; stack them, then put matrices below each other within each expert.
_SUPPORTED: tuple[tuple[tuple[str, int], ...], ...] = (
    (("MergeModulelist", 0),),
    (("MergeModulelist", 0), ("Concatenate", 1)),
)


def merged_experts(
    model_type: str, shapes: Mapping[str, Sequence[int]], stored: Collection[str]
) -> dict[str, list[Sources]]:
    """The stored matrices of every expert, by the weight that merges them; weights that are stored as they are left out.

    ``shapes`` are those of the model's weights by name, ``stored`` the names in the checkpoint.
    """
    found: dict[str, list[Sources]] = {}
    for patterns, target in _mergers(model_type):
        for name in shapes:
            if name in stored or not name.endswith(target):
                continue
            prefix = name.removesuffix(target)
            experts = [
                tuple(prefix + pattern.replace("*", str(expert)) for pattern in patterns)
                for expert in range(shapes[name][0])
            ]
            if all(source in stored for sources in experts for source in sources):
                found[name] = experts
    return found


def _mergers(model_type: str) -> list[tuple[list[str], str]]:
    """(patterns of stored names, ending of the merged name) of the supported conversions of a kind of model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = []
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        operations: Any = getattr(conversion, "operations", None) or ()
        kinds = tuple(
            (type(operation).__name__, operation.dim) for operation in operations if hasattr(operation, "dim")
        )
        patterns, targets = conversion.source_patterns, conversion.target_patterns
        plain = all(pattern.count("*") == 1 for pattern in patterns) and len(targets) == 1
        if plain and len(kinds) == len(operations) and kinds in _SUPPORTED:
            found.append((list(patterns), str(targets[0])))
    return found


class _NotByShardsError(Exception):
    """A checkpoint cannot be read by shards. Internal to this module."""

    def __init__(self, reason: str, num_parameters: int = 0) -> None:
        super().__init__(reason)
        self.num_parameters = num_parameters  # 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A model on the meta device, and the files of its weights."""

    causal_lm: Any
    files: Mapping[str, Path]  # by name of the stored tensor
    experts: Mapping[str, list[Sources]]  # by name of a merged weight: the stored matrices of each expert
    buffers: Mapping[str, torch.Tensor]  # computed, not stored: rotary frequencies

    def materialize(self, root: torch.nn.Module, device: torch.device, offload: bool = False) -> int:
        """Allocate and fill ``root``, which holds ``causal_lm`` and may be sharded.

        ``offload`` leaves parameters on the host; buffers always go to ``device``. Returns the bytes read.
        """
        root.to_empty(device="cpu" if offload else device)
        self.causal_lm.tie_weights()  # the line above separated tied weights
        for name, value in self.buffers.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self.causal_lm.get_submodule(owner), own_name, value.to(device))
        return _read_rows(self.causal_lm, self.files, self.experts)


def open_by_shards(path: str | Path, dtype: torch.dtype) -> MetaModel | None:
    """Open the model at a directory or hub name with weights in ``dtype``; None when the model must be loaded whole.

    Reads the config and the names in the files, no weights.

    Raises ``ConfigError`` when it must be loaded whole, and the host lacks the memory for the copies of its ranks.
    """
    try:
        return _open(path, dtype)
    except _NotByShardsError as reason:
        _require_memory(path, reason, dtype)
        log.info("model.loaded_whole", path=str(path), reason=str(reason))
        return None


def _require_memory(path: str | Path, reason: _NotByShardsError, dtype: torch.dtype) -> None:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, available = reason.num_parameters * dtype.itemsize * ranks_here, available_bytes()
    if needed > available:
        raise ConfigError(
            f"{path} must be loaded whole by each rank, because {reason}: {ranks_here} ranks on this host need "
            f"{needed / _GIB:.1f} GiB of its memory, and {available / _GIB:.1f} are free. Use fewer ranks on each node, "
            "trainer.master_dtype: bfloat16, or a checkpoint with the names that transformers computes with"
        )


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
    except _NotByShardsError:
        raise
    except Exception as error:  # code of any architecture with numbers of any author; loading it whole tells the remedy
        raise _NotByShardsError(f"no model can be made from its config: {error}") from error
    shapes = {name: list(weight.shape) for name, weight in named_weights(causal_lm).items()}
    tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)} - shapes.keys()
    stored = files.keys() - tied
    experts = merged_experts(config.model_type, shapes, stored)
    expected = (shapes.keys() - experts.keys()) | {name for each in experts.values() for own in each for name in own}
    if stored != expected:
        first = min(stored ^ expected)
        raise _NotByShardsError(
            f"{len(stored ^ expected)} names differ from the model's, such as {first}",
            sum(math.prod(shape) for shape in shapes.values()),
        )
    for file in sorted(set(files.values())):  # before memory of these sizes is taken
        for name, place in places(file).items():
            if name not in experts and list(place.shape) != shapes.get(name, list(place.shape)):
                _refuse_shape(file, name, place.shape, shapes[name])
    buffers = _computed_buffers(causal_lm)
    try:
        causal_lm.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        pass  # some checkpoints have none: keep the model's defaults
    causal_lm.config.name_or_path = str(path)
    return MetaModel(
        causal_lm=causal_lm.eval(), files={name: files[name] for name in expected}, experts=experts, buffers=buffers
    )


def _directory(path: str | Path) -> Path:
    """The directory of the files. A hub name is downloaded, or found in the cache, once for all processes of a host."""
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
    """The file of every stored tensor. Raises ``ConfigError`` for damaged files."""
    if not any((directory / name).is_file() for name in (INDEX, SINGLE)):
        raise _NotByShardsError("no safetensors")
    return weight_files(directory)


def _computed_buffers(causal_lm: Any) -> dict[str, torch.Tensor]:
    """The values of buffers, from a second copy of their modules with memory. These modules are small."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in causal_lm.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        if own.keys() - module._non_persistent_buffers_set or any(True for _ in module.parameters(recurse=False)):
            raise _NotByShardsError(f"{prefix} stores buffers")
        try:
            values = dict(type(module)(module.config).named_buffers(recurse=False))
        except (AttributeError, TypeError) as error:
            raise _NotByShardsError(f"the buffers of {prefix} cannot be computed: {error}") from error
        if {name: b.shape for name, b in values.items()} != {name: b.shape for name, b in own.items()}:
            raise _NotByShardsError(f"{prefix} computes other buffers when made again")
        found |= {f"{prefix}.{name}": value for name, value in values.items()}
    return found


def _refuse_shape(file: Path, name: str, stored: Sequence[int], shape: list[int]) -> None:
    raise ModelMismatchError(
        f"{file}: weights do not fit config.json: {name} has shape {list(stored)}, the model {shape}"
    )


def _read_rows(causal_lm: Any, files: Mapping[str, Path], experts: Mapping[str, list[Sources]]) -> int:
    """Fill this rank's rows of every weight but an adapter's, file by file; returns the number of bytes read.

    Raises ``ModelMismatchError`` for a tensor of another shape, ``ConfigError`` for an unreadable file.
    """
    from safetensors import SafetensorError, safe_open

    targets: dict[str, torch.Tensor] = {}  # by name of the stored tensor: the memory of the rows that this rank reads
    firsts: dict[str, int] = {}  # and where they begin in the stored tensor
    shapes: dict[str, list[int]] = {}  # of the whole stored tensor
    for name, weight in base_weights(causal_lm).items():
        rows, first = local_rows(weight)
        if name not in experts:
            targets[name], firsts[name], shapes[name] = rows, first, list(weight.shape)
            continue
        for expert, matrix in enumerate(rows, start=first):
            sources = experts[name][expert]
            for source, part in zip(sources, matrix.chunk(len(sources)), strict=True):
                targets[source], firsts[source], shapes[source] = part, 0, list(part.shape)
    num_bytes = 0
    for file in sorted({files[name] for name in targets}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in (name for name in targets if files[name] == file):
                    stored, rows, first = opened.get_slice(name), targets[name], firsts[name]
                    if list(stored.get_shape()) != shapes[name]:
                        _refuse_shape(file, name, stored.get_shape(), shapes[name])
                    if len(rows):
                        values = stored[first : first + len(rows)]
                        num_bytes += values.numel() * values.element_size()
                        rows.copy_(values)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
    return num_bytes
