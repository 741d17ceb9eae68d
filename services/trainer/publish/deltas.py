"""Makes deltas between snapshots of one policy.

    v3 --delta--> v4 --delta--> v5 --delta--> v6        a receiver at v3 gets three, merged into one

A delta is its bytes and the payload that describes them. ``DeltaMaker`` codes one from two snapshots, or merges consecutive
ones. ``receiver_deltas`` keeps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace

from services.common.errors import InfrastructureError
from services.common.weights.codec import encode_tensor, merge_tensor
from services.common.weights.manifest import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    TensorEntry,
    delta_payload_id,
    tensor_digest,
)
from services.common.weights.snapshot_file import Snapshot


@dataclass(frozen=True, slots=True)
class Delta:
    """The coded changes from one version to another."""

    payload: Payload
    data: bytes

    @property
    def size_bytes(self) -> int:
        return self.payload.size_bytes

    def parts(self) -> dict[str, bytes]:
        """The coded change of every tensor by name; empty for an unchanged tensor."""
        return {
            entry.name: self.data[entry.offset : entry.offset + entry.length] for entry in self.payload.target.tensors
        }


class DeltaMaker:
    """Codes deltas tensor by tensor on several threads. ``stop`` fails a delta in progress with ``InfrastructureError``."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "delta.encode")
        self._stopped = False

    def encode(self, old: Snapshot, new: Snapshot) -> Delta:
        """Encode the change between two versions with the same tensors."""
        before = {entry.name: entry for entry in old.manifest.tensors}

        def code(entry: TensorEntry) -> bytes:
            was = before[entry.name]
            if was.digest == entry.digest:
                return b""
            return encode_tensor(old.bits(was), new.bits(entry), entry.dtype)

        return self._make(base_of(old.manifest), new.manifest, code)

    def merge(self, deltas: Sequence[Delta], newest: Snapshot) -> Delta:
        """Merge consecutive deltas that end at ``newest``, without the base snapshot."""
        base = deltas[0].payload.base
        assert base is not None, "a delta has a base"
        steps: list[Mapping[str, bytes]] = [delta.parts() for delta in deltas]

        def code(entry: TensorEntry) -> bytes:
            return merge_tensor([step[entry.name] for step in steps], newest.bits(entry), entry.dtype)

        return self._make(base, newest.manifest, code)

    def stop(self) -> None:
        """Stop the threads after their current tensors."""
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, base: BaseVersion, target: Manifest, code: Callable[[TensorEntry], bytes]) -> Delta:
        began = time.monotonic()
        # The largest first, so that no thread begins with a large one when the others are done.
        order = sorted(target.tensors, key=lambda entry: -entry.size_bytes)
        try:
            futures = {entry.name: self._pool.submit(code, entry) for entry in order}
            coded = {name: future.result() for name, future in futures.items()}
        except (CancelledError, RuntimeError) as error:
            if not self._stopped:
                raise
            raise InfrastructureError("this publisher is stopping") from error
        if self._stopped:  # what could still be coded is not served any more
            raise InfrastructureError("this publisher is stopping")
        entries, offset = [], 0
        for entry in target.tensors:
            length = len(coded[entry.name])
            entries.append(replace(entry, offset=offset, length=length))
            offset += length
        data = b"".join(coded[entry.name] for entry in target.tensors)
        payload = Payload(
            payload_id=delta_payload_id(target.policy, base.number, target.version, tensor_digest(data)),
            encoding=Encoding.DELTA,
            size_bytes=offset,
            target=replace(target, tensors=tuple(entries)),
            base=base,
            encode_s=time.monotonic() - began,
        )
        return Delta(payload, data)


def base_of(manifest: Manifest) -> BaseVersion:
    """The manifest's version, as the base of a delta."""
    return BaseVersion(number=manifest.version, digest=manifest.digest)
