"""Snapshots: immutable weight versions in named, memory-mapped files, normally in /dev/shm.

One process, or several of one host (the ranks of a trainer, each with its own rows), writes a file under a hidden name. The
first process seals the file (digests, manifest) and renames the file, so a visible name holds a whole version. The name has
run, policy, version and the pid of the process that reserved the file. Users hold a shared ``flock``, so ``sweep_orphans``
removes exactly the files without a living writer and without a user. Space is reserved before the first byte, so a full
/dev/shm is an error here, not a bus error later. A mapping outlives its file's name.

Layout: magic, size of the manifest, manifest (JSON), padding to a page, tensors at their manifest offsets.
Independent of torch and gRPC.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import orjson

from services.common.errors import CorruptDataError, InfrastructureError
from services.common.system.children import is_there
from services.common.weights.elements import Bits, element_type
from services.common.weights.manifest import (
    DEFAULT_ALGORITHM,
    AdapterIdentity,
    DigestAlgorithm,
    Manifest,
    TensorEntry,
    TensorSpec,
    algorithm_of,
    lay_out,
    placeholder,
    tensor_digest,
    with_digest,
)

DEFAULT_DIRECTORIES = (Path("/dev/shm"),)

_PREFIX = "rollmill"
_SUFFIX = "weights"
_MAGIC = b"MRWEIGHT"
_DRAFT_MAGIC = b"MRWDRAFT"  # of a file that is still being written
_HEADER = struct.Struct("<8sQ")  # magic, bytes of the manifest
_PAGE = 4096
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class SnapshotSpaceError(InfrastructureError):
    """No configured directory has enough space for a snapshot."""


def snapshot_name(run_id: str, policy: str, version: int, pid: int) -> str:
    """The file name. Run and policy are quoted, so that dots only separate the parts."""
    run, name = (quote(part, safe="").replace(".", "%2E") for part in (run_id, policy))
    return f"{_PREFIX}.{run}.{name}.{version}.{pid}.{_SUFFIX}"


class SnapshotPart:
    """An unfinished version, mapped by one of its writers: every writer fills its own rows of any tensor.

    A ``SnapshotWriter``, in this or another process of the host, reserves the file; other writers ``join``.
    """

    def __init__(self, path: Path, manifest: Manifest, reserved: int, file_descriptor: int, mapped: mmap.mmap) -> None:
        self.path = path  # the final name, visible after ``seal``
        self._manifest = manifest
        self._reserved = reserved
        self._fd = file_descriptor
        self._map = mapped

    @classmethod
    def join(cls, path: Path) -> SnapshotPart:
        """Map the file that a ``SnapshotWriter`` has reserved for ``path``.

        Raises:
            OSError: the file does not exist (any more), or this process cannot see the file.
            CorruptDataError: the file is no draft of a snapshot.
        """
        descriptor = os.open(_hidden(path), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(
                descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB
            )  # no process sweeps it while one of its writers is alive
            mapped = mmap.mmap(descriptor, 0)
            manifest, reserved = _read_manifest(mapped, path, _DRAFT_MAGIC)
        except (OSError, CorruptDataError):
            os.close(descriptor)
            raise
        return cls(path, manifest, reserved, descriptor, mapped)

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return self._manifest.tensors

    def bits(self, entry: TensorEntry) -> Bits:
        """The flat, writable array of one tensor's bits. Delete the array before ``seal`` or ``close``."""
        kind = element_type(entry.dtype).bits_dtype
        return np.frombuffer(self._map, dtype=kind, count=entry.num_elements, offset=self._reserved + entry.offset)

    def digests(self, entries: Iterable[TensorEntry], num_threads: int = 1) -> dict[str, str]:
        """Digests by name of tensors that all writers have filled."""
        return {
            entry.name: tensor_digest(self.bits(entry), algorithm_of(entry.digest), num_threads=num_threads)
            for entry in entries
        }

    def close(self) -> None:
        """Release the file without removing the file, for processes without a lease. Arrays over the mapping stay valid."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # said, because the mapping, which holds on to it, may live on
            os.close(self._fd)
            self._fd = -1


class SnapshotWriter(SnapshotPart):
    """Reserves and seals the file. Fill every tensor, then ``seal``; ``abandon`` (or an exception in ``with``) removes the
    file."""

    @classmethod
    def create(
        cls,
        *,
        run_id: str,
        policy: str,
        version: int,
        specs: Iterable[TensorSpec],
        directories: Sequence[Path] = DEFAULT_DIRECTORIES,
        algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
        adapter: AdapterIdentity | None = None,
    ) -> SnapshotWriter:
        """Reserve the file in the first directory with enough space; ``SnapshotSpaceError`` names the space in each."""
        # All digests of an algorithm have one length, so the manifest's size is known before the data.
        entries = [with_digest(entry, placeholder(algorithm)) for entry in lay_out(specs)]
        draft = Manifest.of(run_id=run_id, policy=policy, version=version, tensors=entries, adapter=adapter)
        encoded = orjson.dumps(draft.to_json())
        reserved = -(-(_HEADER.size + len(encoded)) // _PAGE) * _PAGE
        complaints = []
        for directory in directories:
            path = directory / snapshot_name(run_id, policy, version, os.getpid())
            hidden = _hidden(path)
            try:
                descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            except OSError as error:
                complaints.append(f"{directory}: {error.strerror}")
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.posix_fallocate(descriptor, 0, reserved + draft.size_bytes)
            except OSError as error:
                os.close(descriptor)
                hidden.unlink(missing_ok=True)
                if error.errno not in _NO_SPACE:
                    raise
                complaints.append(f"{directory}: {error.strerror} ({_free_bytes(directory)} bytes free)")
                continue
            mapped = mmap.mmap(descriptor, reserved + draft.size_bytes)
            mapped[: _HEADER.size + len(encoded)] = _HEADER.pack(_DRAFT_MAGIC, len(encoded)) + encoded
            return cls(path, draft, reserved, descriptor, mapped)
        raise SnapshotSpaceError(
            f"no room for version {version} of {policy!r} ({reserved + draft.size_bytes} bytes): {'; '.join(complaints)}. "
            "Free memory there, keep fewer versions, or name another snapshot directory"
        )

    def seal(self, digests: Mapping[str, str] | None = None) -> Manifest:
        """Write the manifest, rename the file to its final name and release the file, which is immutable from then on.

        ``digests`` by tensor name if the writers have computed them; otherwise this method digests every tensor.
        """
        known = self.digests(self.tensors) if digests is None else digests
        entries = [with_digest(entry, known[entry.name]) for entry in self.tensors]
        draft = self._manifest
        manifest = Manifest.of(
            run_id=draft.run_id, policy=draft.policy, version=draft.version, tensors=entries, adapter=draft.adapter
        )
        encoded = orjson.dumps(manifest.to_json())
        assert len(encoded) <= self._reserved - _HEADER.size, "a digest is longer than its placeholder"
        self._map[: _HEADER.size + len(encoded)] = _HEADER.pack(_MAGIC, len(encoded)) + encoded
        os.rename(_hidden(self.path), self.path)
        self.close()
        return manifest

    def abandon(self) -> None:
        """Remove an unfinished file. A second call, or a call after ``seal``, has no effect."""
        _hidden(self.path).unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()


class Snapshot:
    """A sealed version, mapped read-only. Readers hold a ``lease``; ``retire`` removes the file after the last lease."""

    def __init__(self, path: Path) -> None:
        """``CorruptDataError`` when the file is no snapshot, ``OSError`` when there is none."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            self.manifest, start = _read_manifest(self._map, path, _MAGIC)
        except (OSError, ValueError, CorruptDataError) as error:
            os.close(self._fd)
            raise (
                error if isinstance(error, (OSError, CorruptDataError)) else CorruptDataError(f"{path}: {error}")
            ) from error
        self.data = memoryview(self._map)[start:]  # manifest offsets are offsets in it
        self.data_offset = start  # of ``data`` in the file
        self._leases = 0
        self._retired = False

    def bits(self, entry: TensorEntry) -> Bits:
        """The flat array of one tensor's bits; read-only."""
        kind = element_type(entry.dtype).bits_dtype
        return np.frombuffer(self.data, dtype=kind, count=entry.num_elements, offset=entry.offset)

    def lease(self) -> None:
        if self._retired and not self._leases:
            raise ValueError(f"{self.path} was removed and cannot be leased")
        self._leases += 1

    def release(self) -> None:
        self._leases -= 1
        assert self._leases >= 0, "released more often than leased"
        if self._retired and not self._leases:
            self._remove()

    def retire(self) -> None:
        """Remove the file, now or with the last lease."""
        if not self._retired:
            self._retired = True
            if not self._leases:
                self._remove()

    def close(self) -> None:
        """Release the file without removing the file, for processes without a lease. Arrays over the mapping stay valid."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # said, because the mapping, which holds on to it, may live on
        os.close(self._fd)

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()  # the mapping ends with the last array over it


def sweep_orphans(directories: Iterable[Path] = DEFAULT_DIRECTORIES) -> list[Path]:
    """Remove snapshots, sealed or not, of dead writers that no process has open; returns the removed paths."""
    removed = []
    for directory in directories:
        for pattern in (f"{_PREFIX}.*.{_SUFFIX}", f".{_PREFIX}.*.{_SUFFIX}"):
            for path in directory.glob(pattern):
                pid = path.name.split(".")[-2]
                if pid.isdigit() and not is_there(int(pid)) and _is_unused(path):
                    path.unlink(missing_ok=True)
                    removed.append(path)
    return removed


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _read_manifest(mapped: mmap.mmap, path: Path, magic: bytes) -> tuple[Manifest, int]:
    if len(mapped) < _HEADER.size:
        raise CorruptDataError(f"{path}: too short for a snapshot")
    found, size = _HEADER.unpack(mapped[: _HEADER.size])
    start = -(-(_HEADER.size + size) // _PAGE) * _PAGE
    if found != magic or start > len(mapped):
        raise CorruptDataError(f"{path}: not a snapshot")
    try:
        manifest = Manifest.from_json(orjson.loads(mapped[_HEADER.size : _HEADER.size + size]))
    except orjson.JSONDecodeError as error:
        raise CorruptDataError(f"{path}: broken manifest: {error}") from error
    if start + manifest.size_bytes > len(mapped):
        raise CorruptDataError(f"{path}: {start + manifest.size_bytes - len(mapped)} bytes are missing")
    return manifest, start


def _is_unused(path: Path) -> bool:
    """Whether no process, in this or another pid namespace, has the file open."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
