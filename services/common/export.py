"""Exports a checkpoint as a directory that transformers loads: config, tokenizer and safetensors; an adapter also for PEFT.

    verify the files that are needed -> copy config and tokenizer -> weights, cast chunk by chunk, into shards -> rename

The export concatenates the parts of all ranks by copying bytes, with a few chunks in memory for a model of any size. Needs
neither torch nor a GPU, nor any process of the run. A value head is not exported.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from services.common.checkpoints import (
    DTYPES,
    EXPORTED,
    MANIFEST,
    MODEL_FILES,
    Manifest,
    Piece,
    Progress,
    StoredTensor,
    TensorReader,
    digest_of,
    find_damage,
    read_manifest,
    read_whole,
    write_bytes,
    write_safetensors,
)
from services.common.errors import ConfigError, CorruptDataError, in_buckets
from services.common.safetensors_files import INDEX, Place, model_directory, places, weight_files
from services.common.system.machine import complete_directory, sync_directory
from services.common.weights.snapshot import (
    ELEMENT_TYPES,
    PEFT_PREFIX,
    A,
    AdapterIdentity,
    B,
    Bits,
    algorithm_of,
    cast_bits,
    tensor_digest,
)

NOTE = "rollmill_export.json"  # in the directory: of which run, step and checkpoint it is
SHARD_BYTES = 4 << 30
PEFT_CONFIG = "adapter_config.json"
BASE_FILE = "base.json"  # in a checkpoint: where the base was read, its type, and the digest of each tensor
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OF_A_MODEL = frozenset({"config.json", "generation_config.json"})  # not of an adapter's directory
_KINDS = {stored: name for name, (stored, _) in DTYPES.items()}  # types by their names in safetensors


class ExportForm(enum.StrEnum):
    """The form of an exported adapter; a checkpoint of all weights has only the first."""

    MERGED = "merged"  # one model, which loads without PEFT
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The content of an export, from its note."""

    directory: Path
    run_id: str
    policy: str
    training_step: int
    checkpoint_digest: str
    dtype: str
    num_tensors: int
    size_bytes: int  # of the weights

    def note(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "directory"}


def work_bytes(manifest: Manifest) -> int:
    """The bytes that the progress of ``export_checkpoint`` counts up to."""
    return sum(f.size_bytes for f in manifest.files_for_export()) + sum(t.size_bytes for _, t in _exported(manifest))


def export_checkpoint(
    path: Path,
    target: Path,
    progress: Progress = lambda _: None,
    *,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
    form: ExportForm = ExportForm.MERGED,
    base: Path | None = None,
) -> Exported:
    """Write the model of a checkpoint into ``target``, which appears when complete and replaces an earlier export.

    ``replace``: replaces any other content, too. ``base``: where the base of an adapter lies now.

    Weights are cast to the type in the checkpoint's config: the one in which the run publishes them; of an adapter's base,
    the one in which the run computes. An exported adapter keeps its own type.

    Raises:
        CorruptDataError: a file that the export reads is damaged, or the base is another. Optimizer state may be damaged.
        ConfigError: ``target`` has other content than an export, the checkpoint has no config, there is no adapter or its
            base is not there.
        OSError: the write failed.
    """
    manifest = read_manifest(path)
    exported = _exported(manifest)
    if not replace:
        check_target(target)
    if damage := find_damage(path, manifest.files_for_export(), progress):
        raise CorruptDataError(f"{path} cannot be exported: {damage}")
    if form is ExportForm.ADAPTER and manifest.adapter is None:
        raise ConfigError(f"{path} holds all weights and no adapter: leave --adapter out")
    dtype = _dtype(path)
    with complete_directory(target) as beside:
        _copy_model_files(path, manifest, beside, form)
        with TensorReader(path, manifest) as reader:
            if manifest.adapter is not None and form is ExportForm.MERGED:
                pieces = merged_pieces(reader, manifest, path, base, progress)
            elif manifest.adapter is not None:  # in the type in which it is trained
                pieces = [
                    _piece(reader, name, tensor, tensor.dtype, progress, PEFT_PREFIX) for name, tensor in exported
                ]
            else:
                pieces = [_piece(reader, name, tensor, dtype, progress) for name, tensor in exported]
            size = _write_weights(pieces, beside, shard_bytes, form)
        result = Exported(
            directory=target,
            run_id=manifest.run_id,
            policy=manifest.policy,
            training_step=manifest.training_step,
            checkpoint_digest=digest_of(read_whole(path / MANIFEST)),
            dtype=pieces[0].dtype if pieces else dtype,
            num_tensors=len(pieces),
            size_bytes=size,
        )
        write_bytes(beside / NOTE, NOTE, json.dumps(result.note(), indent=1).encode())
    return result


