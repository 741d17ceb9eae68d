"""Weight versions: their records and digests, and the snapshot files that hold them. No torch, no gRPC.

``Manifest`` describes a version in memory or in a snapshot file. ``Payload`` describes the bytes that a receiver fetches to
get that version: the full snapshot, or a delta against a base version of the receiver.

A tensor's digest covers its raw little-endian bytes. A version's digest covers, for its tensors sorted by name: name, dtype,
shape and tensor digest, and before them the identity of an adapter, if the version is one. So the digest does not depend on the order in which tensors are stored or sent. There are two
algorithms: xxh3-128, which detects accidental damage at the speed of memory, and blake3, which also resists deliberate
collisions. A digest names its algorithm ("xxh3-128:<32 hexadecimal digits>", "blake3:<64 hexadecimal digits>"), so a
receiver verifies with the algorithm of the manifest.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import TypeAdapter

from services.common.errors import (
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    InvalidRequestError,
    ModelMismatchError,
)
from services.common.system.processes import is_there

# --- Elements of weights in numpy: types, casts between floating types, and the steps between two elements.


Bits = npt.NDArray[np.unsignedinteger[Any]]  # one unsigned integer per element, little-endian


@dataclass(frozen=True, slots=True)
class ElementType:
    """The unsigned type of an element's bits, and whether the element is a floating-point number."""

    bits_dtype: np.dtype[Any]
    is_float: bool


ELEMENT_TYPES: dict[str, ElementType] = {  # by the name in torch
    "float32": ElementType(np.dtype("<u4"), True),
    "bfloat16": ElementType(np.dtype("<u2"), True),
    "float16": ElementType(np.dtype("<u2"), True),
    "int32": ElementType(np.dtype("<u4"), False),
    "int64": ElementType(np.dtype("<u8"), False),
    "uint8": ElementType(np.dtype("u1"), False),
}


def element_type(name: str) -> ElementType:
    """The element type of that name."""
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise InvalidRequestError(
            f"weights of dtype {name!r} cannot travel; use one of {sorted(ELEMENT_TYPES)}"
        ) from None


def cast_bits(bits: Bits, source: str, target: str) -> Bits:
    """Cast floating elements, rounding to nearest even as torch does; other elements stay as they are."""
    if source == target or not (element_type(source).is_float and element_type(target).is_float):
        return bits
    return _from_float32(_to_float32(bits, source), target)


def _to_float32(bits: Bits, source: str) -> npt.NDArray[np.float32]:
    if source == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.dtype(source)).astype(np.float32, copy=False)


