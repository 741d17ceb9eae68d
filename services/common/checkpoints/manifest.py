"""The manifest of a checkpoint: its run, policy, tensors and files, and the place of each part of a tensor.

The manifest is written last and holds the digest of every other file and of itself, so a checkpoint that its manifest
describes is complete. The format is JSON; reading never executes code. ``decode`` checks all values: names stay in the
directory, places stay in their file, and the parts of a tensor cover the tensor once.

A tensor is cut along its flat elements. ``Part(tensor="weights/w", first=64, count=32, offset_bytes=512)`` in a file says
that elements 64 to 95 of that tensor, flat, lie from byte 512 on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import CorruptDataError
from services.common.weights.snapshot import AdapterIdentity, algorithm_of, tensor_digest

MANIFEST = "manifest.json"
MODEL_FILES = "model/"  # prefix of the names of config, tokenizer and generation config
WEIGHTS = "weights/"  # prefix of the names of weights
EXPORTED = "weights/causal_lm."  # prefix of the model's own weights, without a value head
RANDOM_STATE = "random_state/"  # then the rank

FORMAT = 1
# Element type as torch names it: as safetensors names it, and its bytes.
DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
# No file of ours begins with a dot, so no name leads out of the directory.
_FILE_NAME = re.compile(r"(model/([\w-][\w.-]*/){0,3})?[\w-][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A whole tensor, without the places of its parts."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.element_bytes

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive elements of a tensor in one file."""

    tensor: str
    first: int  # of the tensor's elements, flat
    count: int
    offset_bytes: int  # in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    name: str  # relative to the checkpoint's directory
    size_bytes: int
    digest: str
    parts: tuple[Part, ...] = ()

    def to_json(self) -> dict[str, Any]:
        parts = [[p.tensor, p.first, p.count, p.offset_bytes] for p in self.parts]
        return {"name": self.name, "size_bytes": self.size_bytes, "digest": self.digest, "parts": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its bytes."""

    run_id: str
    policy: str
    training_step: int
    num_updates: int
    num_ranks: int  # of the writer; any number can read the checkpoint
    optimizer: str  # the layout of its state: adamw keeps exp_avg, exp_avg_sq and step of each weight
    written_at: int  # seconds since 1970
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    adapter: AdapterIdentity | None = None  # None: the weights are all of a model

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def files_for_export(self) -> list[StoredFile]:
        """The files that an export reads: those with weights, config and tokenizer."""
        return [
            file
            for file in self.files
            if file.name.startswith(MODEL_FILES) or any(part.tensor.startswith(EXPORTED) for part in file.parts)
        ]


def encode(manifest: Manifest) -> bytes:
    """The manifest's file: its content and the digest of its content.

    >>> empty = Manifest(
    ...     run_id="r", policy="p", training_step=1, num_updates=1, num_ranks=1, optimizer="adamw", written_at=0,
    ...     tensors={}, files=(),
    ... )
    >>> decode(encode(empty)) == empty
    True
    """
    content = {
        "format": FORMAT,
        "run_id": manifest.run_id,
        "policy": manifest.policy,
        "training_step": manifest.training_step,
        "num_updates": manifest.num_updates,
        "num_ranks": manifest.num_ranks,
        "optimizer": manifest.optimizer,
        "written_at": manifest.written_at,
        "tensors": {name: [tensor.dtype, list(tensor.shape)] for name, tensor in manifest.tensors.items()},
        "files": [file.to_json() for file in manifest.files],
        **({} if manifest.adapter is None else {"adapter": manifest.adapter.to_json()}),
    }
    return orjson.dumps({"content": content, "digest": _digest(content)})


def decode(data: bytes) -> Manifest:
    """Read and check a manifest.

    Raises:
        CorruptDataError: the manifest is damaged, or describes no checkpoint.
    """
    try:
        tree = orjson.loads(data)
        content = tree["content"]
        if tree["digest"] != _digest(content):
            raise CorruptDataError(f"{MANIFEST} is damaged: its digest differs")
        if content["format"] != FORMAT:
            raise CorruptDataError(f"{MANIFEST} has format {content['format']!r}; this version reads {FORMAT}")
        manifest = Manifest(
            run_id=_typed(content["run_id"], str),
            policy=_typed(content["policy"], str),
            training_step=_count(content["training_step"]),
            num_updates=_count(content["num_updates"]),
            num_ranks=_count(content["num_ranks"]),
            optimizer=_typed(content["optimizer"], str),
            written_at=_count(content["written_at"]),
            tensors={name: _tensor(*entry) for name, entry in content["tensors"].items()},
            files=tuple(file_from_json(entry) for entry in content["files"]),
            adapter=AdapterIdentity.from_json(content["adapter"]) if "adapter" in content else None,
        )
        _check_places(manifest)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None
    return manifest


def digest_of(data: bytes) -> str:
    """The digest of a manifest's content, which identifies the whole checkpoint. ``decode`` must accept ``data``."""
    return str(orjson.loads(data)["digest"])


def file_from_json(entry: Mapping[str, Any]) -> StoredFile:
    """Decode and check a file's entry. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a wrong entry."""
    name = _typed(entry["name"], str)
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{name!r} cannot be a file of a checkpoint")
    digest = _typed(entry["digest"], str)
    try:
        algorithm_of(digest)
    except CorruptDataError as error:
        raise ValueError(error.message) from None
    parts = tuple(
        Part(tensor=_typed(tensor, str), first=_count(first), count=_count(count), offset_bytes=_count(offset))
        for tensor, first, count, offset in entry["parts"]
    )
    return StoredFile(name=name, size_bytes=_count(entry["size_bytes"]), digest=digest, parts=parts)


def _check_places(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")
    covered: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.tensors}
    for file in manifest.files:
        for part in file.parts:
            end = part.offset_bytes + part.count * manifest.tensors[part.tensor].element_bytes
            if end > file.size_bytes:
                raise ValueError(f"{part.tensor} ends at byte {end} of {file.name}, which has {file.size_bytes}")
            covered[part.tensor].append((part.first, part.count))
    for name, tensor in manifest.tensors.items():
        position = 0
        for first, count in sorted(covered[name]):
            if first != position:
                raise ValueError(f"the parts of {name} do not cover it once")
            position += count
        if position != tensor.num_elements:
            raise ValueError(f"the parts of {name} have {position} of its {tensor.num_elements} elements")


def _tensor(dtype: Any, shape: Any) -> StoredTensor:
    if dtype not in DTYPES:
        raise ValueError(f"no element type {dtype!r}")
    return StoredTensor(dtype=dtype, shape=tuple(_count(extent) for extent in shape))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _digest(content: Any) -> str:
    return tensor_digest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
