"""A replica's host copy of one policy's weights, in the published type: the base of deltas.

A fetched payload is decoded and verified against the manifest's digests *beside* the mirror and only then written, so the
mirror always has one version. A changed tensor is digested chunk by chunk: unchanged chunks in place, changed ones in a
scratch buffer of one chunk, so that verification needs no second copy of a model.

An interrupted write leaves the mirror dirty, and a dirty mirror accepts only a full snapshot. Relays lease its arrays; a
leased array is replaced, never written. Arrays of bits only; torch is imported only for an engine's tensors. Independent of
gRPC and the engine's version.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from services.common.errors import CorruptDataError, VersionUnavailableError
from services.common.weights.codec import CHUNK_ELEMENTS, ChunkChange, decode_tensor
from services.common.weights.snapshot import (
    DEFAULT_ALGORITHM,
    AdapterIdentity,
    BaseVersion,
    Bits,
    DigestAlgorithm,
    Encoding,
    Manifest,
    Payload,
    TensorEntry,
    TensorSpec,
    algorithm_of,
    cast_bits,
    check_same_adapter,
    digest_parts,
    element_type,
    lay_out,
    tensor_digest,
)

# For digests, which release the interpreter lock. They run beside generation, and two read about as fast as the memory of a
# small machine.
MOST_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A decoded and verified payload, ready to be written."""

    manifest: Manifest
    whole: Mapping[str, Bits] = field(default_factory=dict)  # tensors to replace
    changes: Mapping[str, Sequence[ChunkChange]] = field(default_factory=dict)  # tensors to change in place
    num_changes: int
    borrowed: bool = False  # ``whole`` is in shared memory


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
        entries = [replace(entry, digest=tensor_digest(bits[entry.name], algorithm)) for entry in lay_out(specs)]
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
            return _verify_full(payload, data, borrowed=borrowed)
        if self.base is None or payload.base != self.base:
            raise CorruptDataError(f"a delta from {payload.base} cannot be applied to {self.base}")
        assert self.manifest is not None
        return _verify_delta(payload, data, self.manifest, self._bits)

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
        for name in {*changes, *self._borrowed}:
            if leased or name in self._borrowed:
                self._bits[name] = self._bits[name].copy()
            for part in changes.get(name, ()):
                part.write_to(self._bits[name])
        self._borrowed.clear()

    def lease(self) -> tuple[Manifest, Mapping[str, Bits]]:
        """The held version and its arrays, unchanged until ``release``; meanwhile writes go to new arrays.

        Raises:
            VersionUnavailableError: no complete version is held now.
        """
        with self._lock:
            if self._writing or self.dirty or self.manifest is None:
                raise VersionUnavailableError(f"the mirror of {self.policy} holds no whole version at this moment")
            self._num_leases += 1
            return self.manifest, dict(self._bits)

    def hold(self) -> None:
        """Until ``release``, writes replace arrays instead of changing them, for any held version."""
        with self._lock:
            self._num_leases += 1

    def release(self) -> None:
        with self._lock:
            self._num_leases -= 1

    def host_tensors(self) -> dict[str, Any]:
        """The mirror as torch tensors that share its memory, for a whole ``WeightUpdate``."""
        import torch

        assert self.manifest is not None
        views = {}
        for entry in self.manifest.tensors:
            signed = self._bits[entry.name].view(f"i{element_type(entry.dtype).bits_dtype.itemsize}")
            kind: torch.dtype = getattr(torch, entry.dtype)
            views[entry.name] = torch.from_numpy(signed).view(kind).view(entry.shape)
        return views

    def host_arrays(self) -> dict[str, Any]:
        """The mirror as arrays of bits, for engines without torch."""
        assert self.manifest is not None
        return {entry.name: self._bits[entry.name].reshape(entry.shape) for entry in self.manifest.tensors}


