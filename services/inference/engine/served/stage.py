"""A policy's weights as a directory for servers: one safetensors file, always of the held version.

The file is mapped and written in place: whole tensors are copied, changed elements scattered, so a delta touches only the
changed elements, without a second copy of the model. An interrupted write leaves the stage dirty, and a dirty stage accepts
only a complete update. Independent of servers and HTTP; imports no torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from services.common.errors import ConfigError, InfrastructureError
from services.common.weights.snapshot import Bits, cast_bits, element_type
from services.inference.engine.base import WeightUpdate, check_update

log = structlog.get_logger(__name__)

SHARED_MEMORY = Path("/dev/shm")
FILE = "model.safetensors"
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as safetensors writes them
_PAGE = 4096
_ROOM = 1.05  # factor on the model's size for the free space of a file system


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One tensor of the file. Has the ``shape`` that a ``WeightUpdate`` is checked against."""

    shape: tuple[int, ...]
    dtype: str
    bits: Bits  # flat, shares the file's memory


class Stage:
    """``tensors`` are the first version's, host tensors by name; the file keeps their types."""

    def __init__(self, directory: Path, tensors: Mapping[str, Any], version: int) -> None:
        self.directory = directory
        self.version = version
        self.dirty = False
        shutil.rmtree(directory, ignore_errors=True)  # left by an earlier process with the same id
        # A new private file: shared memory is writable for all users, and another user could have planted a file.
        directory.mkdir(parents=True, mode=0o700)
        self._tensors = _map_file(directory / FILE, {name: _described(value) for name, value in tensors.items()})
        self.write(WeightUpdate.full(tensors, version))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bits.nbytes for tensor in self._tensors.values())

    @property
    def shapes(self) -> Mapping[str, StagedTensor]:
        """Type and shape by name; an update must match them."""
        return self._tensors

    def write(self, update: WeightUpdate) -> None:
        """Write a version into the stage. Called in a thread, while no server reads.

        Raises:
            ModelMismatchError: the update is for another model; the stage is unchanged.
            InfrastructureError: the stage was left in the middle of a write, and the update is not complete.
        """
        check_update(update, self._tensors)
        if self.dirty and not update.complete:
            raise InfrastructureError(f"{self.directory} holds no whole version: the update must have every tensor")
        self.dirty = True
        for name, value in update.whole.items():
            staged = self._tensors[name]
            bits, dtype = _bits(value)
            np.copyto(staged.bits, cast_bits(bits, dtype, staged.dtype))
        for name, changes in update.changes.items():
            staged = self._tensors[name]
            for change in changes:
                change.cast(update.dtype, staged.dtype).write_to(staged.bits)
        self.version = update.version
        self.dirty = False

    def remove(self) -> None:
        """Free the memory. Servers that still read keep their mappings."""
        self._tensors = {}
        shutil.rmtree(self.directory, ignore_errors=True)


def place_stage(fallback: Path, name: str, size_bytes: int) -> Path:
    """Choose a directory for a stage of this size: shared memory with enough room, else the fallback.

    The name has the process id, and directories of ended processes are removed. ``ConfigError`` if no place has room.
    """
    needed = int(size_bytes * _ROOM)
    places = [SHARED_MEMORY, fallback]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            _remove_stale(place)
            if shutil.disk_usage(place).free >= needed and os.access(place, os.W_OK):
                return place / f"rollmill-stage-{os.getpid()}-{name}"
        except OSError as error:
            log.warning("engine_server.no_stage", place=str(place), error=str(error))
    raise ConfigError(
        f"no room for the {needed / 2**30:.1f} GiB of weights that the servers read, in {' or '.join(map(str, places))}: "
        "make room, give the container more shared memory, or write a run.dir on a disk that has it"
    )


def _remove_stale(place: Path) -> None:
    for old in place.glob("rollmill-stage-*-*"):
        pid = old.name.split("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
            log.info("engine_server.swept", directory=str(old))


def size_of(tensors: Mapping[str, Any]) -> int:
    """Bytes of host tensors."""
    return sum(
        math.prod(value.shape) * element_type(_described(value)[1]).bits_dtype.itemsize for value in tensors.values()
    )


def _described(value: Any) -> tuple[tuple[int, ...], str]:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _NAMES:
        raise ConfigError(f"weights of type {dtype} cannot be given to a server: use one of {sorted(_NAMES)}")
    return tuple(value.shape), dtype


def _map_file(path: Path, described: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, StagedTensor]:
    """A safetensors file with room for these tensors, mapped."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, (shape, dtype) in described.items():
        size = math.prod(shape) * element_type(dtype).bits_dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        places[name] = (offset, size)
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)  # tensors begin on a page
    start = 8 + len(text)
    with path.open("w+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, start + offset)  # a full disk fails here, not by a signal later
        memory = mmap.mmap(file.fileno(), start + offset)
    whole = np.frombuffer(memory, dtype=np.uint8)
    return {
        name: StagedTensor(
            shape=described[name][0],
            dtype=described[name][1],
            bits=whole[start + place : start + place + size].view(element_type(described[name][1]).bits_dtype),
        )
        for name, (place, size) in places.items()
    }


def _bits(value: Any) -> tuple[Bits, str]:
    """A host tensor or array as flat bits, without a copy if contiguous; and its type."""
    dtype = str(value.dtype).removeprefix("torch.")
    kind = element_type(dtype)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(kind.bits_dtype), dtype
    import torch  # the value is a tensor, so torch is present

    signed = {2: torch.int16, 4: torch.int32}[kind.bits_dtype.itemsize]
    array: Bits = value.detach().cpu().contiguous().view(-1).view(signed).numpy().view(kind.bits_dtype)
    return array, dtype
