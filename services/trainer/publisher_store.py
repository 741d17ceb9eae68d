"""What a publisher can serve: the last snapshots, and deltas between them, made on demand and kept.

Knows nothing about gRPC. A payload is leased while it is read, so that nothing is removed under a reader.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from services.common.errors import BaseUnavailableError, NotFoundError, VersionConflictError, VersionUnavailableError
from services.common.weights.codec import encode_tensor
from services.common.weights.manifest import BaseVersion, Encoding, Manifest, Payload, same_tensors
from services.common.weights.snapshot_file import Snapshot

log = structlog.get_logger()

KEPT_DELTAS = 4


@dataclass(frozen=True, slots=True)
class _Delta:
    payload: Payload
    data: bytes


class PublisherStore:
    """The versions of one policy of one run."""

    def __init__(self, run_id: str, policy: str, *, keep: int, delta: bool, full_every: int = 0) -> None:
        self._run_id = run_id
        self._policy = policy
        self._keep = max(2 if delta else 1, keep)  # a delta needs its base
        self._delta = delta
        self._full_every = full_every
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self._deltas: OrderedDict[str, _Delta] = OrderedDict()
        self._encoding = threading.Lock()  # a delta is made once, whoever asks first

    @property
    def newest(self) -> int:
        """The newest version held; -1 when none is."""
        return next(reversed(self._snapshots), -1)

    def add(self, path: Path) -> Manifest:
        """Serve a sealed snapshot. Adding the same again is harmless; another digest for its number is refused."""
        snapshot = Snapshot(path)
        manifest = snapshot.manifest
        known = self._snapshots.get(manifest.version)
        if known is not None:
            if known.manifest.digest != manifest.digest:
                raise VersionConflictError(
                    f"version {manifest.version} is served with digest {known.manifest.digest}, not {manifest.digest}"
                )
            return manifest
        self._snapshots[manifest.version] = snapshot
        while len(self._snapshots) > self._keep:
            _, oldest = self._snapshots.popitem(last=False)
            oldest.retire()
        return manifest

    def payload(self, run_id: str, version: int, base: BaseVersion | None) -> Payload:
        """What to fetch to hold a version: a delta when the base is held and that is smaller, else the snapshot.

        Raises:
            VersionUnavailableError: another run's, or a version that is not held.
            BaseUnavailableError: the base named is not held with that digest; ask without one.
        """
        snapshot = self._snapshots.get(version)
        if run_id != self._run_id or snapshot is None:
            held = f"run {self._run_id}, versions {list(self._snapshots)}"
            raise VersionUnavailableError(f"version {version} of run {run_id} is not held here ({held})")
        full = Payload(
            payload_id=f"{version}",
            encoding=Encoding.FULL,
            size_bytes=snapshot.manifest.size_bytes,
            target=snapshot.manifest,
        )
        in_full = not self._delta or base is None or (self._full_every and version % self._full_every == 0)
        if in_full or base is None:
            return full
        old = self._snapshots.get(base.number)
        if old is None or old.manifest.digest != base.digest:
            raise BaseUnavailableError(
                f"version {base.number} with digest {base.digest} is not held here; ask for the full snapshot"
            )
        if not same_tensors(old.manifest.tensors, snapshot.manifest.tensors):
            return full
        delta = self._encoded(old, snapshot, base)
        return delta.payload if delta.payload.size_bytes < full.size_bytes else full

    @contextmanager
    def reading(self, payload_id: str) -> Iterator[memoryview]:
        """The bytes of a payload, leased. ``NotFoundError`` when it is gone: ask for the manifest again."""
        delta = self._deltas.get(payload_id)
        if delta is not None:
            yield memoryview(delta.data)
            return
        snapshot = self._snapshots.get(int(payload_id)) if payload_id.isdigit() else None
        if snapshot is None:
            raise NotFoundError(f"payload {payload_id!r} is gone: ask for the manifest again")
        snapshot.lease()
        try:
            yield snapshot.data[: snapshot.manifest.size_bytes]
        finally:
            snapshot.release()

    def close(self) -> None:
        """Remove every snapshot that nobody reads."""
        for snapshot in self._snapshots.values():
            snapshot.retire()
        self._snapshots.clear()

    def _encoded(self, old: Snapshot, new: Snapshot, base: BaseVersion) -> _Delta:
        payload_id = f"{new.manifest.version}-from-{base.number}"
        with self._encoding:
            if payload_id not in self._deltas:
                self._deltas[payload_id] = _encode(old, new, base, payload_id)
                while len(self._deltas) > KEPT_DELTAS:
                    self._deltas.popitem(last=False)
            return self._deltas[payload_id]


def _encode(old: Snapshot, new: Snapshot, base: BaseVersion, payload_id: str) -> _Delta:
    before = {entry.name: entry for entry in old.manifest.tensors}
    parts, entries, offset = [], [], 0
    for entry in new.manifest.tensors:
        was = before[entry.name]
        part = b"" if was.digest == entry.digest else encode_tensor(old.bits(was), new.bits(entry), entry.dtype)
        entries.append(replace(entry, offset=offset, length=len(part)))
        parts.append(part)
        offset += len(part)
    target = replace(new.manifest, tensors=tuple(entries))
    log.info("delta.encoded", payload=payload_id, size_bytes=offset, full_bytes=new.manifest.size_bytes)
    return _Delta(
        Payload(payload_id=payload_id, encoding=Encoding.DELTA, size_bytes=offset, target=target, base=base),
        b"".join(parts),
    )
