"""A replica's host copy of one policy's weights, in the published type: the base of deltas.

A fetched payload is decoded and verified *beside* the mirror and only then written, so the mirror always has one version.
An interrupted write leaves the mirror dirty, and a dirty mirror accepts only a full snapshot. Relays lease its arrays; a
leased array is replaced, never written. Arrays of bits only; torch is imported only for an engine's tensors. Independent of
gRPC and the engine's version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.common.errors import CorruptDataError, VersionUnavailableError
from services.common.weights.codec import ChunkChange
from services.common.weights.elements import Bits, cast_bits, element_type
from services.common.weights.manifest import (
    DEFAULT_ALGORITHM,
    AdapterIdentity,
    BaseVersion,
    DigestAlgorithm,
    Encoding,
    Manifest,
    Payload,
    TensorSpec,
    check_same_adapter,
    lay_out,
    tensor_digest,
    with_digest,
)
from services.inference.engine.threads import run_all
from services.inference.weights.verify import Verified, verify_delta, verify_full

_CACHE_LINE = 64  # bytes that one scattered element moves


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A leased version: its arrays do not change."""

    manifest: Manifest
    bits: Mapping[str, Bits]


class Mirror:
    """The weights of one policy; empty until the first version."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.manifest: Manifest | None = None
        self.dirty = False
        self._bits: dict[str, Bits] = {}
        self._borrowed: set[str] = set()  # tensors in shared memory: replaced, never written
        self._lock = threading.Lock()  # of the three below; verifying and writing happen in threads
        self._writing = False
        self._num_leases = 0

    @property
    def base(self) -> BaseVersion | None:
        """The base for a delta; None if only a full snapshot is possible."""
        if self.manifest is None or self.dirty:
            return None
        return BaseVersion(number=self.manifest.version, digest=self.manifest.digest)

    def fill(
        self,
        tensors: Mapping[str, Any],
        *,
        run_id: str,
        version: int,
        dtype: str,
        algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
        adapter: AdapterIdentity | None = None,
    ) -> Manifest:
        """Take the weights of a loaded model (torch tensors), cast to the published type.

        ``adapter``: they are those of this adapter, and the mirror takes no version of another.
        """
        bits = {name: _own_bits(tensor, dtype) for name, tensor in tensors.items()}
        specs = [TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
        entries = [with_digest(entry, tensor_digest(bits[entry.name], algorithm)) for entry in lay_out(specs)]
        self._bits = bits
        self._borrowed = set()
        self.manifest = Manifest.of(
            run_id=run_id, policy=self.policy, version=version, tensors=entries, adapter=adapter
        )
        self.dirty = False
        return self.manifest

    def verify(self, payload: Payload, data: memoryview, *, borrowed: bool = False) -> Verified:
        """Decode a payload beside the mirror and check every tensor against its digest. Called in a thread.

        ``data`` of a full payload becomes the mirror, without a copy; ``borrowed``: the data is mapped from a file
        that other processes share. Extra memory: the decoded changes and one chunk.

        Raises:
            CorruptDataError: the payload is damaged, or its base is not this mirror's version.
            ModelMismatchError: the payload is an adapter of another base, rank or target, or no adapter.
        """
        if self.manifest is not None:
            check_same_adapter(self.manifest.adapter, payload.target.adapter, f"version {payload.target.version}")
        if payload.encoding is Encoding.FULL:
            return verify_full(payload, data, borrowed=borrowed)
        if self.base is None or payload.base != self.base:
            raise CorruptDataError(f"a delta from {payload.base} cannot be applied to {self.base}")
        assert self.manifest is not None
        return verify_delta(payload, data, self.manifest, self._bits)

    def write(self, verified: Verified) -> None:
        """Write a verified version into the mirror. Called in a thread."""
        with self._lock:
            self._writing, leased = True, self._num_leases > 0
        self.dirty = True
        try:
            for name, bits in verified.whole.items():
                self._bits[name] = bits
                (self._borrowed.add if verified.borrowed else self._borrowed.discard)(name)
            if verified.changes:
                self._change(verified.changes, leased)
            for name in self._bits.keys() - {entry.name for entry in verified.manifest.tensors}:
                del self._bits[name]
                self._borrowed.discard(name)
            self.manifest = verified.manifest
            self.dirty = False
        finally:
            with self._lock:
                self._writing = False

    def _change(self, changes: Mapping[str, Sequence[ChunkChange]], leased: bool) -> None:
        """Write in place; leased arrays are replaced. Borrowed arrays are replaced together: one would keep their file mapped."""

        def change(name: str) -> None:
            if name in self._borrowed or (leased and name in changes):
                self._bits[name] = self._bits[name].copy()
            for part in changes.get(name, ()):
                part.write_to(self._bits[name])

        names = sorted({*changes, *self._borrowed}, key=lambda name: -self._bits[name].nbytes)
        num_changes = sum(part.num_changes for parts in changes.values() for part in parts)
        touched = _CACHE_LINE * num_changes + sum(self._bits[name].nbytes for name in self._borrowed)
        run_all([partial(change, name) for name in names], touched_bytes=touched, name="weights.write")
        self._borrowed.clear()

    @contextmanager
    def lease(self) -> Iterator[HeldWeights]:
        """The held version, unchanged during the lease; writes during the lease go to new arrays.

        Raises:
            VersionUnavailableError: no complete version is held now.
        """
        with self._lock:
            if self._writing or self.dirty or self.manifest is None:
                raise VersionUnavailableError(f"the mirror of {self.policy} holds no whole version at this moment")
            self._num_leases += 1
            held = HeldWeights(self.manifest, dict(self._bits))
        try:
            yield held
        finally:
            with self._lock:
                self._num_leases -= 1

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A context in which writes replace arrays instead of changing them, for any held version."""
        with self._lock:
            self._num_leases += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_leases -= 1

    def host_tensors(self) -> dict[str, Any]:
        """The mirror as torch tensors that share its memory, for a whole ``WeightUpdate``."""
        import torch

        assert self.manifest is not None
        views = {}
        for entry in self.manifest.tensors:
            signed = self._bits[entry.name].view(f"i{element_type(entry.dtype).size_bytes}")
            kind: torch.dtype = getattr(torch, entry.dtype)
            views[entry.name] = torch.from_numpy(signed).view(kind).view(entry.shape)
        return views

    def host_arrays(self) -> dict[str, Any]:
        """The mirror as arrays of bits, for engines without torch."""
        assert self.manifest is not None
        return {entry.name: self._bits[entry.name].reshape(entry.shape) for entry in self.manifest.tensors}


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _own_bits(tensor: Any, dtype: str) -> Bits:
    """Cast, always with a copy, because the engine writes into the tensor later."""
    bits = _bits_of(tensor)
    cast = cast_bits(bits, _dtype_name(tensor), dtype)
    return bits.copy() if cast is bits else cast


def _bits_of(tensor: Any) -> Bits:
    kind = element_type(_dtype_name(tensor))
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.size_bytes]
    array: Bits = tensor.detach().cpu().contiguous().view(-1).view(integers).numpy().view(kind.bits_dtype)
    return array
