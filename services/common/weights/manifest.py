"""What a weight version consists of, and what a payload carries. Frozen records; no data, no gRPC.

``Manifest`` describes a version as it lies in memory or in a snapshot file. ``Payload`` describes what a receiver
fetches to hold that version: the full snapshot, or a delta against a base that it holds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import CorruptDataError
from services.common.weights.digest import PLACEHOLDER, version_digest
from services.common.weights.dtypes import element_type

ALIGNMENT = 64  # tensors begin at multiples of this, in snapshots and full payloads


class Encoding(enum.StrEnum):
    """How a payload is coded."""

    FULL = "full"  # every tensor, raw
    DELTA = "delta"  # per tensor, what changed since the base


class Profile(enum.StrEnum):
    """How the changes of a delta are coded."""

    FAST = "fast"  # little time on both sides
    SMALL = "small"  # fewer bytes: the receiver's old weights are the context


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
    """One tensor of a version: where its bytes lie, and the digest of the whole tensor."""

    offset: int
    length: int  # equals size_bytes in a snapshot; of the coded part in a delta, 0 when nothing changed
    digest: str


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

    @classmethod
    def of(cls, *, run_id: str, policy: str, version: int, tensors: Iterable[TensorEntry]) -> Manifest:
        """A manifest whose digest is computed from its tensors."""
        entries = tuple(tensors)
        return cls(run_id=run_id, policy=policy, version=version, digest=version_digest(entries), tensors=entries)

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
    """What to fetch, and the version that must come out. Offsets in ``target`` are offsets in the payload."""

    payload_id: str
    encoding: Encoding
    size_bytes: int
    target: Manifest
    base: BaseVersion | None = None
    profile: Profile | None = None  # of a delta
    encode_s: float = 0.0  # that making it took


def full_payload_id(manifest: Manifest) -> str:
    """Names the full payload of a version: the same name is the same bytes, whoever serves it."""
    return f"{manifest.policy}:{manifest.version}:full:{manifest.digest}"


def delta_payload_id(policy: str, base: int, version: int, profile: Profile, content_digest: str) -> str:
    """Names a delta; ``content_digest`` is of its bytes, because a delta may be coded in more than one way."""
    return f"{policy}:{base}-{version}:{profile}:{content_digest}"


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(specs: Iterable[TensorSpec]) -> tuple[TensorEntry, ...]:
    """Raw tensors one after another by name, aligned, with placeholder digests.

    By name, so that everybody who holds a version lays it out alike.
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
