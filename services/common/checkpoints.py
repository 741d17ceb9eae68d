"""Checkpoints of a run on disk, as the trainer writes them and the command line reads them: manifest, files, directories.

    step_000010              complete: renamed to this name after its whole content was durable
      manifest.json          run, policy, step, every tensor, every file with its digest and the parts of tensors in it
      weights_00000.safetensors, optimizer_00000.safetensors    of each rank that wrote
      model/                 config and tokenizer, for exports
    step_000010.partial      unfinished, in progress or left by a dead process; the next save sweeps these
    step_000010.removed      being removed, because newer checkpoints exist; swept too
    step_000010.damaged      set aside because its content differs from the written one; never swept

The manifest is written last and holds the digest of every other file and of itself, so a checkpoint that its manifest
describes is complete. A tensor is cut along its flat elements: ``Part(tensor="weights/w", first=64, count=32,
offset_bytes=512)`` in a file says that elements 64 to 95 of that tensor, flat, lie from byte 512 on.

Reading never executes code: files are JSON and safetensors. ``decode`` checks all values: names stay in the directory,
places stay in their file, and the parts of a tensor cover the tensor once. Only regular files are opened, so that links are
not followed and pipes do not block, also in a directory from an untrusted source. Independent of torch and ranks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import xxhash
from pydantic import Field, TypeAdapter

from services.common.errors import CorruptDataError
from services.common.system.machine import sync_directory
from services.common.weights.snapshot import DEFAULT_ALGORITHM, AdapterIdentity, algorithm_of, tensor_digest

MANIFEST = "manifest.json"
MODEL_FILES = "model/"  # prefix of the names of config, tokenizer and generation config
WEIGHTS = "weights/"  # prefix of the names of weights
EXPORTED = "weights/causal_lm."  # prefix of the model's own weights, without a value head
RANDOM_STATE = "random_state/"  # then the rank

FORMAT = 2
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


Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A whole tensor, without the places of its parts."""

    dtype: str
    shape: tuple[Count, ...]

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
    first: Count  # of the tensor's elements, flat
    count: Count
    offset_bytes: Count  # in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    name: str  # relative to the checkpoint's directory
    size_bytes: Count
    digest: str
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its bytes."""

    run_id: str
    policy: str
    training_step: Count
    num_updates: Count
    num_ranks: Count  # of the writer; any number can read the checkpoint
    optimizer: str  # the layout of its state: adamw keeps exp_avg, exp_avg_sq and step of each weight
    written_at: Count  # seconds since 1970
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
    content = {"format": FORMAT, **orjson.loads(_MANIFEST.dump_json(manifest))}
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
        manifest = _MANIFEST.validate_json(orjson.dumps(content), strict=True)
        _check_places(manifest)
    except (KeyError, TypeError, ValueError) as error:  # of orjson and pydantic, too
        raise CorruptDataError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None
    return manifest


def digest_of(data: bytes) -> str:
    """The digest of a manifest's content, which identifies the whole checkpoint. ``decode`` must accept ``data``."""
    return str(orjson.loads(data)["digest"])


def _check_places(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")
    if unknown := {tensor.dtype for tensor in manifest.tensors.values()} - DTYPES.keys():
        raise ValueError(f"no element type {unknown.pop()!r}")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name == MANIFEST:
            raise ValueError(f"{file.name!r} cannot be a file of a checkpoint")
        try:
            algorithm_of(file.digest)
        except CorruptDataError as error:
            raise ValueError(error.message) from None
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


_MANIFEST = TypeAdapter(Manifest)
FILES = TypeAdapter(tuple[StoredFile, ...])  # of a rank, as it tells the others


def _digest(content: Any) -> str:
    return tensor_digest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))


# -- files --------------------------------------------------------------------------------------------------------------

CHUNK_BYTES = 8 << 20
_ALIGNMENT = 8  # of the first byte after a safetensors header
# Errors of a damaged medium or directory; others (no permission, too many files) are no damage.
_DAMAGE = (errno.ENOENT, errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO)

Progress = Callable[[int], None]  # called with the bytes read since the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor to write. Its bytes are created just before the write, and released afterwards."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]  # of this part
    first: int  # where it begins in the whole tensor, flat
    count: int
    data: Callable[[], Iterable[memoryview]]  # the bytes of its elements, little-endian, in order

    @property
    def size_bytes(self) -> int:
        return self.count * DTYPES[self.dtype][1]


