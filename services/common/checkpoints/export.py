"""Exports a checkpoint as a Hugging Face directory: config, tokenizer and safetensors that transformers loads.

    verify the files that are needed -> copy config and tokenizer -> weights, cast chunk by chunk, into shards -> rename

The export concatenates the parts of all ranks by copying bytes, with a few chunks in memory for a model of any size. Needs
neither torch nor a GPU, nor any process of the run. A value head is not exported.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from services.common.buckets import in_buckets
from services.common.checkpoints.adapters import (
    ADAPTER_WEIGHTS,
    ExportForm,
    adapter_pieces,
    is_copied,
    merged_pieces,
)
from services.common.checkpoints.directory import find_damage, read_manifest
from services.common.checkpoints.files import (
    Piece,
    Progress,
    TensorReader,
    read_whole,
    write_bytes,
    write_safetensors,
)
from services.common.checkpoints.manifest import (
    EXPORTED,
    MANIFEST,
    MODEL_FILES,
    Manifest,
    StoredTensor,
    digest_of,
)
from services.common.errors import ConfigError, CorruptDataError
from services.common.system.disk import sync_directory
from services.common.weights.elements import ELEMENT_TYPES, cast_bits

NOTE = "rollmill_export.json"  # in the directory: of which run, step and checkpoint it is
SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


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
    if not replace:
        check_target(target)
    if damage := find_damage(path, manifest.files_for_export(), progress):
        raise CorruptDataError(f"{path} cannot be exported: {damage}")
    if form is ExportForm.ADAPTER and manifest.adapter is None:
        raise ConfigError(f"{path} holds all weights and no adapter: leave --adapter out")
    dtype = _dtype(path)
    beside = target.with_name(f"{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _copy_model_files(path, manifest, beside, form)
        with TensorReader(path, manifest) as reader:
            pieces = _pieces(reader, path, manifest, dtype, progress, form, base)
            size = _write_weights(pieces, beside, shard_bytes, form)
        exported = Exported(
            directory=target,
            run_id=manifest.run_id,
            policy=manifest.policy,
            training_step=manifest.training_step,
            checkpoint_digest=digest_of(read_whole(path / MANIFEST)),
            dtype=pieces[0].dtype if pieces else dtype,
            num_tensors=len(pieces),
            size_bytes=size,
        )
        write_bytes(beside / NOTE, NOTE, json.dumps(exported.note(), indent=1).encode())
        sync_directory(beside)
        if target.exists():
            shutil.rmtree(target)
        os.rename(beside, target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return exported


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
    for file in manifest.files:
        if file.name.startswith(MODEL_FILES) and is_copied(file.name.removeprefix(MODEL_FILES), form):
            place = target / file.name.removeprefix(MODEL_FILES)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, place.name, read_whole(path / file.name))
            sync_directory(place.parent)


def _pieces(
    reader: TensorReader, path: Path, manifest: Manifest, dtype: str, progress: Progress, form: ExportForm,
    base: Path | None,
) -> list[Piece]:  # fmt: skip
    if manifest.adapter is None:
        return [_piece(reader, name, tensor, dtype, progress) for name, tensor in _exported(manifest)]
    if form is ExportForm.ADAPTER:
        return adapter_pieces(reader, manifest, progress)
    return merged_pieces(reader, manifest, path, base, progress)


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
        write_bytes(target / _INDEX, _INDEX, orjson.dumps(index, option=orjson.OPT_INDENT_2))
    return size


def _piece(reader: TensorReader, name: str, tensor: StoredTensor, dtype: str, progress: Progress) -> Piece:
    kind = ELEMENT_TYPES.get(tensor.dtype)
    target = dtype if kind is not None and kind.is_float else tensor.dtype
    return Piece(
        tensor=name.removeprefix(EXPORTED),
        dtype=target,
        shape=tensor.shape,
        first=0,
        count=tensor.num_elements,
        data=partial(_cast, reader, name, tensor.dtype, target, progress),
    )


def _cast(reader: TensorReader, name: str, source: str, target: str, progress: Progress) -> Iterator[memoryview]:
    import numpy as np

    for chunk in reader.chunks(name):
        progress(chunk.nbytes)
        if source == target:
            yield chunk
        else:
            bits = np.frombuffer(chunk, ELEMENT_TYPES[source].bits_dtype)
            yield np.ascontiguousarray(cast_bits(bits, source, target)).view(np.uint8).data
