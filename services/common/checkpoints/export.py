"""A Hugging Face directory from a checkpoint: config, tokenizer and safetensors that transformers loads.

    verify the files that are needed -> copy config and tokenizer -> weights, cast chunk by chunk, into shards -> rename

The parts that ranks have written are laid end to end by copying bytes; a few chunks are in memory at once, whatever the
size of the model. Needs neither torch nor a GPU, nor any process of the run. A value head is left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

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
from services.common.disk import sync_directory
from services.common.errors import ConfigError, CorruptDataError
from services.common.weights.dtypes import ELEMENT_TYPES, cast_bits

NOTE = "millrace_export.json"  # in the directory: of which run, step and checkpoint it is
SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export holds, as its note says it."""

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
    """Bytes of which ``export_checkpoint`` tells its progress."""
    return sum(f.size_bytes for f in manifest.files_for_export()) + sum(t.size_bytes for _, t in _exported(manifest))


def export_checkpoint(
    path: Path,
    target: Path,
    progress: Progress = lambda _: None,
    *,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the model of a checkpoint into ``target``, which appears when it is complete and replaces an earlier export.

    ``replace``: replaces whatever is there.

    Weights are cast to the type that the checkpoint's config names: the one in which the run publishes them.

    Raises:
        CorruptDataError: what an export reads is not what was written. Optimizer state may be damaged all the same.
        ConfigError: ``target`` holds something else, or the checkpoint has no config.
        OSError: the disk did not take it.
    """
    manifest = read_manifest(path)
    if not replace:
        check_target(target)
    if damage := find_damage(path, manifest.files_for_export(), progress):
        raise CorruptDataError(f"{path} cannot be exported: {damage}")
    dtype = _dtype(path)
    beside = target.with_name(f"{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _copy_model_files(path, manifest, beside)
        with TensorReader(path, manifest) as reader:
            size = _write_weights(reader, _exported(manifest), dtype, beside, progress, shard_bytes)
        exported = Exported(
            directory=target,
            run_id=manifest.run_id,
            policy=manifest.policy,
            training_step=manifest.training_step,
            checkpoint_digest=digest_of(read_whole(path / MANIFEST)),
            dtype=dtype,
            num_tensors=len(_exported(manifest)),
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
    """Raises ``ConfigError`` where an export would replace what is none."""
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
        raise ConfigError(f"{path} holds no config of its model, so that nothing could load an export of it") from None
    if dtype not in ELEMENT_TYPES or not ELEMENT_TYPES[dtype].is_float:
        raise ConfigError(f"{path}: config.json has dtype {dtype!r}, to which weights cannot be cast")
    return dtype


def _copy_model_files(path: Path, manifest: Manifest, target: Path) -> None:
    for file in manifest.files:
        if file.name.startswith(MODEL_FILES):
            place = target / file.name.removeprefix(MODEL_FILES)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, place.name, read_whole(path / file.name))
            sync_directory(place.parent)


def _write_weights(
    reader: TensorReader, tensors: list[tuple[str, StoredTensor]], dtype: str, target: Path, progress: Progress,
    shard_bytes: int,
) -> int:  # fmt: skip
    """The shards, and the index where there are several; returns their bytes of weights."""
    pieces = [_piece(reader, name, tensor, dtype, progress) for name, tensor in tensors]
    shards = list(_shards(pieces, shard_bytes))
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


def _shards(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    """Neighbours together, up to ``shard_bytes``, and at least one."""
    shard: list[Piece] = []
    size = 0
    for piece in pieces:
        if shard and size + piece.size_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += piece.size_bytes
    yield shard