def _from_float32(values: npt.NDArray[np.float32], target: str) -> Bits:
    if target == "float32":
        return values.view(np.uint32)
    if target == "float16":
        with np.errstate(over="ignore"):  # beyond the range is infinity, as in torch
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    # Adding just under half, plus the last kept bit, rounds ties to even; the carry may run into the exponent.
    rounded = ((wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def zigzagged_steps(old: Bits, new: Bits, is_float: bool) -> Bits:
    """Zigzagged steps from ``old`` to ``new``, in their dtype."""
    difference = rank(new, is_float)
    difference -= rank(old, is_float)
    return zigzag(difference)


def zigzag(difference: Bits) -> Bits:
    """Zigzagged differences; ``difference`` itself is changed."""
    fill = _sign_fill(difference)
    difference <<= difference.dtype.type(1)
    difference ^= fill
    return difference


def step_forward(old: Bits, zigzagged: Bits, is_float: bool) -> Bits:
    """The value ``zigzagged`` steps after ``old``."""
    ranks = rank(old, is_float)
    ranks += unzigzag(zigzagged)
    return unrank(ranks, is_float)


def rank(bits: Bits, is_float: bool) -> Bits:
    """A fresh array of integers in value order: -NaN < -inf < … < -0 < +0 < … < inf < NaN."""
    if not is_float:
        return bits.copy()
    flips = _sign_fill(bits)
    flips |= _sign_bit(bits)
    flips ^= bits
    return flips


def unrank(ranks: Bits, is_float: bool) -> Bits:
    """The patterns of those ranks; ``ranks`` itself may be changed."""
    if not is_float:
        return ranks
    flips = _sign_fill(ranks)
    np.invert(flips, out=flips)
    flips |= _sign_bit(ranks)
    ranks ^= flips
    return ranks


def unzigzag(zigzagged: Bits) -> Bits:
    """The differences of zigzagged ones."""
    one = zigzagged.dtype.type(1)
    difference: Bits = zigzagged & one
    np.negative(difference, out=difference)
    difference ^= zigzagged >> one
    return difference


def _sign_fill(bits: Bits) -> Bits:
    """All ones where the top bit is set, else zero."""
    signed = bits.view(np.dtype(f"i{bits.dtype.itemsize}"))
    filled: Bits = (signed >> (bits.dtype.itemsize * 8 - 1)).view(bits.dtype)
    return filled


def _sign_bit(bits: Bits) -> Any:
    return bits.dtype.type(1 << (bits.dtype.itemsize * 8 - 1))


# Names of the tensors of an adapter, as in PEFT's files.
PEFT_PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"  # under the name of a target
MANIFEST_WAIT_S = 2.0  # of a request, for a delta that is being made; below the deadline of GetManifest
ALIGNMENT = 64  # tensors begin at multiples of this, in snapshots and full payloads
DigestAlgorithm = Literal["xxh3-128", "blake3"]
DEFAULT_ALGORITHM: DigestAlgorithm = "xxh3-128"
_HEX_DIGITS: dict[DigestAlgorithm, int] = {"xxh3-128": 32, "blake3": 64}
_DIGEST = re.compile("|".join(f"({name}):[0-9a-f]{{{digits}}}" for name, digits in _HEX_DIGITS.items()))


class Encoding(enum.StrEnum):
    """The coding of a payload."""

    FULL = "full"  # every tensor, raw
    DELTA = "delta"  # per tensor, the changes since the base


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its data."""

    name: str  # Hugging Face name; tied weights appear once
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * element_type(self.dtype).bits_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry(TensorSpec):
    """One tensor of a version: the place of its bytes, and the digest of the whole tensor."""

    offset: int
    length: int  # equals size_bytes in a snapshot; of the coded part in a delta, 0 when nothing changed
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterIdentity:
    """The facts about a LoRA adapter that its tensors do not state: its sizes, its targets and the weights below it.

    A version of an adapter holds only the adapter's tensors. Two versions with equal tensors are different policies on
    different bases, so the identity is part of the version's digest, of a manifest and of a checkpoint.

    >>> AdapterIdentity(rank=8, alpha=16.0, targets=("q_proj",), base="xxh3-128:00").scale
    2.0
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last parts of module names, sorted
    base: str  # digest of the weights below, as of a version that holds them

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    @property
    def digest_text(self) -> str:
        """The text that a version's digest covers."""
        return f"lora\0{self.rank}\0{self.alpha!r}\0{','.join(self.targets)}\0{self.base}\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A weight version and its tensors, in storage order.

    >>> Manifest.of(run_id="r", policy="p", version=0, tensors=[]).size_bytes
    0
    """

    run_id: str
    policy: str
    version: int
    digest: str
    tensors: tuple[TensorEntry, ...]
    adapter: AdapterIdentity | None = None  # None: the tensors are all weights of a model

    @classmethod
    def of(
        cls,
        *,
        run_id: str,
        policy: str,
        version: int,
        tensors: Iterable[TensorEntry],
        adapter: AdapterIdentity | None = None,
    ) -> Manifest:
        """Create a manifest, with the digest of its tensors."""
        entries = tuple(tensors)
        digest = version_digest(entries, adapter)
        return cls(run_id=run_id, policy=policy, version=version, digest=digest, tensors=entries, adapter=adapter)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first tensor's begin to the last one's end."""
        return max((entry.offset + entry.length for entry in self.tensors), default=0)


_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseVersion:
    """The version that a delta starts from."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The payload to fetch, and the version that results. Offsets in ``target`` are offsets in the payload."""

    payload_id: str
    encoding: Encoding
    size_bytes: int
    target: Manifest
    base: BaseVersion | None = None
    encode_s: float = 0.0  # time of the encoding
    file: tuple[Path, int] | None = None  # at its source: a file that holds the payload, and the payload's offset there


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRequest:
    """The version that a receiver requests, and the receiver's transports.

    >>> PayloadRequest(run_id="r", policy="model0", version=7).base is None
    True
    """

    run_id: str
    policy: str
    version: int
    base: BaseVersion | None = None  # held by the receiver; None asks for the full snapshot
    wait_s: float = MANIFEST_WAIT_S  # longest wait for the answer
    transports: tuple[str, ...] = ()  # that the receiver can use, as ``weights.transports`` of the recipe writes them
    host: str = ""  # names the receiver's host
    can_map: bool = False  # the receiver is on the source's host and maps files


_FIRST_S = 30.0
_BYTES_PER_S = 0.1e9  # below the slowest measured coding: one thread, 17% of the elements changed


class PayloadNotReadyError(DeadlineError):
    """A delta that is still being made: ask again."""

    def __init__(self, payload: str, *, started: bool, size_bytes: int) -> None:
        """``started``: the delta is being coded now; else the source codes another one first. ``size_bytes``: of the whole
        version."""
        super().__init__(
            f"{payload} {'is being made' if started else 'waits for another one'}: ask again", wait=payload
        )
        self.started = started
        self.size_bytes = size_bytes


def making_deadline_s(size_bytes: int) -> float:
    """The longest that a receiver waits for a delta of a version of ``size_bytes``, before it fetches the snapshot.

    >>> making_deadline_s(16_400_000_000)
    194.0
    """
    return _FIRST_S + size_bytes / _BYTES_PER_S


def full_payload_id(manifest: Manifest) -> str:
    """The name of a version's full payload: the same name means the same bytes, at every server."""
    return f"{manifest.policy}:{manifest.version}:full:{manifest.digest}"


def delta_payload_id(policy: str, base: int, version: int, content_digest: str) -> str:
    """Names a delta; ``content_digest`` is of its bytes, because the deltas of two encoders of one change may differ."""
    return f"{policy}:{base}-{version}:{content_digest}"


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(specs: Iterable[TensorSpec], algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> tuple[TensorEntry, ...]:
    """Raw tensors one after another by name, aligned, with dummy digests as long as the algorithm's.

    By name, so that all holders of a version have the same layout.
    """
    entries: list[TensorEntry] = []
    offset = 0
    for spec in sorted(specs, key=attrgetter("name")):
        if entries and spec.name == entries[-1].name:
            raise ValueError(f"tensor {spec.name!r} appears twice; tied weights are published once")
        offset = align(offset)
        entries.append(
            TensorEntry(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                offset=offset,
                length=spec.size_bytes,
                digest=f"{algorithm}:{'0' * _HEX_DIGITS[algorithm]}",
            )
        )
        offset += spec.size_bytes
    return tuple(entries)


def named_weights(model: Any) -> dict[str, Any]:
    """Name to ``torch.Tensor`` of a model, in module order; tied weights once, under their first name (``model.embed_tokens.weight``)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=True)}


def same_tensors(left: Iterable[TensorSpec], right: Iterable[TensorSpec]) -> bool:
    """Whether both have the same names, dtypes and shapes, in any order: only then a delta makes sense."""
    return {t.name: (t.dtype, t.shape) for t in left} == {t.name: (t.dtype, t.shape) for t in right}


def check_same_adapter(own: AdapterIdentity | None, other: AdapterIdentity | None, where: str) -> None:
    """Raise ``ModelMismatchError``, naming each difference, unless ``where`` holds the adapter that is expected here."""
    if own == other:
        return
    if own is None or other is None:
        words = {True: "all weights of a model", False: "an adapter"}
        raise ModelMismatchError(f"{where} holds {words[other is None]}, expected {words[own is None]}")
    facts = [
        {"base": a.base, "rank": a.rank, "alpha": f"{a.alpha:g}", "targets": ", ".join(a.targets)} for a in (own, other)
    ]
    here, there = facts
    differences = [f"{name} {there[name]}, expected {here[name]}" for name in here if here[name] != there[name]]
    raise ModelMismatchError(f"{where} holds another adapter: {'; '.join(differences)}")


def algorithm_of(digest: str) -> DigestAlgorithm:
    """The algorithm that a digest names. ``CorruptDataError`` for a text that is no digest."""
    found = _DIGEST.fullmatch(digest)
    if found is None:
        forms = " or ".join(f"{known}:<{digits} hexadecimal digits>" for known, digits in _HEX_DIGITS.items())
        raise CorruptDataError(f"digest {digest!r} is not of the form {forms}")
    return "blake3" if found[2] else "xxh3-128"


def tensor_digest(
    data: npt.NDArray[np.generic] | bytes | memoryview,
    algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
    *,
    num_threads: int = 1,
) -> str:
    """Digest of the raw bytes of one tensor. Arrays must be contiguous and little-endian.

    ``num_threads`` is for blake3, which can use several; xxh3-128 is one thread always.
    """
    return digest_parts([data], algorithm, num_threads=num_threads)


def digest_parts(
    parts: Iterable[npt.NDArray[np.generic] | bytes | memoryview],
    algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
    *,
    num_threads: int = 1,
) -> str:
    """The digest of the concatenation of parts, without a copy.

    >>> digest_parts([b"we", b"ights"]) == tensor_digest(b"weights")
    True
    """
    state = _hasher(algorithm, num_threads)
    for part in parts:  # large buffers are digested without the interpreter lock
        state.update(part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part)
    return f"{algorithm}:{state.hexdigest()}"


def version_digest(tensors: Iterable[TensorEntry], adapter: AdapterIdentity | None = None) -> str:
    """Digest of a whole version from the records of its tensors, in their algorithm (xxh3-128 when there are none).

    The digest of an adapter's version covers its identity too, and so its base.

    ``CorruptDataError`` when an entry's digest is none, or when two entries name different algorithms.
    """
    entries = sorted(tensors, key=attrgetter("name"))
    algorithms = {algorithm_of(entry.digest) for entry in entries} or {DEFAULT_ALGORITHM}
    if len(algorithms) > 1:
        raise CorruptDataError(f"one version has digests of several algorithms: {sorted(algorithms)}")
    algorithm = algorithms.pop()
    state = _hasher(algorithm)
    if adapter is not None:
        state.update(adapter.digest_text.encode())
    for entry in entries:
        shape = ",".join(str(extent) for extent in entry.shape)
        state.update(f"{entry.name}\0{entry.dtype}\0{shape}\0".encode())
        state.update(bytes.fromhex(entry.digest.partition(":")[2]))
    return f"{algorithm}:{state.hexdigest()}"


def _hasher(algorithm: DigestAlgorithm, num_threads: int = 1) -> Any:
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128()
    from blake3 import blake3  # only installed with the services that move weights

    return blake3(max_threads=num_threads)


# -- snapshot files -----------------------------------------------------------------------------------------------------
#
# Immutable weight versions in named, memory-mapped files, normally in /dev/shm. One process, or several of one host (the
# ranks of a trainer, each with its own rows), writes a file under a hidden name. The first process seals the file (digests,
# manifest) and renames the file, so a visible name holds a whole version. The name has run, policy, version and the pid of
# the process that reserved the file. Users hold a shared ``flock``, so ``sweep_orphans`` removes exactly the files without a
# living writer and without a user. Space is reserved before the first byte, so a full /dev/shm is an error here, not a bus
# error later. A mapping outlives its file's name.
#
# Layout: magic, size of the manifest, manifest (JSON), padding to a page, tensors at their manifest offsets.

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


class _MappedFile:
    """A version in a mapped file, whose lock this process holds until ``close``."""

    def __init__(self, path: Path, file_descriptor: int, mapped: mmap.mmap, magic: bytes) -> None:
        """``CorruptDataError`` when the file does not begin as one with ``magic``."""
        self.path = path  # the final name
        self._fd = file_descriptor
        self._map = mapped
        self.manifest, self.data_offset = _read_manifest(mapped, path, magic)

    def bits(self, entry: TensorEntry) -> Bits:
        """The flat array of one tensor's bits. Read-only in a sealed file; of an unfinished one, delete it before ``seal``."""
        kind = element_type(entry.dtype).bits_dtype
        return np.frombuffer(self._map, kind, entry.num_elements, self.data_offset + entry.offset)

    def close(self) -> None:
        """Release the file without removing the file. Arrays over the mapping stay valid."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # said, because the mapping, which holds on to it, may live on
            os.close(self._fd)
            self._fd = -1


class SnapshotWriter(_MappedFile):
    """An unfinished version, mapped by one of its writers: every writer fills its own rows of any tensor.

    The first writer reserves the file (``create``), others of the host ``join``. When every tensor is filled, the first one
    ``seal``s the file, or ``abandon`` removes the file.
    """

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return self.manifest.tensors

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
        entries = lay_out(specs, algorithm)
        draft = Manifest.of(run_id=run_id, policy=policy, version=version, tensors=entries, adapter=adapter)
        encoded = _MANIFEST.dump_json(draft)
        reserved = -(-(_HEADER.size + len(encoded)) // _PAGE) * _PAGE
        # Run and policy are quoted, so that dots only separate the parts.
        run, name = (quote(part, safe="").replace(".", "%2E") for part in (run_id, policy))
        complaints = []
        for directory in directories:
            path = directory / f"{_PREFIX}.{run}.{name}.{version}.{os.getpid()}.{_SUFFIX}"
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
                found = os.statvfs(directory)
                complaints.append(f"{directory}: {error.strerror} ({found.f_bavail * found.f_frsize} bytes free)")
                continue
            mapped = mmap.mmap(descriptor, reserved + draft.size_bytes)
            mapped[: _HEADER.size + len(encoded)] = _HEADER.pack(_DRAFT_MAGIC, len(encoded)) + encoded
            return cls(path, descriptor, mapped, _DRAFT_MAGIC)
        raise SnapshotSpaceError(
            f"no room for version {version} of {policy!r} ({reserved + draft.size_bytes} bytes): {'; '.join(complaints)}. "
            "Free memory there, keep fewer versions, or name another snapshot directory"
        )

    @classmethod
    def join(cls, path: Path) -> SnapshotWriter:
        """Map the file that another writer of this host has reserved for ``path``.

        Raises:
            OSError: the file does not exist (any more), or this process cannot see the file.
            CorruptDataError: the file is no draft of a snapshot.
        """
        descriptor = os.open(_hidden(path), os.O_RDWR | os.O_CLOEXEC)
        try:
            # No process sweeps it while one of its writers is alive.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return cls(path, descriptor, mmap.mmap(descriptor, 0), _DRAFT_MAGIC)
        except (OSError, CorruptDataError):
            os.close(descriptor)
            raise

    def digests(self, entries: Iterable[TensorEntry], num_threads: int = 1) -> dict[str, str]:
        """Digests by name of tensors that all writers have filled."""
        return {
            entry.name: tensor_digest(self.bits(entry), algorithm_of(entry.digest), num_threads=num_threads)
            for entry in entries
        }

    def seal(self, digests: Mapping[str, str] | None = None) -> Manifest:
        """Write the manifest, rename the file to its final name and release the file, which is immutable from then on.

        ``digests`` by tensor name if the writers have computed them; otherwise this method digests every tensor.
        """
        known = self.digests(self.tensors) if digests is None else digests
        entries = [replace(entry, digest=known[entry.name]) for entry in self.tensors]
        draft = self.manifest
        manifest = Manifest.of(
            run_id=draft.run_id, policy=draft.policy, version=draft.version, tensors=entries, adapter=draft.adapter
        )
        encoded = _MANIFEST.dump_json(manifest)
        assert len(encoded) <= self.data_offset - _HEADER.size, "a digest is longer than its placeholder"
        self._map[: _HEADER.size + len(encoded)] = _HEADER.pack(_MAGIC, len(encoded)) + encoded
        os.rename(_hidden(self.path), self.path)
        self.close()
        return manifest

    def abandon(self) -> None:
        """Remove an unfinished file. A second call, or a call after ``seal``, has no effect."""
        _hidden(self.path).unlink(missing_ok=True)
        self.close()


class Snapshot(_MappedFile):
    """A sealed version, mapped read-only. Its arrays and ``data`` stay valid after ``retire`` and ``close``."""

    def __init__(self, path: Path) -> None:
        """``CorruptDataError`` when the file is no snapshot, ``OSError`` when there is none."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            super().__init__(path, descriptor, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), _MAGIC)
        except (OSError, CorruptDataError):
            os.close(descriptor)
            raise
        except ValueError as error:  # an empty file
            os.close(descriptor)
            raise CorruptDataError(f"{path}: {error}") from error
        self.data = memoryview(self._map)[self.data_offset :]  # manifest offsets are offsets in it

    def retire(self) -> None:
        """Remove the file. Its memory is free when the last array over the mapping is gone."""
        self.path.unlink(missing_ok=True)
        self.close()


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
        manifest = _MANIFEST.validate_json(mapped[_HEADER.size : _HEADER.size + size], strict=True)
    except ValueError as error:
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
