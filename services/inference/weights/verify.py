"""Decodes a fetched payload and verifies its changes against the manifest's digests.

No weights are written. A changed tensor is digested chunk by chunk: unchanged chunks in place, changed ones in a scratch
buffer of one chunk, so that verification needs no second copy of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.common.errors import CorruptDataError
from services.common.weights.codec import CHUNK_ELEMENTS, ChunkChange, decode_tensor
from services.common.weights.elements import Bits, element_type
from services.common.weights.manifest import Manifest, Payload, TensorEntry, algorithm_of, digest_parts, tensor_digest
from services.inference.engine.threads import few_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A decoded and verified payload, ready to be written."""

    manifest: Manifest
    whole: Mapping[str, Bits] = field(default_factory=dict)  # tensors to replace
    changes: Mapping[str, Sequence[ChunkChange]] = field(default_factory=dict)  # tensors to change in place
    num_changes: int
    borrowed: bool = False  # ``whole`` is in shared memory


def verify_full(payload: Payload, data: memoryview, *, borrowed: bool = False) -> Verified:
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
        _check(entry, tensor_digest(bits, algorithm_of(entry.digest)))
        return bits

    tensors = payload.target.tensors
    _check_places(tensors, len(data), apart=True)  # or a delta written into one tensor would change another
    with few_threads("weights.verify") as pool:
        whole = {entry.name: pool.submit(check, entry) for entry in _largest_first(tensors)}
        return Verified(
            manifest=payload.target,
            whole={entry.name: whole[entry.name].result() for entry in tensors},
            num_changes=sum(entry.num_elements for entry in tensors),
            borrowed=borrowed,
        )


def verify_delta(payload: Payload, data: memoryview, held: Manifest, bits: Mapping[str, Bits]) -> Verified:
    """Verify a delta against ``bits``, which are not changed. ``CorruptDataError`` if the result differs from the manifest."""
    changes: dict[str, Sequence[ChunkChange]] = {}
    known = {entry.name: entry for entry in held.tensors}
    _check_places(payload.target.tensors, len(data), apart=False)
    with few_threads("weights.verify") as pool:
        checks = []
        # Decoding is many short calls, which threads would not speed up; digesting is few long ones.
        for entry in _largest_first(payload.target.tensors):
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
            checks.append(pool.submit(_check_changed, entry, old, decoded))
        for check in checks:
            check.result()
    num_changes = sum(change.num_changes for decoded in changes.values() for change in decoded)
    return Verified(manifest=payload.target, changes=changes, num_changes=num_changes)


def _check_places(entries: Sequence[TensorEntry], size_bytes: int, *, apart: bool) -> None:
    """Check the tensors' offsets, which digests do not cover; they come from the source of the manifest."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset < 0 or entry.length < 0 or entry.offset + entry.length > size_bytes:
            raise CorruptDataError(f"the payload is too short for tensor {entry.name}")
        if apart and entry.length:
            if entry.offset < end:
                raise CorruptDataError(f"tensor {entry.name} lies on another tensor's bytes")
            end = entry.offset + entry.length


def _largest_first(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Largest first, so that no thread begins a large one when the others are done."""
    return sorted(entries, key=lambda entry: -entry.size_bytes)


def _check_changed(entry: TensorEntry, old: Bits, changes: Sequence[ChunkChange]) -> None:
    _check(entry, digest_parts(_parts(old, changes), algorithm_of(entry.digest)))


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


def _check(entry: TensorEntry, found: str) -> None:
    if found != entry.digest:
        raise CorruptDataError(f"tensor {entry.name} has digest {found}, the manifest says {entry.digest}")
