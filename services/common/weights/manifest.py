"""The records of weight versions and of payloads, and their digests. Frozen; no data, no gRPC.

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
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import CorruptDataError, ModelMismatchError
from services.common.weights.elements import element_type

# Names of the tensors of an adapter, as in PEFT's files.
PEFT_PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"  # under the name of a target

ALIGNMENT = 64  # tensors begin at multiples of this, in snapshots and full payloads

DigestAlgorithm = Literal["xxh3-128", "blake3"]

_HEX_DIGITS: dict[DigestAlgorithm, int] = {"xxh3-128": 32, "blake3": 64}

DEFAULT_ALGORITHM: DigestAlgorithm = "xxh3-128"


def placeholder(algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> str:
    """A dummy digest with the length of the algorithm's digests, to compute layouts before data exists."""
    return f"{algorithm}:{'0' * _HEX_DIGITS[algorithm]}"


PLACEHOLDER = placeholder()


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
        return self.num_elements * element_type(self.dtype).size_bytes


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

    >>> held = AdapterIdentity(rank=8, alpha=16.0, targets=("q_proj",), base="xxh3-128:00")
    >>> held.scale, AdapterIdentity.from_json(held.to_json()) == held
    (2.0, True)
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

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets), "base": self.base}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AdapterIdentity:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` when the data is no identity."""
        targets = data["targets"]
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise ValueError(f"targets of an adapter are names, got {targets!r}")
        return cls(
            rank=int(data["rank"]), alpha=float(data["alpha"]), targets=tuple(targets), base=str(data["base"])
        )  # fmt: skip


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

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "policy": self.policy,
            "version": self.version,
            "digest": self.digest,
            "tensors": [[t.name, t.dtype, list(t.shape), t.offset, t.length, t.digest] for t in self.tensors],
            **({} if self.adapter is None else {"adapter": self.adapter.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Raises ``CorruptDataError`` when the data is no manifest."""
        try:
            return cls(
                run_id=str(data["run_id"]),
                policy=str(data["policy"]),
                version=int(data["version"]),
                digest=str(data["digest"]),
                tensors=tuple(
                    TensorEntry(name=n, dtype=d, shape=tuple(s), offset=int(o), length=int(size), digest=x)
                    for n, d, s, o, size, x in data["tensors"]
                ),
                adapter=AdapterIdentity.from_json(data["adapter"]) if "adapter" in data else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"not a weight manifest: {error!r}") from error


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
    choice: str = ""  # why this payload, with the estimated costs; empty when there was no choice
    file: tuple[Path, int] | None = None  # at its source: a file that holds the payload, and the payload's offset there


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRates:
    """Rates that a receiver measured in its last fetches, in bytes per second; 0: not measured."""

    link: float = 0.0  # payload bytes over a network
    decode: float = 0.0  # bytes of the whole version, whose delta was decoded and verified


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
    wait_s: float | None = None  # longest wait for the answer; None waits until the payload is made
    can_map: bool = False  # the receiver is on the source's host and maps files
    rates: ReceiverRates = ReceiverRates()


def full_payload_id(manifest: Manifest) -> str:
    """The name of a version's full payload: the same name means the same bytes, at every server."""
    return f"{manifest.policy}:{manifest.version}:full:{manifest.digest}"


def delta_payload_id(policy: str, base: int, version: int, content_digest: str) -> str:
    """Names a delta; ``content_digest`` is of its bytes, because merged deltas of one change may differ."""
    return f"{policy}:{base}-{version}:{content_digest}"


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(specs: Iterable[TensorSpec]) -> tuple[TensorEntry, ...]:
    """Raw tensors one after another by name, aligned, with placeholder digests.

    By name, so that all holders of a version have the same layout.
    """
    entries: list[TensorEntry] = []
    names: set[str] = set()
    offset = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        if spec.name in names:
            raise ValueError(f"tensor {spec.name!r} appears twice; tied weights are published once")
        names.add(spec.name)
        offset = align(offset)
        entries.append(
            TensorEntry(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                offset=offset,
                length=spec.size_bytes,
                digest=PLACEHOLDER,
            )
        )
        offset += spec.size_bytes
    return tuple(entries)


def with_digest(entry: TensorEntry, digest: str) -> TensorEntry:
    """The same entry with its data's digest."""
    return replace(entry, digest=digest)


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
    differences = [
        f"{name} {there}, expected {here}"
        for name, here, there in (
            ("base", own.base, other.base),
            ("rank", own.rank, other.rank),
            ("alpha", f"{own.alpha:g}", f"{other.alpha:g}"),
            ("targets", ", ".join(own.targets), ", ".join(other.targets)),
        )
        if here != there
    ]
    raise ModelMismatchError(f"{where} holds another adapter: {'; '.join(differences)}")


def algorithm_of(digest: str) -> DigestAlgorithm:
    """The algorithm that a digest names. ``CorruptDataError`` for a text that is no digest."""
    name, _, value = digest.partition(":")
    if name not in _HEX_DIGITS or len(value) != _HEX_DIGITS[name] or not _is_hex(value):
        forms = " or ".join(f"{known}:<{digits} hexadecimal digits>" for known, digits in _HEX_DIGITS.items())
        raise CorruptDataError(f"digest {digest!r} is not of the form {forms}")
    return name


def tensor_digest(
    data: npt.NDArray[np.generic] | bytes | memoryview,
    algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
    *,
    num_threads: int = 1,
) -> str:
    """Digest of the raw bytes of one tensor. Arrays must be contiguous and little-endian.

    ``num_threads`` is for blake3, which can use several; xxh3-128 is one thread always.
    """
    raw = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data
    state = _hasher(algorithm, num_threads)
    state.update(raw)  # releases the interpreter lock for large buffers, so threads may digest beside other work
    return f"{algorithm}:{state.hexdigest()}"


def digest_parts(
    parts: Iterable[npt.NDArray[np.generic] | bytes | memoryview], algorithm: DigestAlgorithm = DEFAULT_ALGORITHM
) -> str:
    """The digest of the concatenation of parts, without a copy.

    >>> digest_parts([b"we", b"ights"]) == tensor_digest(b"weights")
    True
    """
    state = _hasher(algorithm)
    for part in parts:
        state.update(part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part)
    return f"{algorithm}:{state.hexdigest()}"


def version_digest(tensors: Iterable[TensorEntry], adapter: AdapterIdentity | None = None) -> str:
    """Digest of a whole version from the records of its tensors, in their algorithm (xxh3-128 when there are none).

    The digest of an adapter's version covers its identity too, and so its base.

    ``CorruptDataError`` when an entry's digest is none, or when two entries name different algorithms.
    """
    entries = sorted(tensors, key=lambda tensor: tensor.name)
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


def _is_hex(value: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in value)
