"""Writes and reads the files of a checkpoint: safetensors with many tensors, one part of each; durable and checked.

    pieces -> header -> bytes, digested as they are written -> fsync          (``write_safetensors``)
    manifest -> the parts that cover a range of a tensor -> into the memory    (``TensorReader``)

Reading never executes code. Only regular files are opened, so that links are not followed and pipes do not block, also in
a directory from an untrusted source. Independent of torch, ranks and directories of checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import xxhash

from services.common.checkpoints.manifest import DTYPES, Manifest, Part, StoredFile, StoredTensor
from services.common.errors import CorruptDataError
from services.common.weights.snapshot import DEFAULT_ALGORITHM

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


def verify_file(directory: Path, file: StoredFile, progress: Progress = lambda _: None) -> None:
    """Read a file and compare size and digest with the manifest.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
