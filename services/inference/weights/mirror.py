"""A replica's host copy of one policy's weights, in the published type: what deltas are applied to.

Everything fetched is decoded and verified *beside* the mirror; only then is it written, so the mirror is one version
or the other. A write that is interrupted leaves it dirty, and a dirty mirror takes nothing but a full snapshot.
Arrays of bits only; torch is imported where an engine wants its tensors. It knows nothing about gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.errors import CorruptDataError
from services.common.weights.codec import ChunkChange, decode_tensor
from services.common.weights.digest import tensor_digest
from services.common.weights.dtypes import Bits, cast_bits, element_type
from services.common.weights.manifest import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    TensorEntry,
    TensorSpec,
    lay_out,
    with_digest,
)


@dataclass(frozen=True, slots=True)
class Verified:
    """A payload that was decoded and found right: ready to be written."""

    manifest: Manifest
    whole: Mapping[str, Bits]  # tensors to replace
    changes: Mapping[str, Sequence[ChunkChange]]  # tensors to change in place
    num_changes: int


class Mirror:
    """The weights of one policy; empty until something is put in."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.manifest: Manifest | None = None
        self.dirty = False
        self._bits: dict[str, Bits] = {}

    @property
    def base(self) -> BaseVersion | None:
        """What a delta may start from; None when only a full snapshot will do."""
        if self.manifest is None or self.dirty:
            return None
        return BaseVersion(number=self.manifest.version, digest=self.manifest.digest)

    def fill(self, tensors: Mapping[str, Any], *, run_id: str, version: int, dtype: str) -> Manifest:
        """Take the weights of a loaded model (torch tensors), cast to the published type."""
        bits = {name: cast_bits(_bits_of(tensor), _dtype_name(tensor), dtype) for name, tensor in tensors.items()}
        specs = [TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
        entries = [with_digest(entry, tensor_digest(bits[entry.name])) for entry in lay_out(specs)]
        # Copies: the engine goes on writing into the tensors that these bits may be a view of.
        self._bits = {name: np.array(value) for name, value in bits.items()}
        self.manifest = Manifest.of(run_id=run_id, policy=self.policy, version=version, tensors=entries)
        self.dirty = False
        return self.manifest

    def verify(self, payload: Payload, data: memoryview) -> Verified:
        """Decode a payload beside the mirror and check every tensor against its digest.

        Raises:
            CorruptDataError: the payload is damaged, or its base is not what this mirror holds.
        """
        if payload.encoding is Encoding.FULL:
            return self._verify_full(payload, data)
        if self.base is None or payload.base != self.base:
            raise CorruptDataError(f"a delta from {payload.base} cannot be applied to {self.base}")
        whole: dict[str, Bits] = {}
        changes: dict[str, Sequence[ChunkChange]] = {}
        num_changes = 0
        for entry in payload.target.tensors:
            old = self._bits.get(entry.name)
            if old is None or len(old) != entry.num_elements:
                raise CorruptDataError(f"the delta has a tensor {entry.name} that this mirror has not")
            if not entry.length:
                continue  # its digest is checked with the version's: unchanged tensors keep theirs
            decoded = list(decode_tensor(old, data[entry.offset : entry.offset + entry.length], entry.dtype))
            result = old.copy()
            for change in decoded:
                change.write_to(result)
            _check(entry, result)
            num_changes += sum(change.num_changes for change in decoded)
            changes[entry.name] = decoded
        self._check_unchanged(payload)
        return Verified(payload.target, whole, changes, num_changes)

    def write(self, verified: Verified) -> None:
        """Make a verified version the mirror's own."""
        self.dirty = True
        for name, bits in verified.whole.items():
            self._bits[name] = bits
        for name, changes in verified.changes.items():
            for change in changes:
                change.write_to(self._bits[name])
        for name in self._bits.keys() - {entry.name for entry in verified.manifest.tensors}:
            del self._bits[name]
        self.manifest = verified.manifest
        self.dirty = False

    def host_tensors(self) -> dict[str, Any]:
        """The mirror as torch tensors that share its memory, for ``Engine.update``."""
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

    def _verify_full(self, payload: Payload, data: memoryview) -> Verified:
        whole: dict[str, Bits] = {}
        for entry in payload.target.tensors:
            kind = element_type(entry.dtype).bits_dtype
            if entry.length != entry.size_bytes or entry.offset + entry.length > len(data):
                raise CorruptDataError(f"the payload is too short for tensor {entry.name}")
            bits = np.frombuffer(data, dtype=kind, count=entry.num_elements, offset=entry.offset).copy()
            _check(entry, bits)
            whole[entry.name] = bits
        return Verified(payload.target, whole, {}, sum(math.prod(entry.shape) for entry in payload.target.tensors))

    def _check_unchanged(self, payload: Payload) -> None:
        assert self.manifest is not None
        held = {entry.name: entry.digest for entry in self.manifest.tensors}
        for entry in payload.target.tensors:
            if not entry.length and held.get(entry.name) != entry.digest:
                raise CorruptDataError(f"the delta leaves {entry.name} as it is, but the target's digest is another")


def _check(entry: TensorEntry, bits: Bits) -> None:
    found = tensor_digest(bits)
    if found != entry.digest:
        raise CorruptDataError(f"tensor {entry.name} has digest {found}, the manifest says {entry.digest}")


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bits_of(tensor: Any) -> Bits:
    kind = element_type(_dtype_name(tensor))
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.size_bytes]
    array: Bits = tensor.detach().cpu().contiguous().view(-1).view(integers).numpy().view(kind.bits_dtype)
    return array