def write_safetensors(path: Path, name: str, pieces: Sequence[Piece], metadata: Mapping[str, str]) -> StoredFile:
    """Write a new safetensors file, durable on return. ``name`` is its name in the manifest.

    Raises ``OSError`` when the disk refuses the file.
    """
    ordered = sorted(pieces, key=lambda piece: -DTYPES[piece.dtype][1])  # so that each is aligned to its elements
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for piece in ordered:
        begin, position = position, position + piece.size_bytes
        header[piece.tensor] = {
            "dtype": DTYPES[piece.dtype][0],
            "shape": list(piece.shape),
            "data_offsets": [begin, position],
        }
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    parts = []
    offset = len(head)
    for piece in ordered:
        parts.append(Part(tensor=piece.tensor, first=piece.first, count=piece.count, offset_bytes=offset))
        offset += piece.size_bytes

    def data() -> Iterator[memoryview]:
        yield memoryview(head)
        for piece in ordered:
            written = 0
            for held in piece.data():
                written += held.nbytes
                yield held
            assert written == piece.size_bytes, f"{piece.tensor}: {written} bytes of {piece.size_bytes}"

    return _write(path, name, data(), tuple(parts))


def write_bytes(path: Path, name: str, data: bytes) -> StoredFile:
    """Write a new file, durable on return."""
    return _write(path, name, iter([memoryview(data)]), ())


def _write(path: Path, name: str, data: Iterator[memoryview], parts: tuple[Part, ...]) -> StoredFile:
    state = xxhash.xxh3_128()
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for held in data:
            flat = held.cast("B")
            for start in range(0, len(flat), CHUNK_BYTES):
                chunk = flat[start : start + CHUNK_BYTES]
                state.update(chunk)
                while chunk:
                    chunk = chunk[os.write(fd, chunk) :]
            size += len(flat)
        os.fsync(fd)
    finally:
        os.close(fd)
    return StoredFile(name=name, size_bytes=size, digest=f"{DEFAULT_ALGORITHM}:{state.hexdigest()}", parts=parts)


def read_whole(path: Path) -> bytes:
    """The bytes of a small regular file; ``CorruptDataError`` for a missing or unreadable file."""
    with _damage_told(path.name):
        fd = _open_regular(path, path.name)
        with os.fdopen(fd, "rb") as file:
            return file.read()


def verify_file(
    directory: Path, file: StoredFile, progress: Progress = lambda _: None, *, by_size: bool = False
) -> None:
    """Read a file and compare size and digest with the manifest; with ``by_size`` the size alone.

    Raises:
        CorruptDataError: the file is damaged; the message names the difference.
        OSError: no permission to read the file, which may be intact.
    """
    with _damage_told(file.name):
        fd = _open_regular(directory / file.name, file.name)
        try:
            size = os.fstat(fd).st_size
            if size != file.size_bytes:
                raise CorruptDataError(f"{file.name} has {size} bytes; {file.size_bytes} were written")
            if by_size:
                return
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            state = xxhash.xxh3_128()
            buffer = memoryview(bytearray(min(CHUNK_BYTES, max(size, 1))))
            left = size
            while left and (got := os.readv(fd, [buffer[: min(left, len(buffer))]])):
                state.update(buffer[:got])
                left -= got
                progress(got)
        finally:
            os.close(fd)
    if left or f"{DEFAULT_ALGORITHM}:{state.hexdigest()}" != file.digest:
        raise CorruptDataError(f"{file.name} is damaged: its digest differs")