def _verify_full(payload: Payload, data: memoryview, *, borrowed: bool = False) -> Verified:
    """Verify a snapshot; its tensors are views of ``data``. ``CorruptDataError`` if one differs from the manifest."""

    def check(entry: TensorEntry) -> Bits:
        kind = element_type(entry.dtype).bits_dtype
        if entry.length != entry.size_bytes:
            raise CorruptDataError(
                f"tensor {entry.name} takes {entry.size_bytes} bytes, the payload has {entry.length}"
            )
        bits = np.frombuffer(data, dtype=kind, count=entry.num_elements, offset=entry.offset)
        if not bits.flags.writeable or not bits.flags.aligned:
            bits = bits.copy()  # the mirror writes deltas into the array later
        _check(entry, (bits,))
        return bits

    tensors = payload.target.tensors
    _check_places(tensors, len(data), apart=True)  # or a delta written into one tensor would change another
    # The largest first, so that no thread begins a large one at the end.
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "weights.verify") as pool:
        whole = {
            entry.name: pool.submit(check, entry)
            for entry in sorted(tensors, key=attrgetter("size_bytes"), reverse=True)
        }
        return Verified(
            manifest=payload.target,
            whole={entry.name: whole[entry.name].result() for entry in tensors},
            num_changes=sum(entry.num_elements for entry in tensors),
            borrowed=borrowed,
        )


def _verify_delta(payload: Payload, data: memoryview, held: Manifest, bits: Mapping[str, Bits]) -> Verified:
    """Verify a delta against ``bits``, which are not changed. ``CorruptDataError`` if the result differs from the manifest."""
    changes: dict[str, Sequence[ChunkChange]] = {}
    known = {entry.name: entry for entry in held.tensors}
    _check_places(payload.target.tensors, len(data), apart=False)
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "weights.verify") as pool:
        checks = []
        # Decoding is many short calls, which threads would not speed up; digesting is few long ones.
        for entry in sorted(payload.target.tensors, key=attrgetter("size_bytes"), reverse=True):
            before = known.get(entry.name)
            if before is None or (before.dtype, before.shape) != (entry.dtype, entry.shape):
                raise CorruptDataError(f"the delta has a tensor {entry.name} that this mirror has not")
            if not entry.length:
                if before.digest != entry.digest:
                    raise CorruptDataError(
                        f"the delta does not change {entry.name}, but the target's digest is another"
                    )
                continue
            old = bits[entry.name]
            decoded = list(decode_tensor(old, data[entry.offset : entry.offset + entry.length], entry.dtype))
            changes[entry.name] = decoded
            checks.append(pool.submit(_check, entry, _parts(old, decoded)))
        for check in checks:
            check.result()
    num_changes = sum(change.num_changes for decoded in changes.values() for change in decoded)
    return Verified(manifest=payload.target, changes=changes, num_changes=num_changes)


def _check_places(entries: Sequence[TensorEntry], size_bytes: int, *, apart: bool) -> None:
    """Check the tensors' offsets, which digests do not cover; they come from the source of the manifest."""
    end = 0
    for entry in sorted(entries, key=attrgetter("offset")):
        if entry.offset < 0 or entry.length < 0 or entry.offset + entry.length > size_bytes:
            raise CorruptDataError(f"the payload is too short for tensor {entry.name}")
        if apart and entry.length:
            if entry.offset < end:
                raise CorruptDataError(f"tensor {entry.name} lies on another tensor's bytes")
            end = entry.offset + entry.length


def _parts(old: Bits, changes: Sequence[ChunkChange]) -> Iterator[Bits]:
    """The changed tensor in pieces; each piece overwrites the last one."""
    scratch = np.empty(min(CHUNK_ELEMENTS, len(old)), dtype=old.dtype)
    done = 0
    for change in changes:
        if done < change.start:
            yield old[done : change.start]
        chunk = old[change.start : change.start + CHUNK_ELEMENTS]
        done = change.start + len(chunk)
        if change.positions is None:
            yield change.values
            yield chunk[len(change.values) :]
            continue
        # Smaller pieces, which would stay in the processor's cache, cost more in calls than they save.
        changed = scratch[: len(chunk)]
        np.copyto(changed, chunk)
        changed[change.positions] = change.values
        yield changed
    if done < len(old):
        yield old[done:]


def _check(entry: TensorEntry, parts: Iterable[Bits]) -> None:
    found = digest_parts(parts, algorithm_of(entry.digest))
    if found != entry.digest:
        raise CorruptDataError(f"tensor {entry.name} has digest {found}, the manifest says {entry.digest}")


def _own_bits(tensor: Any, dtype: str) -> Bits:
    """The bits of a torch tensor, cast; always a copy, because the engine writes into the tensor later."""
    import torch

    source = str(tensor.dtype).removeprefix("torch.")
    kind = element_type(source)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.bits_dtype.itemsize]
    bits: Bits = tensor.detach().cpu().contiguous().view(-1).view(integers).numpy().view(kind.bits_dtype)
    cast = cast_bits(bits, source, dtype)
    return bits.copy() if cast is bits else cast
