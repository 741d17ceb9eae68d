"""Exports of adapters: as a directory that PEFT loads, or merged into their base.

A checkpoint of an adapter holds two more files beside config and tokenizer: PEFT's own config, and the digests of the base.
A merge reads the base where the run read it, a tensor at a time, and refuses a base whose bits have changed. Needs neither
torch nor a GPU.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.checkpoints.files import Piece, Progress, TensorReader, read_whole
from services.common.checkpoints.manifest import DTYPES, EXPORTED, MODEL_FILES, Manifest
from services.common.checkpoints.safetensors_files import INDEX, Place, places, weight_files
from services.common.errors import ConfigError, CorruptDataError
from services.common.weights.elements import ELEMENT_TYPES, Bits, cast_bits
from services.common.weights.snapshot import PEFT_PREFIX, A, AdapterIdentity, B, algorithm_of, tensor_digest

PEFT_CONFIG = "adapter_config.json"
BASE_FILE = "base.json"  # in a checkpoint: where the base was read, its type, and the digest of each tensor
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OF_A_MODEL = frozenset({"config.json", "generation_config.json"})  # not of an adapter's directory
_KINDS = {stored: name for name, (stored, _) in DTYPES.items()}  # types by their names in safetensors


class ExportForm(enum.StrEnum):
    """The form of an exported adapter; a checkpoint of all weights has only the first."""

    MERGED = "merged"  # one model, which loads without PEFT
    ADAPTER = "adapter"


def adapter_files(
    identity: AdapterIdentity, base_path: str, dtype: str, tensors: Mapping[str, str]
) -> dict[str, bytes]:
    """The two files by name. ``tensors`` are the digests of the base's tensors in ``dtype``."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": identity.rank,
        "lora_alpha": identity.alpha,
        "target_modules": list(identity.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    base = {"path": base_path, "dtype": dtype, "digest": identity.base, "tensors": dict(tensors)}
    return {PEFT_CONFIG: json.dumps(config, indent=1).encode(), BASE_FILE: json.dumps(base, indent=1).encode()}


def is_copied(name: str, form: ExportForm) -> bool:
    """Whether a file of the checkpoint's model belongs into an export."""
    if name == BASE_FILE:
        return False
    return name not in _OF_A_MODEL if form is ExportForm.ADAPTER else name != PEFT_CONFIG


def adapter_pieces(reader: TensorReader, manifest: Manifest, progress: Progress) -> list[Piece]:
    """The adapter under PEFT's names, in the type in which it is trained."""

    def data(name: str) -> Iterator[memoryview]:
        for chunk in reader.chunks(name):
            progress(chunk.nbytes)
            yield chunk

    return [
        Piece(
            tensor=PEFT_PREFIX + name.removeprefix(EXPORTED),
            dtype=tensor.dtype,
            shape=tensor.shape,
            first=0,
            count=tensor.num_elements,
            data=partial(data, name),
        )
        for name, tensor in sorted(manifest.tensors.items())
        if name.startswith(EXPORTED)
    ]


def merged_pieces(
    reader: TensorReader, manifest: Manifest, checkpoint: Path, base: Path | None, progress: Progress
) -> list[Piece]:
    """The base's weights with the adapter in them: W + alpha / rank B A, computed in float32, in the base's type.

    ``base``: a directory to read the base from, in place of the one of the run.

    Raises:
        ConfigError: the base is not there, or is no safetensors with the names of the model.
    """
    assert manifest.adapter is not None
    noted = _noted_base(checkpoint)
    stored = _open_base(base if base is not None else _directory(noted["path"]))
    if missing := sorted(noted["tensors"].keys() - stored.keys()):
        raise ConfigError(f"the base of the adapter has no tensor {missing[0]}: name its directory with --base")
    dtype = noted["dtype"]

    def data(name: str, digest: str) -> Iterator[memoryview]:
        bits = _read(stored[name], dtype)
        found = tensor_digest(bits, algorithm_of(digest))
        if found != digest:
            raise CorruptDataError(
                f"{stored[name].file}: {name} is not the base of this adapter (digest {found}, expected {digest}): name the "
                "directory of its base with --base"
            )
        merged = _merged(bits, dtype, stored[name].shape, name, reader, manifest)
        progress(merged.nbytes)
        yield merged.view(np.uint8).data

    return [
        Piece(
            tensor=name,
            dtype=dtype,
            shape=stored[name].shape,
            first=0,
            count=math.prod(stored[name].shape),
            data=partial(data, name, digest),
        )
        for name, digest in sorted(noted["tensors"].items())
    ]


def _merged(
    bits: Bits, dtype: str, shape: tuple[int, ...], name: str, reader: TensorReader, manifest: Manifest
) -> Bits:
    factors = [f"{EXPORTED}{name.removesuffix('weight')}{factor}" for factor in (A, B)]
    if not name.endswith(".weight") or factors[0] not in manifest.tensors:
        return bits
    assert manifest.adapter is not None
    low, high = (_factor(reader, factor) for factor in factors)
    weight = cast_bits(bits, dtype, "float32").view(np.float32).reshape(shape)
    whole = weight + np.float32(manifest.adapter.scale) * (high @ low)
    return np.ascontiguousarray(cast_bits(whole.reshape(-1).view(np.uint32), "float32", dtype))


def _factor(reader: TensorReader, name: str) -> npt.NDArray[np.float32]:
    tensor = reader.tensor(name)
    bits = np.empty(tensor.num_elements, ELEMENT_TYPES[tensor.dtype].bits_dtype)
    reader.read(name, 0, bits.view(np.uint8).data)
    return cast_bits(bits, tensor.dtype, "float32").view(np.float32).reshape(tensor.shape)


def _read(place: Place, dtype: str) -> Bits:
    """The flat bits of a tensor, cast."""
    stored = _KINDS[place.dtype]
    number = math.prod(place.shape)
    return cast_bits(
        np.fromfile(place.file, ELEMENT_TYPES[stored].bits_dtype, number, offset=place.offset), stored, dtype
    )


def _open_base(directory: Path) -> dict[str, Place]:
    """The tensors of the safetensors files of a model. Reads headers only."""
    try:
        found = {name: place for file in set(weight_files(directory).values()) for name, place in places(file).items()}
        if unknown := sorted({place.dtype for place in found.values()} - _KINDS.keys()):
            raise ConfigError(f"{directory} has tensors of the type {unknown[0]}, which cannot be merged")
    except ConfigError as error:
        raise ConfigError(
            f"the base of the adapter cannot be read as safetensors: {error.message}; or name its directory with --base, "
            "or export with --adapter and merge with PEFT"
        ) from None
    return found


def _noted_base(checkpoint: Path) -> dict[str, Any]:
    try:
        noted: dict[str, Any] = json.loads(read_whole(checkpoint / MODEL_FILES / BASE_FILE))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{checkpoint}: {BASE_FILE} cannot be read: {error}") from None
    return noted


def _directory(path: str) -> Path:
    """The directory of the base; a hub name is downloaded, or found in the cache."""
    if Path(path).is_dir():
        return Path(path)
    gone = f"the base of the adapter, {path}, is not there: name its directory with --base, or export with --adapter"
    if path.startswith(("/", ".", "~")):
        raise ConfigError(gone)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"{gone} (huggingface_hub, which would fetch it, is not installed)") from None
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", INDEX]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(f"{gone} ({error})") from error