class TensorReader:
    """Reads ranges of the tensors of one checkpoint. A context manager, because files stay open."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._tensors = manifest.tensors
        self._parts: dict[str, list[tuple[Part, StoredFile]]] = {}
        for file in manifest.files:
            for part in file.parts:
                self._parts.setdefault(part.tensor, []).append((part, file))
        for parts in self._parts.values():
            parts.sort(key=lambda found: found[0].first)
        self._open: dict[str, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def tensor(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def read(self, name: str, first: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor's elements from ``first`` on, flat.

        Raises ``CorruptDataError`` when a file has become unreadable since its verification.
        """
        size = self._tensors[name].element_bytes
        flat = into.cast("B") if into.nbytes else into
        end = first + into.nbytes // size
        parts = self._parts.get(name, [])
        index = max(bisect_right(parts, first, key=lambda found: found[0].first) - 1, 0)
        while first < end:
            part, file = parts[index]
            count = min(end, part.first + part.count) - first
            if count > 0:
                offset = part.offset_bytes + (first - part.first) * size
                self._fill(file.name, offset, flat[: count * size])
                flat = flat[count * size :]
                first += count
            index += 1

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
        """All bytes of a tensor in order. Each chunk is valid until the next one."""
        tensor = self._tensors[name]
        step = max(chunk_bytes // tensor.element_bytes, 1)
        buffer = memoryview(bytearray(min(step * tensor.element_bytes, tensor.size_bytes)))
        for first in range(0, tensor.num_elements, step):
            held = buffer[: min(step, tensor.num_elements - first) * tensor.element_bytes]
            self.read(name, first, held)
            yield held

    def _fill(self, name: str, offset: int, into: memoryview) -> None:
        with _damage_told(name):
            if name not in self._open:
                self._open[name] = _open_regular(self._directory / name, name)
            while into:
                got = os.preadv(self._open[name], [into], offset)
                if not got:
                    raise CorruptDataError(f"{name} ends at byte {offset}")
                into = into[got:]
                offset += got


def _open_regular(path: Path, name: str) -> int:
    """A descriptor for reading; ``CorruptDataError`` for anything but a regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptDataError(f"{name} is no file")
    return fd


@contextlib.contextmanager
def _damage_told(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        what = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
        raise CorruptDataError(f"{name} {what}") from None


# -- directories --------------------------------------------------------------------------------------------------------

PREFIX = "step_"
PARTIAL = ".partial"
REMOVED = ".removed"
DAMAGED = ".damaged"
REASON = "why_damaged.txt"
_NAME = re.compile(rf"{PREFIX}(\d{{6}}|[1-9]\d{{6,}})({re.escape(DAMAGED)}.*)?")


def checkpoints_directory(run_dir: Path, policy: str) -> Path:
    """The directory of a policy's checkpoints in a run directory."""
    return run_dir / "checkpoints" / policy


def path_of(directory: Path, step: int) -> Path:
    return directory / f"{PREFIX}{step:06d}"


def checkpoints_in(directory: Path) -> list[tuple[int, Path]]:
    """(training step, directory) of the checkpoints, ascending: complete ones, which may be damaged, and behind each those of
    its step that were set aside."""
    named = ((_NAME.fullmatch(path.name), path) for path in directory.glob(f"{PREFIX}*") if path.is_dir())
    return sorted((int(name[1]), path) for name, path in named if name)


def is_set_aside(path: Path) -> bool:
    """Whether a checkpoint was set aside as damaged, so that no trainer loads it."""
    return DAMAGED in path.name


def steps(directory: Path) -> list[int]:
    """The training steps of complete checkpoints, ascending. They may be damaged."""
    return [step for step, path in checkpoints_in(directory) if not is_set_aside(path)]


def read_manifest(path: Path) -> Manifest:
    """The verified manifest of a checkpoint.

    Raises:
        CorruptDataError: the manifest is missing or damaged.
    """
    manifest = decode(read_whole(path / MANIFEST))
    if path.name.partition(".")[0] != path_of(path.parent, manifest.training_step).name:
        raise CorruptDataError(f"{MANIFEST} is that of step {manifest.training_step}, not of {path.name}")
    return manifest


def find_damage(
    path: Path, files: Iterable[StoredFile], progress: Progress = lambda _: None, *, by_size: bool = False
) -> str:
    """Describe the damaged files of a checkpoint, with ``by_size`` those of another size; empty when all are intact.

    Raises ``OSError`` where a file may not be read.
    """
    found = []
    for file in files:
        try:
            verify_file(path, file, progress, by_size=by_size)
        except CorruptDataError as error:
            found.append(error.message)
    return "; ".join(found)


def set_aside(path: Path, reason: str) -> Path:
    """Rename a damaged checkpoint, with the reason beside its files; returns its new place."""
    target = path.with_name(f"{path.name}{DAMAGED}")
    for number in range(2, 1000):
        if not target.exists():
            break
        target = path.with_name(f"{path.name}{DAMAGED}-{number}")
    os.rename(path, target)
    sync_directory(path.parent)
    with contextlib.suppress(OSError):  # a full disk, say: the log has the reason, too
        (target / REASON).write_text(f"{reason}\n", encoding="utf-8")
    return target


def reason_of(path: Path) -> str:
    """Why a checkpoint was set aside."""
    try:
        return read_whole(path / REASON)[:4096].decode(errors="replace").strip()
    except CorruptDataError:
        return f"{REASON} is missing"


def remove(path: Path) -> None:
    """Remove a checkpoint. A partly removed checkpoint does not count as complete."""
    doomed = path.with_name(f"{path.name}{REMOVED}")
    os.rename(path, doomed)
    with contextlib.suppress(OSError):  # swept by the next save
        sweep(doomed)


def sweep(path: Path) -> None:
    """Remove a result of ``leftovers``; only the link, if the path is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def leftovers(directory: Path) -> Iterator[Path]:
    """Files of unfinished saves and removals of dead processes."""
    for suffix in (PARTIAL, REMOVED):
        yield from directory.glob(f"{PREFIX}*{suffix}")


class CheckpointGauge(StrEnum):
    """Gauges that trainers report and the orchestrator sums into counters of the run."""

    FAILED = "failed_checkpoints"  # refused by the disk since the start of the trainer
    DAMAGED = "damaged_checkpoints"  # set aside in the directory