def check_target(target: Path) -> None:
    """Raise ``ConfigError`` where an export would replace anything but an export."""
    if target.is_dir() and (not any(target.iterdir()) or (target / NOTE).is_file()):
        return
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists and is no export: name another directory with -o, or remove it")


def _exported(manifest: Manifest) -> list[tuple[str, StoredTensor]]:
    """The model's own weights, by name in the checkpoint, in order of name."""
    return sorted((name, tensor) for name, tensor in manifest.tensors.items() if name.startswith(EXPORTED))


def _dtype(path: Path) -> str:
    try:
        config = json.loads(read_whole(path / MODEL_FILES / "config.json"))
        dtype = str(config.get("dtype", "float32"))
    except (CorruptDataError, AttributeError, ValueError):
        raise ConfigError(f"{path} holds no config of its model, so that no program could load an export") from None
    if dtype not in ELEMENT_TYPES or not ELEMENT_TYPES[dtype].is_float:
        raise ConfigError(f"{path}: config.json has dtype {dtype!r}, to which weights cannot be cast")
    return dtype


def _copy_model_files(path: Path, manifest: Manifest, target: Path, form: ExportForm) -> None:
    left_out = {BASE_FILE, *(_OF_A_MODEL if form is ExportForm.ADAPTER else (PEFT_CONFIG,))}
    for file in manifest.files:
        if file.name.startswith(MODEL_FILES) and file.name.removeprefix(MODEL_FILES) not in left_out:
            place = target / file.name.removeprefix(MODEL_FILES)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, place.name, read_whole(path / file.name))
            sync_directory(place.parent)


def _write_weights(pieces: list[Piece], target: Path, shard_bytes: int, form: ExportForm) -> int:
    """Write the shards, and the index if there are several; returns their bytes of weights."""
    if form is ExportForm.ADAPTER:
        write_safetensors(target / ADAPTER_WEIGHTS, ADAPTER_WEIGHTS, pieces, {"format": "pt"})
        return sum(piece.size_bytes for piece in pieces)
    shards = list(in_buckets(pieces, lambda piece: piece.size_bytes, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        one = len(shards) == 1
        name = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(target / name, name, shard, {"format": "pt"})
        weight_map |= {piece.tensor: name for piece in shard}
    size = sum(piece.size_bytes for piece in pieces)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_bytes(target / INDEX, INDEX, orjson.dumps(index, option=orjson.OPT_INDENT_2))
    return size


def _piece(
    reader: TensorReader, name: str, tensor: StoredTensor, dtype: str, progress: Progress, prefix: str = ""
) -> Piece:
    """A stored tensor under its name in the export; floats are cast to ``dtype``."""
    kind = ELEMENT_TYPES.get(tensor.dtype)
    target = dtype if kind is not None and kind.is_float else tensor.dtype
    return Piece(
        tensor=prefix + name.removeprefix(EXPORTED),
        dtype=target,
        shape=tensor.shape,
        first=0,
        count=tensor.num_elements,
        data=partial(_cast, reader, name, tensor.dtype, target, progress),
    )


def _cast(reader: TensorReader, name: str, source: str, target: str, progress: Progress) -> Iterator[memoryview]:
    for chunk in reader.chunks(name):
        progress(chunk.nbytes)
        if source == target:
            yield chunk
        else:
            bits = np.frombuffer(chunk, ELEMENT_TYPES[source].bits_dtype)
            yield np.ascontiguousarray(cast_bits(bits, source, target)).view(np.uint8).data


# -- adapters -----------------------------------------------------------------------------------------------------------
#
# A checkpoint of an adapter holds two more files beside config and tokenizer: PEFT's own config, and the digests of the base.
# A merge reads the base where the run read it, a tensor at a time, and refuses a base whose bits have changed.


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
    try:
        directory = base if base is not None else model_directory(noted["path"])
    except ConfigError as error:
        raise ConfigError(
            f"the base of the adapter is not there ({error.message}): name its directory with --base, or export with --adapter"
        ) from None
    stored = _open_base(directory)
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
